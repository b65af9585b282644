"""HTTP service of Coppice, which serves rollouts to RL trainers."""

from importlib.metadata import version

__version__ = version("coppice-rl")
