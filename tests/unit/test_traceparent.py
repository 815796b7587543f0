"""The ``traceparent`` header, by the cases of the W3C's own test suite."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan.traceparent import TraceParent, parse

TRACE, SPAN = "12345678901234567890123456789012", "1234567890123456"


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # unknown flags are ignored
        (f"00-{TRACE}-{SPAN}-fe", False),
        (f"cc-{TRACE}-{SPAN}-01", True),  # a version to come: read as 00
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
        (f"01-{TRACE}-{SPAN}-01-", True),
        (f" \t00-{TRACE}-{SPAN}-01\t ", True),
    ],
)
def test_accepted(text: str, sampled: bool) -> None:
    assert parse(text) == TraceParent(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-001",
        f"00-{TRACE}-{SPAN}-01-",  # version 00 ends with the flags
        f"00-{TRACE}-{SPAN}-01-extra",
        f"00-{TRACE}-{SPAN}-01.extra",
        f"cc-{TRACE}-{SPAN}-01.what-the-future-will-not-be-like",
        f"cc-{TRACE}-{SPAN}-01what",
        f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"000-{TRACE}-{SPAN}-01",
        f".0-{TRACE}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}0-{SPAN}-01",
        f"00-{TRACE}-{SPAN[1:]}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{'A' * 32}-{SPAN}-01",  # upper case
        f"00-{TRACE}-{'A' * 16}-01",
        f"00-{TRACE}-{SPAN}-0A",
        f"00-.{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-.1",
        f"00_{TRACE}_{SPAN}_01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01",
        f"00-{'१' * 32}-{SPAN}-01",  # digits, but not these
    ],
)
def test_refused(text: str) -> None:
    assert parse(text) is None


@given(st.text(alphabet="0123456789abcdefAF-. \t\n", max_size=80))
def test_whatever_is_accepted_is_usable(text: str) -> None:
    found = parse(text)
    if found is not None:
        assert (len(found.trace_id), len(found.span_id)) == (32, 16)
        assert int(found.trace_id, 16) > 0 < int(found.span_id, 16)
        assert f"-{found.trace_id}-{found.span_id}-" in text


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_every_valid_header_is_read(trace: int, span: int, flags: int) -> None:
    expected = TraceParent(f"{trace:032x}", f"{span:016x}", flags % 2 == 1)
    assert parse(f"00-{trace:032x}-{span:016x}-{flags:02x}") == expected
