"""What batches keep of the buffer that records are gathered in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from whyspan_probes.rings import RowBuffer
from whyspan_probes.schema import Events

Words = npt.NDArray[np.uint64]


def rows(times: npt.NDArray[np.int64]) -> Words:
    """Records with these times, as they lie in a ring."""
    out = np.zeros((len(times), 8), np.uint64)
    out[:, 1] = times
    return out


def kept_bytes(events: Events) -> int:
    """The memory that lives as long as a batch."""
    root: npt.NDArray[np.generic] = events
    while isinstance(root.base, np.ndarray):
        root = root.base
    return root.nbytes


def test_what_is_taken_is_in_order_and_whole() -> None:
    buffer, rng = RowBuffer(), np.random.default_rng(3)
    for count in (1, 7, 5000, 3, 20_000, 4096, 11, 0, 10_007):
        times = rng.permutation(count)
        buffer.append(rows(times[: count // 2]))
        buffer.append(rows(times[count // 2 :]))
        assert len(buffer) == count
        assert buffer.take()["ts_ns"].tolist() == list(range(count))
        assert len(buffer) == 0


@pytest.mark.parametrize("few", [1, 5, 1000])
def test_a_few_records_after_many_do_not_keep_their_room(few: int) -> None:
    buffer = RowBuffer()
    many = np.arange(20_000)[::-1].copy()
    buffer.append(rows(many))
    assert len(buffer.take()) == 20_000  # sorted, so a copy: the buffer is used again
    buffer.append(rows(np.arange(few)))
    events = buffer.take()
    assert events["ts_ns"].tolist() == list(range(few))
    assert kept_bytes(events) == few * 64


def test_a_steady_flow_in_order_is_not_copied() -> None:
    buffer = RowBuffer()
    taken = []
    for n in range(4):
        buffer.append(rows(np.arange(10_000) + n * 10_000))
        taken.append(buffer.take())
    assert [int(t["ts_ns"][0]) for t in taken] == [0, 10_000, 20_000, 30_000]
    assert all(10_000 * 64 <= kept_bytes(t) <= 10_000 * 64 * 5 // 4 for t in taken[1:])
