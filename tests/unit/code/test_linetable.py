"""Lines of instructions: as the interpreter itself reads them, and of tables that anybody wrote."""

from __future__ import annotations

import json.decoder
import types
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from whyspan.code.linetable import line_of


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def test_every_instruction_of_a_module_has_the_line_that_the_interpreter_says() -> None:
    with open(json.decoder.__file__) as f:
        module = compile(f.read(), "decoder.py", "exec")
    seen = 0
    for code in codes(module):
        for start, end, line in code.co_lines():
            for at in range(start, end, 2):
                seen += 1
                assert line_of(code.co_linetable, code.co_firstlineno, at) == (line or 0)
    assert seen > 1000


def test_past_the_end_and_before_it_there_is_none() -> None:
    code = codes.__code__
    assert line_of(code.co_linetable, code.co_firstlineno, len(code.co_code)) == 0
    assert line_of(b"", 7, 0) == 0


@given(st.binary(max_size=300), st.integers(-(2**31), 2**31), st.integers(0, 1000))
def test_any_table_has_an_answer(table: bytes, first: int, at: int) -> None:
    assert 0 <= line_of(table, first, at) < 2**31
