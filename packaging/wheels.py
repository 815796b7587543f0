"""Build the wheels of whyspan and whyspan_inproc, the same bytes from the same tree wherever it lies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from common import LOCKS, ROOT, run, sources

#: The folders that whyspan's wheel is made of, and the files beside them.
WHYSPAN = (
    "agent/whyspan",
    "probes/whyspan_probes",
    "exporters/whyspan_exporters",
    "packaging/wheel_hook.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
INPROC = "probes/whyspan_inproc"


def tools(folder: Path, python: Path) -> Path:
    """Make the environment that builds, with the locked versions; return its interpreter. Kept while they stay.

    Raises:
        BuildError: they cannot be had.
    """
    made, wanted = folder / "locked.txt", (LOCKS / "build.txt").read_text()
    interpreter = folder / "bin/python"
    if not (made.exists() and made.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        run([python, "-m", "venv", folder])
        pip(interpreter, "install", "--require-hashes", "--only-binary", ":all:", "-r", LOCKS / "build.txt")
        made.write_text(wanted)
    return interpreter


def pip(python: Path, *arguments: str | Path) -> None:
    """Run pip with the machine's own settings (index, proxy), quietly.

    Raises:
        BuildError: it failed.
    """
    run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def _copy(names: list[str], target: Path, strip: str = "") -> None:
    # A clean copy: setuptools leaves folders behind, and what git ignores must not get into a wheel.
    for name in names:
        to = target / name.removeprefix(strip)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, to)
        to.chmod(0o755 if os.access(ROOT / name, os.X_OK) else 0o644)


def build(python: Path, work: Path, out: Path) -> list[Path]:
    """Build both wheels with the tools of *python* into *out*, by way of *work*; return their paths.

    Raises:
        BuildError: a BPF object is missing, or they cannot be built.
    """
    shutil.rmtree(work, ignore_errors=True)
    names = [name for part in WHYSPAN for name in sources(part)]
    objects = [p for p in (ROOT / "probes/whyspan_probes").rglob("*.bpf.o") if p.with_suffix(".c").exists()]
    names += [p.relative_to(ROOT).as_posix() for p in objects]
    _copy(names, work / "whyspan")
    _copy(sources(INPROC), work / "inproc", INPROC + "/")
    wheels = []
    for part in ("whyspan", "inproc"):
        made = work / f"made-{part}"
        # Where it was compiled is nobody's business: paths of the copy would be in its debug information.
        os.environ["CFLAGS"] = f"-g0 -ffile-prefix-map={work}=."
        os.environ["LDFLAGS"] = "-Wl,--build-id=none"
        pip(python, "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-w", made, work / part)
        (wheel,) = made.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob(wheel.name.split("-")[0] + "-*.whl"):
            old.unlink()
        wheels.append(Path(shutil.move(wheel, out / wheel.name)))
    return wheels
