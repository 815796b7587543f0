"""Finds the probes: every module of a folder that has a ``PROBE`` and an object beside it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from whyspan_probes.errors import ProbeError
from whyspan_probes.probe import Probe

HERE = Path(__file__).parent


class Found(NamedTuple):
    """A declared probe and the object that carries its programs."""

    probe: Probe
    object_path: Path


def discover(folders: Iterable[Path] = (HERE,)) -> list[Found]:
    """Return the probes of *folders*, sorted by name.

    A probe is a pair: ``<name>.py`` that holds ``PROBE``, and ``<name>.bpf.c`` (built to ``<name>.bpf.o``).

    Raises:
        ProbeError: a pair is broken: no PROBE, another name than the file's, or a name used twice.
    """
    found: dict[str, Found] = {}
    for folder in folders:
        for source in sorted(
            {*folder.glob("*.bpf.c"), *(p.with_suffix(".c") for p in folder.glob("*.bpf.o"))}
        ):
            name = source.name.removesuffix(".bpf.c")
            if name in found:
                raise ProbeError(
                    f"probe {name}: declared in {folder} and in {found[name].object_path.parent}"
                )
            found[name] = Found(_load(folder / f"{name}.py", name), folder / f"{name}.bpf.o")
    return [found[name] for name in sorted(found)]


def _load(path: Path, name: str) -> Probe:
    qualified = f"{__package__}.{name}" if path.parent == HERE else f"_whyspan_probe_{name}"
    spec = importlib.util.spec_from_file_location(qualified, path)
    if not path.exists() or spec is None or spec.loader is None:
        raise ProbeError(f"probe {name}: {path} is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    probe = getattr(module, "PROBE", None)
    if not isinstance(probe, Probe):
        raise ProbeError(f"probe {name}: {path.name} has no PROBE")
    if probe.name != name:
        raise ProbeError(f"probe {name}: {path.name} declares {probe.name!r}")
    return probe
