"""The page's TypeScript declarations are those of the structs that the server sends."""

from __future__ import annotations

from tests.page import declarations


def test_up_to_date() -> None:
    assert declarations.PATH.read_text() == declarations.written(), "run python -m tests.page.declarations"
