"""Small BTF files made by hand, and edits of real ones: a field moved, for tests that must see which file is read.

Layout: include/uapi/linux/btf.h. Little-endian only.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

_HEADER = struct.Struct("<HBBIIIII")  # magic, version, flags, hdr_len, type_off, type_len, str_off, str_len
_INT, _ARRAY, _STRUCT, _UNION, _ENUM, _FUNC_PROTO, _VAR, _DATASEC, _DECL_TAG, _ENUM64 = (
    1, 3, 4, 5, 6, 13, 14, 15, 17, 19,
)  # fmt: skip
#: Bytes that follow the 12-byte head of a type: fixed, and per member.
_EXTRA = {
    _INT: (4, 0),
    _ARRAY: (12, 0),
    _STRUCT: (0, 12),
    _UNION: (0, 12),
    _ENUM: (0, 8),
    _FUNC_PROTO: (0, 8),
    _VAR: (4, 0),
    _DATASEC: (0, 12),
    _DECL_TAG: (4, 0),
    _ENUM64: (0, 12),
}


def blob(structs: Mapping[str, tuple[str, ...]], long_bytes: int = 8) -> bytes:
    """Return BTF with an ``unsigned long`` and structs whose members are all of that type."""
    strings = bytearray(b"\0")

    def name(text: str) -> int:
        strings.extend(text.encode() + b"\0")
        return len(strings) - len(text) - 1

    types = struct.pack("<IIII", name("unsigned long"), _INT << 24, long_bytes, long_bytes * 8)
    for title, members in structs.items():
        info = _STRUCT << 24 | len(members)
        types += struct.pack("<III", name(title), info, long_bytes * len(members))
        for i, member in enumerate(members):
            types += struct.pack("<III", name(member), 1, i * long_bytes * 8)
    header = _HEADER.pack(0xEB9F, 1, 0, _HEADER.size, 0, len(types), len(types), len(strings))
    return header + types + bytes(strings)


def moved(btf: bytes, title: str, field: str, onto: str) -> bytes:
    """Return the BTF with one field of a struct moved to where another field of it is.

    Raises:
        KeyError: there is no such struct, or it has not both fields.
    """
    out = bytearray(btf)
    _, _, _, header, types, types_len, strings, _ = _HEADER.unpack_from(btf)
    at, end, names = header + types, header + types + types_len, header + strings

    def text(offset: int) -> str:
        return btf[names + offset : btf.index(b"\0", names + offset)].decode()

    while at < end:
        name, info, _ = struct.unpack_from("<III", btf, at)
        kind, count = info >> 24 & 0x1F, info & 0xFFFF
        fixed, each = _EXTRA.get(kind, (0, 0))
        if kind == _STRUCT and text(name) == title:
            members = {text(struct.unpack_from("<I", btf, at + 12 + 12 * i)[0]): i for i in range(count)}
            if field in members and onto in members:
                to, source = (at + 12 + 12 * members[n] + 8 for n in (field, onto))
                out[to : to + 4] = btf[source : source + 4]
                return bytes(out)
        at += 12 + fixed + each * count
    raise KeyError(f"{title}: {field}, {onto}")
