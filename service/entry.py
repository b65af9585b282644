"""What `coppice` runs. The engine's processes import it as well, as all that multiprocessing spawns
imports its parent's main module: so it imports nothing of the service before it is called.
"""

from engine.launch.environment import started_by_coppice
from engine.runtime import gc_freeze

if started_by_coppice():
    gc_freeze.disable_gc()  # the plugin ends them


def main() -> None:
    from service.cli import main

    main()
