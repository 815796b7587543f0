"""``whyspan_inproc`` for a vLLM server: layered over its environment, which stays as it is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from whyspan.marks import Mark, decode

from tests.build_inproc import NAME as EXTENSION
from tests.engine import install

SOURCE = Path(__file__).resolve().parents[2] / "probes/whyspan_inproc"
#: Has the marks written to files; see there.
SINK = Path(__file__).parent / "inproc_sink"


def layer() -> Path:
    """Install the distribution as it is in the tree, without dependencies, into a folder for PYTHONPATH.

    Entry points are found there as in site-packages. The folder is made once for each state of the sources.
    """
    files = sorted(
        f for f in SOURCE.rglob("*") if f.is_file() and "__pycache__" not in f.parts and f.name != EXTENSION
    )
    state = hashlib.sha256()
    for file in files:
        state.update(f"{file.relative_to(SOURCE)}\0".encode() + file.read_bytes() + b"\0")
    target = install.cache() / f"inproc-{state.hexdigest()[:16]}"
    if target.exists():
        return target
    for old in install.cache().glob("inproc-*"):
        shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:  # setuptools leaves a build folder where the sources are
        copy = Path(scratch) / "source"
        for file in files:
            (copy / file.relative_to(SOURCE)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy / file.relative_to(SOURCE))
        made = Path(scratch) / "made"
        pip = [str(install.python()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # The build's requirements are vLLM's own setuptools.
        subprocess.run(
            [*pip, "--no-deps", "--no-build-isolation", "--target", str(made), str(copy)], check=True
        )
        shutil.copytree(made, target.with_suffix(".part"), dirs_exist_ok=True)
    target.with_suffix(".part").rename(target)
    return target


def environment(marks: Path | None = None, only_if: Path | None = None) -> Mapping[str, str]:
    """Return the environment that has vLLM load the plugin.

    Args:
        marks: Where each process writes its marks, as if somebody watched; default: as installed for real.
        only_if: A file that must exist for somebody to watch.
    """
    if marks is None:
        return {"PYTHONPATH": str(layer())}
    wanted = {
        "PYTHONPATH": f"{layer()}{os.pathsep}{SINK}",
        "WHYSPAN_TEST_MARKS": str(marks),
    }
    return wanted | ({"WHYSPAN_TEST_MARKS_IF": str(only_if)} if only_if else {})


def read(marks: Path) -> Iterator[Mark]:
    """Yield the marks of all processes in the order of their time, each checked as the agent does.

    Raises:
        BadMarkError: one that the agent would drop.
    """
    rows = []
    for file in marks.glob("*.jsonl"):
        for line in file.read_bytes().splitlines():
            ts_ns, tid, kind, _ = json.loads(line)
            rows.append((ts_ns, tid, int(file.stem), kind, line[line.index(b"{") : -1]))
    for ts_ns, tid, tgid, kind, body in sorted(rows):
        yield decode(kind, body, ts_ns=ts_ns, tid=tid, tgid=tgid)
