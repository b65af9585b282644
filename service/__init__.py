"""The HTTP service."""

from importlib.metadata import version

__version__ = version("coppice-rl")
