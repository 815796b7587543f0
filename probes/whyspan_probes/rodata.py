"""Writes what the loader and the configuration say into an object's read-only data, before it is loaded."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Mapping
from typing import Any

import numpy as np

from whyspan_probes.btf import Btf
from whyspan_probes.errors import ProbeError
from whyspan_probes.libbpf import libbpf


def _section(obj: int) -> tuple[int, int]:
    """Return address and size of the object's read-only data."""
    lib, current = libbpf(), None
    while current := lib.bpf_object__next_map(obj, current):
        if lib.bpf_map__name(current).endswith(b".rodata"):
            size = ct.c_size_t()
            return lib.bpf_map__initial_value(current, ct.byref(size)) or 0, size.value
    return 0, 0


def write(obj: int, btf: Btf, probe: str, values: Mapping[str, Mapping[str, int]]) -> None:
    """Set fields of the object's constant structs: by variable, by field.

    Raises:
        ProbeError: there is no such variable or field.
    """
    address, size = _section(obj)
    variables = btf.variables(".rodata")
    for name, fields in values.items():
        if name not in variables:
            raise ProbeError(f"probe {probe}: its object has no `{name}`")
        variable = variables[name]
        dtype = btf.dtype(variable.type_id, name)
        if not address or variable.offset + dtype.itemsize > size:
            raise ProbeError(f"probe {probe}: `{name}` lies outside its read-only data")
        raw: Any = (ct.c_uint8 * dtype.itemsize).from_address(address + variable.offset)
        view: Any = np.frombuffer(raw, dtype=dtype)
        for field, value in fields.items():
            if field not in (dtype.names or ()) or field.startswith("_pad"):
                raise ProbeError(f"probe {probe}: unknown configuration field {field!r}")
            view[0][field] = value
