"""Programs that run verl; see tests/compat/with_ray.py."""
