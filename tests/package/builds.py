"""Two builds of the same tree in two folders, from the probes' sources on; made once per run of the tier."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PROBES = "probes/whyspan_probes"
DATE = "1790000000"
TOOLS = ("dh", "lintian", "clang", "bpftool", "dpkg-deb")
_PATH = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"


def lacking() -> str:
    """Return why packages cannot be built here; empty when they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_PATH) is None]
    return f"needs {', '.join(missing)}: `make deps package` installs them" if missing else ""


class Built(NamedTuple):
    """What one build made."""

    tree: Path
    deb: Path
    wheel: Path
    inproc: Path

    @property
    def files(self) -> tuple[Path, ...]:
        """All files made, in an order that does not change."""
        return self.deb, self.wheel, self.inproc


def _said(command: list[str], cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def snapshot(folder: Path) -> Path:
    """Copy what git knows or would take of this checkout, which may change between two builds."""
    listed = _said(["git", "ls-files", "-z", "-co", "--exclude-standard"], ROOT, dict(os.environ))
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # else deleted, and not committed yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def build(origin: Path, tree: Path) -> Built:
    """Copy *origin* to *tree* and build there; nothing that was built before is used."""
    shutil.copytree(origin, tree)
    env = {**os.environ, "SOURCE_DATE_EPOCH": DATE, "PATH": _PATH}
    objects = [p.relative_to(tree).as_posix()[:-1] + "o" for p in sorted((tree / PROBES).rglob("*.bpf.c"))]
    _said(["make", "-j2", *objects], tree, env)
    _said(["/usr/bin/python3", "packaging/build.py"], tree, env)
    dist = tree / "dist"
    (deb,), (wheel,) = dist.glob("whyspan_*.deb"), dist.glob("whyspan-*.whl")
    (inproc,) = dist.glob("whyspan_inproc-*.whl")
    return Built(tree, deb, wheel, inproc)
