"""libbpf through ctypes: the one place that knows its C signatures.

libbpf >= 1.3 is needed; many hosts have 0.5 or none, so the copy inside the ``pylibbpf`` wheel is used first. Its
extension module exports libbpf's symbols; it is opened as a plain library and never imported as Python.
"""

from __future__ import annotations

import ctypes as ct
import errno
import functools
import importlib.util
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from whyspan_probes.errors import LibbpfMissingError

MIN_VERSION = (1, 3)

BPF_MAP_TYPE_ARRAY_OF_MAPS = 12
BPF_MAP_TYPE_RINGBUF = 27
BPF_STATS_RUN_TIME = 0
_MAX_DETACHERS = 64

_PRINT = ct.CFUNCTYPE(ct.c_int, ct.c_int, ct.c_char_p, ct.c_void_p)

_P, _I, _U32, _S = ct.c_void_p, ct.c_int, ct.c_uint32, ct.c_char_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "bpf_object__open_file": (_P, [_S, _P]),
    "bpf_object__load": (_I, [_P]),
    "bpf_object__close": (None, [_P]),
    "bpf_object__btf": (_P, [_P]),
    "bpf_object__find_program_by_name": (_P, [_P, _S]),
    "bpf_object__next_program": (_P, [_P, _P]),
    "bpf_object__find_map_by_name": (_P, [_P, _S]),
    "bpf_object__next_map": (_P, [_P, _P]),
    "bpf_program__name": (_S, [_P]),
    "bpf_program__section_name": (_S, [_P]),
    "bpf_program__set_autoload": (_I, [_P, ct.c_bool]),
    "bpf_program__fd": (_I, [_P]),
    "bpf_program__attach": (_P, [_P]),
    "bpf_program__attach_perf_event": (_P, [_P, _I]),
    "bpf_program__attach_iter": (_P, [_P, _P]),
    "bpf_iter_create": (_I, [_I]),
    "bpf_program__attach_uprobe_multi": (_P, [_P, _I, _S, _S, _P]),
    "bpf_program__attach_uprobe_opts": (_P, [_P, _I, _S, ct.c_size_t, _P]),
    "bpf_link__destroy": (_I, [_P]),
    "bpf_link__fd": (_I, [_P]),
    "bpf_map__name": (_S, [_P]),
    "bpf_map__fd": (_I, [_P]),
    "bpf_map__reuse_fd": (_I, [_P, _I]),
    "bpf_map__initial_value": (_P, [_P, ct.POINTER(ct.c_size_t)]),
    "bpf_map_create": (_I, [_I, _S, _U32, _U32, _U32, _P]),
    "bpf_map_update_elem": (_I, [_I, _P, _P, ct.c_uint64]),
    "bpf_map_lookup_elem": (_I, [_I, _P, _P]),
    "bpf_map_delete_elem": (_I, [_I, _P]),
    "bpf_map_get_next_key": (_I, [_I, _P, _P]),
    "bpf_obj_get_info_by_fd": (_I, [_I, _P, ct.POINTER(_U32)]),
    "bpf_enable_stats": (_I, [_I]),
    "libbpf_num_possible_cpus": (_I, []),
    "libbpf_set_print": (_P, [_PRINT]),
    "libbpf_major_version": (_U32, []),
    "libbpf_minor_version": (_U32, []),
    "btf__load_vmlinux_btf": (_P, []),
    "btf__parse": (_P, [_S, _P]),
    "btf__free": (None, [_P]),
    "btf__type_cnt": (_U32, [_P]),
    "btf__pointer_size": (ct.c_size_t, [_P]),
    "btf__type_by_id": (_P, [_P, _U32]),
    "btf__name_by_offset": (_S, [_P, _U32]),
    "btf__find_by_name_kind": (ct.c_int32, [_P, _S, _U32]),
}


def _candidates() -> Iterator[str]:
    named = os.environ.get("WHYSPAN_LIBBPF")
    if named:
        yield named
        return
    spec = importlib.util.find_spec("pylibbpf")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield from (str(p) for p in sorted(Path(folder).glob("pylibbpf*.so")))
    yield "libbpf.so.1"


@functools.cache
def libbpf() -> ct.CDLL:
    """Open libbpf once.

    Raises:
        LibbpfMissingError: none of the candidates is a libbpf of at least MIN_VERSION.
    """
    tried = []
    for path in _candidates():
        try:
            lib = ct.CDLL(path, use_errno=True)
            version = (lib.libbpf_major_version(), lib.libbpf_minor_version())
        except (OSError, AttributeError) as e:
            tried.append(f"{path}: {str(e).splitlines()[0]}")
            continue
        if version < MIN_VERSION:
            tried.append(f"{path}: version {version[0]}.{version[1]}")
            continue
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        _log.install(lib)
        return lib
    raise LibbpfMissingError(f"no libbpf >= {MIN_VERSION[0]}.{MIN_VERSION[1]} found ({'; '.join(tried)})")


