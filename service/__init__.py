"""HTTP server of Coppice: generates rollouts for RL trainers, on top of the vLLM engine."""

from importlib.metadata import version

__version__ = version("coppice-rl")
