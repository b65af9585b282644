"""Container images, and a build that tests them without Docker."""
