"""What `coppice` runs. The engine's processes import it as well, as all that multiprocessing spawns
imports its parent's main module: so it imports nothing of the service before it is called.
"""

from engine import heap
from engine.environment import started_by_coppice

if started_by_coppice():
    heap.begin_imports()  # the plugin ends them


def main() -> None:
    from service.cli import main

    main()
