"""Exceptions of the draft index.

DraftIndexError
    InvalidCall        an invalid slot, token or length
    InvalidStoreFile   a saved store that cannot be read
"""


class DraftIndexError(Exception):
    """Base class. A call that raises has no effect."""


class InvalidCall(DraftIndexError):
    """Invalid argument: an unused or repeated slot, a negative token, arrays of unequal size."""


class InvalidStoreFile(DraftIndexError):
    """The file is truncated, corrupted, of another format version, or not a saved store."""
