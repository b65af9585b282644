"""Entry point of the `coppice` command and of `python -m service`.

Processes that multiprocessing spawns import their parent's main module, so the engine's processes
import this module too. For that reason it imports the service only inside `main`.
"""

import sys

from engine.runtime import process_setup
from engine.runtime.process_environment import started_by_coppice

FOREIGN_PACKAGE = """\
coppice: `import coppice` does not import coppice-client: {reason}.
The distribution `coppice` on PyPI is another project with a package of the same name. To repair
this environment, run `pip uninstall coppice`, and install coppice-rl and coppice-client again with
`pip install --force-reinstall --no-deps`."""

if started_by_coppice():
    process_setup.disable_gc()  # until the plugin calls freeze_gc


def main() -> None:
    check_client_package()

    from service.cli import main

    main()


def check_client_package() -> None:
    """Exit with an explanation if `import coppice` imports another project."""
    try:
        from coppice import Rollouts  # noqa: F401
    except ImportError as error:
        if not (error.name or "").startswith("coppice"):
            raise
        sys.exit(FOREIGN_PACKAGE.format(reason=error))


if __name__ == "__main__":
    main()
