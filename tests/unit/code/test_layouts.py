"""Where things lie in an interpreter: what it tells is believed as far as it can be."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan.code.layouts import DEBUG_OFFSETS_BYTES, NOWHERE, LayoutError, by_version, of_debug_offsets
from whyspan_probes.shared_maps import PYTHON_BYTES

#: _Py_DebugOffsets of CPython 3.13.0, x86-64, as far as the code object.
OFFSETS_313 = (
    *(1000, 0, 632),
    *(1, 7256, 7264, 7344, 0, 0, 0, 0, 16, 0, 0, 0, 0),
    *(1, 0, 8, 16, 72, 152, 160, 0, 0),
    *(1, 8, 0, 56, 80, 70),
    *(1, 112, 120, 128, 136, 68, 52, 0, 0, 200),
)


def told(version: int, offsets: tuple[int, ...], free_threaded: int = 0) -> bytes:
    data = b"xdebugpy" + struct.pack("<QQ", version << 16, free_threaded)
    return (data + struct.pack(f"<{len(offsets)}Q", *offsets)).ljust(DEBUG_OFFSETS_BYTES, b"\0")


def test_an_interpreter_that_tells_its_offsets() -> None:
    version, layout = of_debug_offsets(told(0x030D, OFFSETS_313))
    assert version == (3, 13)
    assert (layout.interpreters, layout.threads, layout.thread_native) == (632, 7344, 160)
    assert (layout.frame_code, layout.frame_previous, layout.frame_owner) == (0, 8, 70)
    assert (layout.code_name, layout.code_line, layout.code_bytes) == (120, 68, 200)
    assert (layout.current_thread, layout.thread_cframe) == (NOWHERE, NOWHERE)


def test_what_the_kernel_is_given_has_its_size() -> None:
    for version in ((3, 11), (3, 12)):
        layout = by_version(version)
        assert layout is not None
        packed = layout.pack(0x1234)
        assert len(packed) == PYTHON_BYTES
        assert struct.unpack_from("<Q", packed) == (0x1234,)
    assert by_version((3, 10)) is None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "does not say"),
        (told(0x030D, OFFSETS_313, 1), "3.13 without a global lock"),
        (told(0x0310, OFFSETS_313), "3.16 is not supported"),
        (told(0x030D, (2**40,) * len(OFFSETS_313)), "where they cannot be"),
        (told(0x030D, (*OFFSETS_313[:-10], *(500,) * 10)), "where they cannot be"),
    ],
)
def test_one_that_cannot_be_walked_is_said(data: bytes, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        of_debug_offsets(data)


@given(st.binary(max_size=DEBUG_OFFSETS_BYTES))
def test_whatever_it_tells_fits_what_the_kernel_reads(data: bytes) -> None:
    full = (b"xdebugpy" + struct.pack("<QQ", 0x030E << 16, 0) + data).ljust(DEBUG_OFFSETS_BYTES, b"\0")
    try:
        _, layout = of_debug_offsets(full)
    except LayoutError:
        return
    layout.pack(1)
    assert max(layout.frame_code, layout.frame_owner) < 80
