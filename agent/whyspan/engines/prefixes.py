"""Which prompts begin alike: by keyed hashes of their blocks, never by text."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_DIGITS: Final = 8
#: Block-end hashes, and blocks by position, that are remembered per engine core.
MAX_ENDS: Final = 65_536
MAX_BLOCKS: Final = 65_536
#: So many equal blocks after the divergence make two prompts alike.
MIN_ALIKE: Final = 2


def _split(text: str) -> list[str]:
    return [text[i : i + _DIGITS] for i in range(0, len(text) - _DIGITS + 1, _DIGITS)]


class Prefixes:
    """The prompts an engine core has been given lately. Taking one in costs a look-up or two per block."""

    def __init__(self) -> None:
        self._ends: OrderedDict[str, None] = OrderedDict()  # hashes of whole prefixes, block by block
        self._latest: OrderedDict[tuple[int, str], int] = (
            OrderedDict()
        )  # (position, block) -> prompt that had it last
        self._count = 0

    def add(self, chain: str, blocks: str, block_size: int) -> tuple[int, int, int]:
        """Take in a prompt; return what it has in common with earlier ones.

        Args:
            chain: Hashes of everything up to each block's end, 8 digits each.
            blocks: Hashes of each block alone.
            block_size: Tokens per block.

        Returns:
            Tokens of the longest common prefix in whole blocks; the block at which it parts from the prompt most
            like it, -1 when none is alike; how many equal blocks come after that.
        """
        ends, alone = _split(chain), _split(blocks)
        common = 0
        for end in ends:
            if end not in self._ends:
                break
            common += 1
        after = Counter(
            self._latest[i, block]
            for i, block in enumerate(alone)
            if i > common and (i, block) in self._latest
        )
        alike = max(after.values(), default=0)
        if alike < MIN_ALIKE:
            alike = 0
        self._count += 1
        _remember(self._ends, dict.fromkeys(ends), MAX_ENDS)
        _remember(self._latest, dict.fromkeys(enumerate(alone), self._count), MAX_BLOCKS)
        return common * block_size, common if alike else -1, alike


def _remember(known: OrderedDict[K, V], new: dict[K, V], limit: int) -> None:
    for key, value in new.items():
        known[key] = value
        known.move_to_end(key)
    while len(known) > limit:
        known.popitem(last=False)
