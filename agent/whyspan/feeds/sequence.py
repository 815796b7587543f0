"""Where a feed stands in its publisher's sequence of numbers: gaps, and starts of the engine. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """``missed`` numbers before this one; ``restarted``: the publisher began anew, ``missed`` counts from its start."""

    missed: int
    restarted: bool


class Sequence:
    """The number that comes next. What was published before the first message heard is not missed."""

    def __init__(self) -> None:
        self.next: int | None = None

    def place(self, seq: int) -> Place:
        """Say what a message with this number means, without going on."""
        if self.next is None:
            return Place(0, False)
        # One publisher sends in order: a smaller number is another publisher's, which starts at 0.
        return Place(seq - self.next, False) if seq >= self.next else Place(seq, True)

    def advance(self, seq: int) -> None:
        """Go on behind this number."""
        self.next = seq + 1


def number(frame: bytes) -> int | None:
    """Return the number in a frame of 8 bytes, big endian and signed; None when it is no such frame."""
    return int.from_bytes(frame, "big", signed=True) if len(frame) == 8 else None
