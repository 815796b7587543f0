"""Struct layouts out of the BTF of the object that is loaded, as numpy dtypes."""

from __future__ import annotations

import ctypes as ct
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from whyspan_probes.errors import ProbeError
from whyspan_probes.libbpf import check_pointer, libbpf

# include/uapi/linux/btf.h
INT, PTR, ARRAY, STRUCT, UNION, ENUM = 1, 2, 3, 4, 5, 6
TYPEDEF, VOLATILE, CONST, RESTRICT, FUNC, FUNC_PROTO, VAR, DATASEC = 8, 9, 10, 11, 12, 13, 14, 15
TYPE_TAG = 18
_SKIPPED = (TYPEDEF, VOLATILE, CONST, RESTRICT, TYPE_TAG)
_INT_SIGNED, _INT_CHAR = 1, 2


class _Type(NamedTuple):
    name: str
    kind: int
    vlen: int
    flag: bool
    size: int  # or the referenced type
    extra: int  # address of what follows the 12-byte header


class Variable(NamedTuple):
    """A global variable: its place in the section and its type."""

    offset: int
    size: int
    type_id: int


class Btf:
    """Read access to one BTF blob; borrowed from an object, or owned when parsed from a file or the kernel."""

    def __init__(self, pointer: int, owned: bool) -> None:
        self._pointer, self._owned, self._lib = pointer, owned, libbpf()

    @classmethod
    def of_object(cls, obj: int) -> Btf:
        """Borrow the BTF of an open bpf_object; valid while that is open."""
        return cls(check_pointer(libbpf().bpf_object__btf(obj), "object without BTF"), owned=False)

    @classmethod
    def of_file(cls, path: str) -> Btf:
        """Parse the BTF of an object file; needs no privilege."""
        return cls(check_pointer(libbpf().btf__parse(path.encode(), None), f"BTF of {path}"), owned=True)

    @classmethod
    def of_kernel(cls) -> Btf:
        """Parse the running kernel's BTF. Raises OSError when the kernel has none."""
        return cls(check_pointer(libbpf().btf__load_vmlinux_btf(), "kernel BTF"), owned=True)

    def close(self) -> None:
        """Free what is owned; harmless twice."""
        if self._owned and self._pointer:
            self._lib.btf__free(self._pointer)
        self._pointer = 0

    def _type(self, type_id: int) -> _Type:
        address = self._lib.btf__type_by_id(self._pointer, type_id)
        name, info, size = struct.unpack("<III", ct.string_at(address, 12))
        text = self._lib.btf__name_by_offset(self._pointer, name) or b""
        return _Type(text.decode(), (info >> 24) & 0x1F, info & 0xFFFF, bool(info >> 31), size, address + 12)

    def _extra(self, t: _Type, fmt: str) -> Iterator[tuple[int, ...]]:
        return struct.iter_unpack(fmt, ct.string_at(t.extra, t.vlen * struct.calcsize(fmt)))

    def _string(self, offset: int) -> str:
        return (self._lib.btf__name_by_offset(self._pointer, offset) or b"").decode()

    def _resolve(self, type_id: int) -> tuple[int, _Type]:
        t = self._type(type_id)
        while t.kind in _SKIPPED:
            type_id = t.size
            t = self._type(type_id)
        return type_id, t

    def find(self, name: str, kind: int) -> int:
        """Return the type's id, or 0 when there is none."""
        found: int = self._lib.btf__find_by_name_kind(self._pointer, name.encode(), kind)
        return max(0, found)

    def members(self, name: str) -> frozenset[str]:
        """Return the names of the direct members of ``struct name``; empty when there is no such struct."""
        type_id = self.find(name, STRUCT)
        if not type_id:
            return frozenset()
        return frozenset(self._string(n) for n, _, _ in self._extra(self._type(type_id), "<III"))

    def pointer_bytes(self) -> int:
        """Return the size of a pointer on the machine it describes; 0 when it does not say."""
        size: int = self._lib.btf__pointer_size(self._pointer)
        return size

    def enum(self, name: str) -> dict[str, int]:
        """Return the enumerators of ``enum name``; empty when there is no such enum."""
        type_id = self.find(name, ENUM)
        if not type_id:
            return {}
        return {self._string(n): v for n, v in self._extra(self._type(type_id), "<Ii")}

    def variables(self, section: str) -> dict[str, Variable]:
        """Return the variables of a data section by name."""
        type_id = self.find(section, DATASEC)
        if not type_id:
            return {}
        found = {}
        for var, offset, size in self._extra(self._type(type_id), "<III"):
            t = self._type(var)
            found[t.name] = Variable(offset, size, t.size)
        return found

    def struct_dtype(self, name: str) -> np.dtype[Any]:
        """Return the layout of ``struct name``; a nested ``head`` is flattened into it.

        Raises:
            ProbeError: there is no such struct, or it has a hole, a bit-field, or a type without an equivalent.
        """
        type_id = self.find(name, STRUCT)
        if not type_id:
            raise ProbeError(f"struct {name}: not in the object's BTF")
        return self.dtype(type_id, name)

    def dtype(self, type_id: int, name: str) -> np.dtype[Any]:
        """Like struct_dtype, for a type id (through typedefs and qualifiers)."""
        _, t = self._resolve(type_id)
        names, formats, offsets, end = [], [], [], 0
        for field, offset, fmt, size in self._fields(t, 0, name):
            if offset != end:
                raise ProbeError(f"struct {name}: {offset - end} byte hole before {field}")
            names.append(field)
            formats.append(fmt)
            offsets.append(offset)
            end = offset + size
        if end != t.size:
            raise ProbeError(f"struct {name}: {t.size - end} bytes of padding at the end")
        spec: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": t.size}
        dtype: np.dtype[Any] = np.dtype(spec)
        return dtype

    def _fields(self, t: _Type, base: int, owner: str) -> Iterator[tuple[str, int, str, int]]:
        for name_offset, type_id, where in self._extra(t, "<III"):
            field = self._string(name_offset)
            if t.flag and where >> 24:
                raise ProbeError(f"struct {owner}: {field} is a bit-field")
            offset = base + (where & 0xFFFFFF if t.flag else where) // 8
            _, member = self._resolve(type_id)
            if member.kind == STRUCT:
                yield from self._fields(member, offset, owner)
            else:
                fmt, size = self._scalar(member, field, owner)
                yield field, offset, fmt, size

    def _scalar(self, t: _Type, field: str, owner: str) -> tuple[str, int]:
        if t.kind == INT:
            encoding = struct.unpack("<I", ct.string_at(t.extra, 4))[0] >> 24
            return f"<{'i' if encoding & _INT_SIGNED else 'u'}{t.size}", t.size
        if t.kind == ENUM:
            return f"<u{t.size}", t.size
        if t.kind == ARRAY:
            element, _, count = struct.unpack("<III", ct.string_at(t.extra, 12))
            _, item = self._resolve(element)
            if item.kind == INT and (item.size == 1 or field.startswith("_pad")):
                size = item.size * count
                return (f"S{size}" if item.size == 1 and not field.startswith("_pad") else f"V{size}"), size
        raise ProbeError(f"struct {owner}: field {field} has a type that a record cannot carry")
