"""Hashes of blocks tell equal from different, and cannot be made by anybody else."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan_inproc.vllm_plugin.hashes import MAX_BLOCKS, hashed

from tests.unit.inproc.conftest import PACKAGE

TOKENS = st.lists(st.integers(0, 255), max_size=60)


def split(text: str) -> list[str]:
    return [text[at : at + 8] for at in range(0, len(text), 8)]


@given(TOKENS, TOKENS)
@settings(max_examples=200, deadline=None)
def test_equal_and_different(one: list[int], other: list[int]) -> None:
    size = 4
    (chain, blocks), (chain_2, blocks_2) = hashed(one, size), hashed(other, size)
    assert len(chain) == len(blocks) == 8 * (len(one) // size)
    for i, (a, b, x, y) in enumerate(
        zip(split(chain), split(chain_2), split(blocks), split(blocks_2), strict=False)
    ):
        same_block = one[i * size : (i + 1) * size] == other[i * size : (i + 1) * size]
        assert (x == y) == same_block
        assert (a == b) == (one[: (i + 1) * size] == other[: (i + 1) * size])


def test_engines_own_hashes_chain() -> None:
    tokens = list(range(12))
    chain, blocks = hashed(tokens, 4, [b"x" * 32, b"y" * 32, b"z" * 32])
    assert len({*split(chain)}) == 3
    # other image or adapter under the same tokens: the chain differs, the blocks do not
    other, same = hashed(tokens, 4, [b"x" * 32, b"Y" * 32, b"Z" * 32])
    assert split(chain)[0] == split(other)[0] and split(chain)[1] != split(other)[1]
    assert blocks == same


def test_part_of_a_block_and_nothing() -> None:
    assert hashed([1, 2, 3], 4) == ("", "")
    assert hashed([], 16) == ("", "")
    assert hashed([1] * 64, 0) == ("", "")


def test_bounded() -> None:
    chain, blocks = hashed(list(range(100_000)), 16)
    assert len(chain) == len(blocks) == 8 * MAX_BLOCKS == 2_048


def test_another_process_has_another_key() -> None:
    script = "from whyspan_inproc.vllm_plugin.hashes import hashed; print(*hashed(list(range(64)), 16))"
    run = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONPATH": str(PACKAGE), "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert run[0] != run[1] and " ".join(hashed(list(range(64)), 16)) not in (r.strip() for r in run)
