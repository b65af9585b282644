"""What the draft store refuses.

DraftsError
    WrongCall     a slot, a token or a length that cannot be
    RefusedFile   a saved store that cannot be read
"""


class DraftIndexError(Exception):
    """Nothing of a refused call has been done."""


class InvalidCall(DraftIndexError):
    """A slot that nobody holds, or twice in a step; a token below zero; arrays of unlike size."""


class InvalidStoreFile(DraftIndexError):
    """Truncated, changed, of another version, or no saved store at all."""
