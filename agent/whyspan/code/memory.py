"""Reads the memory of another process without stopping it."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence

#: A code object's fields, a name, a line table: nothing that is read is longer, and anybody may have written it.
MAX_READ = 16 << 10
_MAX_PIECES = 512  # IOV_MAX is 1,024 (include/uapi/linux/uio.h)


class _Piece(ct.Structure):
    _fields_ = (("base", ct.c_void_p), ("length", ct.c_size_t))


_readv = ct.CDLL(None, use_errno=True).process_vm_readv
_readv.restype = ct.c_ssize_t
_readv.argtypes = [
    ct.c_int,
    ct.POINTER(_Piece),
    ct.c_ulong,
    ct.POINTER(_Piece),
    ct.c_ulong,
    ct.c_ulong,
]


def read(tgid: int, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return the bytes of each (address, length); empty where they cannot be read, as after the process's end.

    Reading stops nobody and needs CAP_SYS_PTRACE. Lengths over ``MAX_READ`` are refused as unreadable.
    """
    out: list[bytes] = []
    for i in range(0, len(pieces), _MAX_PIECES):
        part = pieces[i : i + _MAX_PIECES]
        done = _read(tgid, part)
        while len(done) < len(part):
            # One piece that is not there ends the call: without it, the others are read.
            done.append(b"")
            done += _read(tgid, part[len(done) :])
        out += done
    return out


def _read(tgid: int, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return the pieces up to the first that cannot be read."""
    good = next(
        (i for i, (a, n) in enumerate(pieces) if not 0 < n <= MAX_READ or not 0 < a < 1 << 63), len(pieces)
    )
    if not good:
        return []
    total = sum(n for _, n in pieces[:good])
    buffer = ct.create_string_buffer(total)
    into = _Piece(ct.addressof(buffer), total)
    where = (_Piece * good)(*(_Piece(a, n) for a, n in pieces[:good]))
    got = int(_readv(tgid, ct.byref(into), 1, where, good, 0))
    out: list[bytes] = []
    at = 0
    for _, n in pieces[:good]:
        if at + n > got:
            break
        out.append(buffer.raw[at : at + n])
        at += n
    return out
