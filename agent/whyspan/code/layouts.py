"""Where things lie in an interpreter of CPython: tables for 3.11 and 3.12; from 3.13 on it tells itself."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

NOWHERE: Final = 0xFFFF
#: ``sizeof(_Py_DebugOffsets)`` is less in every version.
DEBUG_OFFSETS_BYTES: Final = 1024
_COOKIE: Final = b"xdebugpy"
#: Fields of ``_gil_runtime_state`` (Include/internal/pycore_gil.h): interval, last_holder, locked. 3.11 to 3.14.
_GIL_HOLDER: Final = 8
_GIL_LOCKED: Final = 16
#: ``hash`` in ``PyASCIIObject``, after ob_refcnt, ob_type and length. 3.11 to 3.14.
_HASH: Final = 24
_WORDS: Final = 24
_PACKED: Final = struct.Struct(f"<Q{_WORDS}H")


class Layout(NamedTuple):
    """Offsets in bytes, in the order of ``struct whyspan_python``; ``NOWHERE``: this version has no such thing.

    What follows ``frame_entry`` is not the kernel's business: ``qualname`` in a code object, the first character of
    a string that is ASCII and of any other.
    """

    current_thread: int
    interpreters: int
    interpreter_next: int
    interpreter_gil: int
    gil_holder: int
    gil_locked: int
    threads: int
    thread_next: int
    thread_native: int
    thread_cframe: int
    current_frame: int
    frame_code: int
    frame_previous: int
    frame_instr: int
    frame_owner: int
    code_filename: int
    code_name: int
    code_line: int
    code_bytes: int
    name_hash: int
    tag_mask: int
    code_table: int
    cframe_previous: int
    frame_entry: int
    qualname: int
    ascii_text: int
    other_text: int

    def pack(self, runtime: int) -> bytes:
        """Return ``struct whyspan_python`` for an interpreter whose ``_PyRuntime`` lies at that address."""
        return _PACKED.pack(runtime, *self[:_WORDS])


#: Measured with ``offsetof`` on the headers of 3.11.2, 3.11.7 and 3.12.1, x86-64; the ABI of structures is the same on
#: arm64. A minor version does not move them ("This struct is only guaranteed to be stable between patch versions").
_TABLES: Final = {
    (3, 11): Layout(
        current_thread=576,
        interpreters=40,
        interpreter_next=0,
        interpreter_gil=NOWHERE,
        gil_holder=_GIL_HOLDER,
        gil_locked=_GIL_LOCKED,
        threads=16,
        thread_next=8,
        thread_native=160,
        thread_cframe=56,
        current_frame=8,
        frame_code=32,
        frame_previous=48,
        frame_instr=56,
        frame_owner=69,
        code_filename=112,
        code_name=120,
        code_line=72,
        code_bytes=184,
        name_hash=_HASH,
        tag_mask=0,
        code_table=136,
        cframe_previous=16,
        frame_entry=68,
        qualname=128,
        ascii_text=48,
        other_text=72,
    ),
    (3, 12): Layout(
        current_thread=NOWHERE,
        interpreters=40,
        interpreter_next=0,
        interpreter_gil=384,
        gil_holder=_GIL_HOLDER,
        gil_locked=_GIL_LOCKED,
        threads=72,
        thread_next=8,
        thread_native=144,
        thread_cframe=56,
        current_frame=0,
        frame_code=0,
        frame_previous=8,
        frame_instr=56,
        frame_owner=70,
        code_filename=112,
        code_name=120,
        code_line=68,
        code_bytes=192,
        name_hash=_HASH,
        tag_mask=0,
        code_table=136,
        cframe_previous=8,
        frame_entry=NOWHERE,
        qualname=128,
        ascii_text=40,
        other_text=56,
    ),
}

_RUNTIME = "size finalizing interpreters_head"
_INTERPRETER = (
    "size id next threads_head gc imports_modules sysdict builtins ceval_gil gil enabled locked holder"
)
_THREAD = "size prev next interp current_frame thread_id native_thread_id datastack_chunk status"
_FRAME = "size previous executable instr_ptr localsplus owner"
_CODE = "size filename name qualname linetable firstlineno argcount localsplusnames localspluskinds co_code_adaptive"
#: The groups of ``_Py_DebugOffsets`` in order, as far as they are of use. Sources: pycore_runtime.h of 3.13,
#: pycore_debug_offsets.h of 3.14.
_GROUPS: Final = {
    (3, 13): (_RUNTIME, _INTERPRETER, _THREAD, _FRAME, _CODE),
    (3, 14): (
        _RUNTIME,
        _INTERPRETER.replace("threads_head", "threads_head threads_main")
        + " code_object_generation tlbc_generation",
        _THREAD,
        f"{_FRAME} stackpointer tlbc_index",
        _CODE,
    ),
}
#: Versions whose frames can be walked, in builds with a global lock.
SUPPORTED: Final = frozenset({*_TABLES, *_GROUPS})
#: ``sizeof(PyASCIIObject)`` and ``sizeof(PyCompactUnicodeObject)`` since 3.12.
_ASCII_TEXT: Final = 40
_OTHER_TEXT: Final = 56


class LayoutError(ValueError):
    """The interpreter is one whose frames cannot be walked; the text says why."""


def by_version(version: tuple[int, int]) -> Layout | None:
    """Return the layout of a version whose interpreter does not tell it; None when it does, or is not supported."""
    return _TABLES.get(version)


def of_debug_offsets(data: bytes) -> tuple[tuple[int, int], Layout]:
    """Return (version, layout) as the interpreter tells them at the beginning of ``_PyRuntime``.

    Raises:
        LayoutError: it does not, has no global lock, or says what cannot be.
    """
    if len(data) < DEBUG_OFFSETS_BYTES or not data.startswith(_COOKIE):
        raise LayoutError("it does not say where its frames are")
    number, free_threaded = struct.unpack_from("<QQ", data, 8)
    version = (number >> 24 & 0xFF, number >> 16 & 0xFF)
    if free_threaded:
        raise LayoutError(f"CPython {version[0]}.{version[1]} without a global lock is not supported")
    groups = _GROUPS.get(version)
    if groups is None:
        raise LayoutError(f"CPython {version[0]}.{version[1]} is not supported")
    at = 24
    told: list[dict[str, int]] = []
    for group in groups:
        names = group.split()
        told.append(dict(zip(names, struct.unpack_from(f"<{len(names)}Q", data, at), strict=True)))
        at += 8 * len(names)
    runtime, interpreter, thread, frame, code = told
    layout = Layout(
        current_thread=NOWHERE,
        interpreters=runtime["interpreters_head"],
        interpreter_next=interpreter["next"],
        interpreter_gil=interpreter["ceval_gil"],
        gil_holder=_GIL_HOLDER,
        gil_locked=_GIL_LOCKED,
        threads=interpreter["threads_head"],
        thread_next=thread["next"],
        thread_native=thread["native_thread_id"],
        thread_cframe=NOWHERE,
        current_frame=thread["current_frame"],
        frame_code=frame["executable"],
        frame_previous=frame["previous"],
        frame_instr=frame["instr_ptr"],
        frame_owner=frame["owner"],
        code_filename=code["filename"],
        code_name=code["name"],
        code_line=code["firstlineno"],
        code_bytes=code["co_code_adaptive"],
        name_hash=_HASH,
        tag_mask=3 if version >= (3, 14) else 0,  # Py_TAG_BITS (pycore_stackref.h)
        code_table=code["linetable"],
        cframe_previous=NOWHERE,
        frame_entry=NOWHERE,
        qualname=code["qualname"],
        ascii_text=_ASCII_TEXT,
        other_text=_OTHER_TEXT,
    )
    in_frame = (layout.frame_code, layout.frame_previous, layout.frame_instr, layout.frame_owner)
    in_code = (layout.code_filename, layout.code_name, layout.code_line, layout.code_table, layout.qualname)
    # What the kernel's walker reads of each: python.bpf.h.
    if max(layout[:_WORDS]) > NOWHERE or max(in_frame) > 79 or max(in_code) > 144:
        raise LayoutError("it says that its frames are where they cannot be")
    return version, layout
