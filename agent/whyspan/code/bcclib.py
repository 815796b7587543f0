"""bcc's library, as far as it reads files: which functions hold given addresses, and what they are called.

It weighs 75 MB: this is for the symboliser alone.
"""

from __future__ import annotations

import ctypes as ct
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Final

LIBRARY: Final = "libbcc.so.0"
_MAX_SYMBOLS: Final = 4_000_000  # libtorch_cpu: 440,000
_MAX_NAME: Final = 2048
_FUNCTIONS: Final = 1 << 2 | 1 << 10  # STT_FUNC, STT_GNU_IFUNC
_WORD, _PLACE = ct.c_uint64, ct.c_void_p


class _Option(ct.Structure):
    """``struct bcc_symbol_option``."""

    _fields_ = (
        ("use_debug_file", ct.c_int),
        ("check_debug_file_crc", ct.c_int),
        ("lazy_symbolize", ct.c_int),
        ("use_symbol_type", ct.c_uint32),
    )


_ON_SYMBOL = ct.CFUNCTYPE(ct.c_int, _PLACE, _WORD, _WORD, _PLACE)
_ON_SECTION = ct.CFUNCTYPE(ct.c_int, _WORD, _WORD, _WORD, _PLACE)


class Collected:
    """Of all functions of a file those that hold an address that is wanted, and how far each is all there is."""

    def __init__(self, wanted: list[int]) -> None:
        self.wanted = sorted(set(wanted))
        n = len(self.wanted)
        self._best: list[tuple[int, int, bytes] | None] = [None] * n
        self._low, self._high = [0] * n, [1 << 63] * n
        self._count = 0

    def add(self, name: int | None, start: int, size: int, _: int | None = None) -> int:
        """Take one in; called by bcc, *name* is where its C string lies. Returns -1 when there are too many."""
        self._count += 1
        if self._count > _MAX_SYMBOLS:
            return -1
        wanted, end = self.wanted, start + size
        first = bisect_left(wanted, start)
        if first and start < self._high[first - 1]:
            self._high[first - 1] = start
        last = bisect_left(wanted, end, first)
        if last < len(wanted) and end > self._low[last]:
            self._low[last] = end
        if first < last and name:
            text = ct.string_at(name)[:_MAX_NAME]
            for i in range(first, last):
                best = self._best[i]
                # Of two that hold it, the one that begins later lies within the other.
                if best is None or (-start, _rank(text)) < (-best[0], _rank(best[2])):
                    self._best[i] = (start, end, text)
        return 0

    def ranges(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield (wanted, start, end, name) of each; without a name, the gap between two functions."""
        low, high = list(self._low), list(self._high)
        for i in range(1, len(low)):
            low[i] = max(low[i], low[i - 1])
        for i in range(len(high) - 1, 0, -1):
            high[i - 1] = min(high[i - 1], high[i])
        for i, at in enumerate(self.wanted):
            start, end, text = self._best[i] or (0, 1 << 63, b"")
            yield at, max(start, low[i]), min(end, high[i]), text


def _rank(name: bytes) -> tuple[int, int, bytes]:
    """Of several names of one function, the plainest."""
    return len(name) - len(name.lstrip(b"_")), len(name), name


class Bcc:
    """bcc's library, as far as it reads files."""

    def __init__(self) -> None:
        """Raises OSError without the library, AttributeError if it is another than expected."""
        self._lib = ct.CDLL(LIBRARY)
        self._symbols = self._lib.bcc_elf_foreach_sym
        self._sections = self._lib.bcc_elf_foreach_load_section
        self._vdso = self._lib.bcc_elf_foreach_vdso_sym
        self._build_id = self._lib.bcc_elf_get_buildid
        self._symbols.argtypes = [ct.c_char_p, _ON_SYMBOL, ct.POINTER(_Option), _PLACE]
        self._sections.argtypes = [ct.c_char_p, _ON_SECTION, _PLACE]
        self._vdso.argtypes = [_ON_SYMBOL, _PLACE]
        self._free = ct.CDLL(None).free
        self._free.argtypes = [_PLACE]
        # What bcc itself uses; for Rust's newer names LLVM's, which it brings along.
        self._cxx = self._function("__cxa_demangle", 4)
        self._rust = self._function("_ZN4llvm12rustDemangleEPKcPcPmPi", 4) or self._function(
            "_ZN4llvm12rustDemangleEPKc", 1
        )

    def _function(self, name: str, arguments: int) -> Any:
        found = getattr(self._lib, name, None)
        if found is not None:
            found.restype, found.argtypes = _PLACE, [ct.c_char_p, *[_PLACE] * 3][:arguments]
        return found

    def sections(self, path: str) -> list[tuple[int, int, int]]:
        """Return (offset in the file, bytes, address) of the code."""
        found: list[tuple[int, int, int]] = []

        def add(address: int, size: int, offset: int, _: int | None) -> int:
            found.append((offset, size, address))
            return -1 if len(found) > 1000 else 0

        self._sections(path.encode(), _ON_SECTION(add), None)
        return found

    def symbols(self, path: str, into: Collected) -> None:
        """Take in all functions of a file, and of its debug information as far as this machine has it."""
        self._symbols(path.encode(), _ON_SYMBOL(into.add), ct.byref(_Option(1, 1, 0, _FUNCTIONS)), None)

    def vdso(self, into: Collected) -> None:
        """Take in the functions that the kernel gives every process."""
        self._vdso(_ON_SYMBOL(into.add), None)

    def build_id(self, path: str) -> str:
        """Return a file's build id in hex digits, empty when it has none."""
        buffer = ct.create_string_buffer(128)
        self._build_id(path.encode(), buffer)
        text = buffer.value.decode("ascii", "replace")
        return text if 4 < len(text) <= 64 and all(c in "0123456789abcdef" for c in text) else ""

    def demangle(self, name: bytes) -> str:
        """Return a name as its programmer wrote it."""
        text = name.decode("utf-8", "replace")
        how = self._rust if name.startswith(b"_R") else self._cxx if name.startswith(b"_Z") else None
        if how is None:
            return text
        made = how(name, *[None] * (len(how.argtypes) - 1))
        if not made:
            return text
        try:
            return ct.string_at(made)[:_MAX_NAME].decode("utf-8", "replace")
        finally:
            self._free(made)
