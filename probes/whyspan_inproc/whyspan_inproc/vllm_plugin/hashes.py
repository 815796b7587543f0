"""Hashes of a prompt's blocks that tell equal from different and nothing else.

Keyed with a secret that is made when the process starts and never leaves it, so that they cannot be looked up; 32
bits each, so that they are no good for anything but comparing the requests of one engine.
"""

from __future__ import annotations

import array
import hashlib
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Blocks of a prompt that are told, from its start.
MAX_BLOCKS = 256
_KEY = secrets.token_bytes(16)


def hashed(tokens: Sequence[int], block_size: int, block_hashes: Sequence[bytes] = ()) -> tuple[str, str]:
    """Return ``chain`` and ``blocks`` of ``whyspan.marks.Queued``: 8 hex digits for each whole block.

    Args:
        tokens: The prompt.
        block_size: Tokens of a block.
        block_hashes: vLLM's own hashes of everything up to each block's end, which cover adapters, salts and
            images too; without them (no prefix caching) the tokens are chained here.
    """
    count = min(len(tokens) // block_size, MAX_BLOCKS) if block_size > 0 else 0
    if not count:
        return "", ""
    data = memoryview(array.array("q", tokens[: count * block_size]).tobytes())
    width = 8 * block_size
    blocks = [
        hashlib.blake2b(data[at : at + width], digest_size=4, key=_KEY).digest()
        for at in range(0, count * width, width)
    ]
    if len(block_hashes) >= count:
        chain = [hashlib.blake2b(h, digest_size=4, key=_KEY).digest() for h in block_hashes[:count]]
    else:
        chain, so_far = [], b""
        for at in range(0, count * width, width):
            so_far = hashlib.blake2b(so_far + data[at : at + width], digest_size=16, key=_KEY).digest()
            chain.append(so_far[:4])
    return b"".join(chain).hex(), b"".join(blocks).hex()
