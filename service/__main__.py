"""Entry point of the `coppice` command and of `python -m service`.

Processes that multiprocessing spawns import their parent's main module, so the engine's processes
import this module too. For that reason it imports the service only inside `main`.
"""

from engine.launch.environment import started_by_coppice
from engine.runtime import gc_and_process_group

if started_by_coppice():
    gc_and_process_group.disable_gc()  # until the plugin calls freeze_gc


def main() -> None:
    from service.cli import main

    main()


if __name__ == "__main__":
    main()
