"""Names by ranges: found, overlapped, bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from whyspan.code.names import Names, Range


def test_a_range_names_all_of_a_function() -> None:
    names = Names()
    names.put("m", Range(10, 20, "f"))
    names.put("m", Range(30, 40, ""))
    assert [names.get("m", at) for at in (9, 10, 19, 20, 30, 39, 40)] == [None, "f", "f", None, "", "", None]
    assert names.get("other", 10) is None


def test_the_newest_answer_holds() -> None:
    names = Names()
    for one in (Range(0, 10, "a"), Range(10, 20, "b"), Range(20, 30, "c"), Range(5, 25, "d")):
        names.put("m", one)
    assert [names.get("m", at) for at in (4, 5, 24, 25)] == [None, "d", "d", None]
    assert len(names) == 1
    names.forget("m")
    assert len(names) == 0 and names.get("m", 5) is None


def test_it_is_bounded() -> None:
    names = Names(limit=100)
    for module in range(20):
        for i in range(20):
            names.put(module, Range(i * 2, i * 2 + 1, "f"))
    assert len(names) <= 100
    assert names.get(19, 0) == "f" and names.get(0, 0) is None
    for i in range(1000):  # one module alone
        names.put("big", Range(i, i + 1, "f"))
        assert len(names) <= 100


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=30))
def test_ranges_never_overlap(pieces: list[tuple[int, int]]) -> None:
    names = Names()
    last: dict[int, str] = {}
    for n, (start, length) in enumerate(pieces):
        names.put("m", Range(start, start + length, str(n)))
        for at in range(start, start + length):
            last[at] = str(n)
    for at in range(45):
        assert names.get("m", at) in (None, last.get(at))
    assert pieces == [] or names.get("m", pieces[-1][0]) == str(len(pieces) - 1)
