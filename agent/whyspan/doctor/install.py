"""What was installed: libbpf, the probes' objects, Debian's bcc, the interpreter."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import NamedTuple

from whyspan_probes.errors import LibbpfMissingError, ProbeError
from whyspan_probes.libbpf import MIN_VERSION
from whyspan_probes.registry import discover

from whyspan import __version__
from whyspan.code.bcclib import LIBRARY
from whyspan.doctor.check import Check, Subject


class InstallFacts(NamedTuple):
    """``libbpf`` is its version, or empty and then ``libbpf_problem`` says why."""

    libbpf: str
    libbpf_problem: str
    missing_objects: tuple[str, ...]
    probes_problem: str
    bcc: bool
    python: str
    whyspan: str


def gather() -> InstallFacts:
    """Look for the parts."""
    from whyspan_probes.libbpf import libbpf

    version = problem = probes_problem = ""
    try:
        lib = libbpf()
        version = f"{lib.libbpf_major_version()}.{lib.libbpf_minor_version()}"
    except LibbpfMissingError as e:
        problem = str(e)
    missing: list[str] = []
    try:
        missing = [f.probe.name for f in discover() if not f.object_path.exists()]
    except ProbeError as e:
        probes_problem = str(e)
    return InstallFacts(
        version,
        problem,
        tuple(missing),
        probes_problem,
        _has_bcc(),
        platform.python_version(),
        __version__,
    )


def _has_bcc() -> bool:
    """Look for bcc's C library, which names functions, without loading it (75 MB)."""
    folders = ("/usr/lib", "/usr/lib64", "/usr/local/lib", *map(str, Path("/usr/lib").glob("*-linux-gnu*")))
    return any((Path(folder) / LIBRARY).exists() for folder in folders)


def checks(f: InstallFacts) -> list[Check]:
    """Judge them."""
    return [
        Subject("install.version", "whyspan").ok(f"{f.whyspan}, Python {f.python}"),
        _libbpf(f),
        _objects(f),
        _bcc(f),
    ]


def _libbpf(f: InstallFacts) -> Check:
    it = Subject("install.libbpf", "libbpf")
    if f.libbpf:
        return it.ok(f.libbpf)
    oldest = ".".join(map(str, MIN_VERSION))
    return it.failed(
        f.libbpf_problem or "none",
        "no probe loads",
        f"install the Python package pylibbpf, or name libbpf {oldest} or newer in WHYSPAN_LIBBPF",
    )


def _objects(f: InstallFacts) -> Check:
    it = Subject("install.objects", "BPF objects")
    if f.probes_problem:
        return it.failed(f.probes_problem, "no probe loads", "install whyspan anew")
    if f.missing_objects:
        return it.limited(
            f"not built: {', '.join(f.missing_objects)}",
            "these probes",
            "install the package, or run make build in a checkout",
        )
    return it.ok("all there")


def _bcc(f: InstallFacts) -> Check:
    it = Subject("install.bcc", "bcc (symbols)")
    if f.bcc:
        return it.ok("there")
    return it.note(
        "none: native frames of stacks have module and offset instead of names",
        "apt install libbpfcc",
    )
