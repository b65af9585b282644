"""Choice of the older processor as which `make test-processor` runs tests.

    python -m tests.processors NAME COMMIT

Without a name, the commit's hash selects one: CI tests all of them over time, and a run can be
repeated. One that this processor cannot run, or that it is itself, is left out.
"""

import sys
from collections.abc import Mapping

import torch

from tests.processors.sitecustomize import PROCESSORS, Processor


def can_emulate(processor: Processor, capabilities: Mapping[str, object]) -> bool:
    """True for an older processor than the one with these capabilities."""
    hides = any(value for name, value in capabilities.items() if name.startswith(processor.hidden))
    return bool(capabilities.get(processor.needs)) and hides


def choose(commit: int, capabilities: Mapping[str, object]) -> str | None:
    """Name of a processor, or None if there is none; the commit's own choice comes first."""
    names = list(PROCESSORS)
    first = commit % len(names)
    for name in names[first:] + names[:first]:
        if can_emulate(PROCESSORS[name], capabilities):
            return name
        print(f"processor {name}: cannot be emulated on this one", file=sys.stderr)
    return None


def main(asked: str, commit: str) -> None:
    capabilities = torch.cpu.get_capabilities()
    if asked and asked not in PROCESSORS:
        sys.exit(f"VARIANT must be one of {', '.join(PROCESSORS)}, got {asked}")
    if asked and not can_emulate(PROCESSORS[asked], capabilities):
        sys.exit(f"processor {asked}: cannot be emulated on this one")
    chosen = asked or choose(int(commit, 16), capabilities)
    print(f"processor: {chosen or 'none'}", file=sys.stderr)
    print(chosen or "")


if __name__ == "__main__":
    main(*sys.argv[1:])
