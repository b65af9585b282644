"""Extension of vLLM's worker, whose import installs timers in EngineCore and in each rank.

A plugin of vLLM could do so, but an engine of ours loads no other plugin than the project's own.
"""

from bench.gpu import timers
from engine.launch.worker_extension import WorkerExtension

timers.install()


class TimedWorker(WorkerExtension):
    """The project's own extension, in a process with timers."""
