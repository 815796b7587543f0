"""Code objects by their address: this process's own are read as any other's would be."""

from __future__ import annotations

import os
import sys
from types import CodeType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan.code import interpreters, memory
from whyspan.code.codeobjects import CodeObjects, _read, check_of
from whyspan.code.layouts import Layout

ME = os.getpid()


@pytest.fixture(scope="module")
def layout() -> Layout:
    found = interpreters.find(ME)
    assert found is not None
    if found.layout is None:
        pytest.skip(found.problem)
    assert found.version == sys.version_info[:2]
    return found.layout


def check(code: CodeType, layout: Layout) -> int:
    return _read(ME, layout, [id(code)])[id(code)].check


def test_a_code_object_is_named_with_its_file_and_lines(layout: Layout) -> None:
    code = check_of.__code__
    wanted = (id(code), check(code, layout))
    found = CodeObjects().resolve(ME, layout, [wanted])[wanted]
    assert (found.function, found.file, found.first_line) == (
        "check_of",
        code.co_filename,
        code.co_firstlineno,
    )
    assert found.table == code.co_linetable
    assert {found.line(at) for at in range(0, len(code.co_code), 2)} == {
        line for _, _, line in code.co_lines() if line
    }


def test_names_that_are_not_ascii(layout: Layout) -> None:
    for name in ("näme", "函数", "𝔘x"):
        names: dict[str, CodeType] = {}
        exec(f"def {name}(): pass\ncode = {name}.__code__", names)
        code = names["code"]
        assert _read(ME, layout, [id(code)])[id(code)].function == code.co_qualname


def test_another_object_at_the_address_gets_no_name(layout: Layout) -> None:
    codes = CodeObjects()
    code = check_of.__code__
    wrong = (id(code), check(code, layout) ^ 1)
    assert codes.resolve(ME, layout, [wrong]) == {}
    assert codes.stale == 1


def test_the_names_of_a_process_are_forgotten_with_it(layout: Layout) -> None:
    codes = CodeObjects()
    wanted = (id(check_of.__code__), check(check_of.__code__, layout))
    codes.resolve(ME, layout, [wanted])
    assert codes._known
    codes.forget(ME)
    assert not codes._known


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)), max_size=20))
def test_addresses_of_nothing_have_no_names(layout: Layout, frames: list[tuple[int, int]]) -> None:
    assert CodeObjects().resolve(2**22 - 1, layout, frames) == {}  # nobody's number


def test_what_cannot_be_read_is_empty_and_stops_nothing() -> None:
    text = b"some text"
    at = id(text) + bytes.__basicsize__ - 1
    pieces = [(at, 4), (8, 4), (at + 5, 4), (at, memory.MAX_READ + 1), (0, 0), (at, 9)]
    assert memory.read(ME, pieces) == [b"some", b"", b"text", b"", b"", b"some text"]
