"""What reaches a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan.text import clean


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("grüße 日本", "grüße 日本"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\nb\tc\rd", "a\\x0ab\\x09c\\x0dd"),
        ("\x9b2J", "\\x9b2J"),  # the C1 form of ESC [
        ("\x7f", "\\x7f"),
        ("evil\u202egnp.exe", "evil\\u202egnp.exe"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_known_strings(text: str, shown: str) -> None:
    assert clean(text) == shown


@given(st.text(), st.integers(1, 60))
def test_always_printable_bounded_idempotent(text: str, limit: int) -> None:
    shown = clean(text, limit)
    assert shown.isprintable()
    assert len(shown) <= limit
    assert clean(shown, limit) == shown


def test_cut_is_visible() -> None:
    assert clean("x" * 11, 10) == "x" * 9 + "…"
    assert clean("x" * 10, 10) == "x" * 10