def destroy_links(links: Sequence[int]) -> None:
    """Detach, side by side: for some kinds the kernel waits 25 to 65 ms each, until nobody is in the program any more.

    All of them wait for the same; the threads sleep.
    """
    if links:
        with ThreadPoolExecutor(max_workers=min(len(links), _MAX_DETACHERS)) as pool:
            list(pool.map(libbpf().bpf_link__destroy, links))


class _Log:
    """libbpf's messages by calling thread, kept for error reports (bounded) and never printed."""

    MAX_LINES = 4000
    MAX_MESSAGE = 1 << 20  # a verifier's log is one message, and its end tells why

    def __init__(self) -> None:
        self._local = threading.local()
        self._vsnprintf = ct.CDLL(None).vsnprintf
        self._callback = _PRINT(self._on_print)  # must outlive the library

    def _on_print(self, level: int, fmt: bytes, args: int) -> int:
        if level <= 1:  # warnings; 2 is debug
            buffer = ct.create_string_buffer(self.MAX_MESSAGE)
            self._vsnprintf(buffer, ct.c_size_t(len(buffer)), ct.c_char_p(fmt), ct.c_void_p(args))
            self._lines().extend(buffer.value.decode(errors="replace").splitlines())
        return 0

    def install(self, lib: ct.CDLL) -> None:
        lib.libbpf_set_print(self._callback)

    def _lines(self) -> deque[str]:
        lines: deque[str] | None = getattr(self._local, "lines", None)
        if lines is None:
            lines = self._local.lines = deque(maxlen=self.MAX_LINES)
        return lines

    def take(self) -> str:
        text = "\n".join(self._lines())
        self._lines().clear()
        return text


_log = _Log()


def take_log() -> str:
    """Return what libbpf said in this thread since the last call, and forget it."""
    return _log.take()


def check(result: int, what: str) -> int:
    """Turn a negative libbpf or syscall result into OSError."""
    if result < 0:
        code = ct.get_errno() or -result
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def check_pointer(pointer: int | None, what: str) -> int:
    """Turn a NULL libbpf result into OSError."""
    if not pointer:
        code = ct.get_errno() or errno.EINVAL
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return pointer


class ObjectOpenOpts(ct.Structure):
    """The head of struct bpf_object_open_opts, libbpf 1.3 ``src/libbpf.h``; libbpf copies the strings."""

    _fields_ = (
        ("sz", ct.c_size_t),
        ("object_name", _S),
        ("relaxed_maps", ct.c_bool),
        ("pin_root_path", _S),
        ("_attach_prog_fd", _U32),
        ("kconfig", _S),
        ("btf_custom_path", _S),
    )


class MapCreateOpts(ct.Structure):
    """struct bpf_map_create_opts, libbpf 1.6 ``src/bpf.h``."""

    _fields_ = (
        ("sz", ct.c_size_t),
        ("btf_fd", _U32),
        ("btf_key_type_id", _U32),
        ("btf_value_type_id", _U32),
        ("btf_vmlinux_value_type_id", _U32),
        ("inner_map_fd", _U32),
        ("map_flags", _U32),
        ("map_extra", ct.c_uint64),
        ("numa_node", _U32),
        ("map_ifindex", _U32),
    )


class UprobeMultiOpts(ct.Structure):
    """struct bpf_uprobe_multi_opts, libbpf 1.3 ``src/libbpf.h``."""

    _fields_ = (
        ("sz", ct.c_size_t),
        ("syms", ct.POINTER(_S)),
        ("offsets", ct.POINTER(ct.c_ulong)),
        ("ref_ctr_offsets", ct.POINTER(ct.c_ulong)),
        ("cookies", ct.POINTER(ct.c_uint64)),
        ("cnt", ct.c_size_t),
        ("retprobe", ct.c_bool),
    )


class UprobeOpts(ct.Structure):
    """struct bpf_uprobe_opts, libbpf 1.3 ``src/libbpf.h``."""

    _fields_ = (
        ("sz", ct.c_size_t),
        ("ref_ctr_offset", ct.c_size_t),
        ("bpf_cookie", ct.c_uint64),
        ("retprobe", ct.c_bool),
        ("func_name", _S),
        ("attach_mode", _I),
    )
