"""A program that runs miles; see tests/compat/with_ray.py."""
