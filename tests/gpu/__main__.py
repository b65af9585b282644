"""Command `python -m tests.gpu`."""

import sys

from tests.gpu.runner import main

if __name__ == "__main__":
    sys.exit(main())
