"""Whether an address on a stack can be one to return to: what is in front of such a one is a call."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Final

#: Bytes in front of the address that are looked at.
BYTES: Final = 7


def x86_64(before: bytes) -> bool:
    """Judge by the 7 bytes in front: call rel32 (E8), or an indirect call (FF /2) of 2, 3, 4, 6 or 7 bytes."""
    if len(before) != BYTES:
        return False
    return before[2] == 0xE8 or any(
        before[-n] == 0xFF and before[1 - n] >> 3 & 7 == 2 for n in (2, 3, 4, 6, 7)
    )


def aarch64(before: bytes) -> bool:
    """Judge by the last instruction: BL, BLR, or BLR with pointer authentication."""
    if len(before) != BYTES:
        return False
    word = int.from_bytes(before[-4:], "little")
    return word >> 26 == 0b100101 or word & 0xFFFFFC1F == 0xD63F0000 or word & 0xFEFFF800 == 0xD63F0800


def _anything(before: bytes) -> bool:
    return len(before) == BYTES


#: Of this machine.
follows_call: Final[Callable[[bytes], bool]] = {"x86_64": x86_64, "aarch64": aarch64}.get(
    platform.machine(), _anything
)
