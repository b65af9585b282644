"""Boot id of this host, which tells a server whether a client runs on the same machine."""

from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id() -> str | None:
    """Random id of the running kernel, which containers of a host share; None if unknown."""
    try:
        return BOOT_ID.read_text().strip() or None
    except OSError:
        return None
