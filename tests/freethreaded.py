"""A free-threaded CPython (3.13t), built from Debian's source package; made once and cached.

No Debian release has such an interpreter. ``python -m tests.freethreaded`` makes it: 23 MB are fetched by apt from the
archive that it knows, and compiled in some four minutes on two CPUs, at the lowest priority; 60 MB are kept.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import roots
from tests.engine.install import cache

SUITE, PACKAGE, VERSION = "trixie", "python3.13", "3.13"
#: What of the standard library nobody needs here.
_LEFT_OUT = shutil.ignore_patterns(
    "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "__pycache__"
)


def made() -> bool:
    """Whether it is there already."""
    return (cache() / f"python{VERSION}t" / "bin" / f"python{VERSION}t").exists()


def interpreter() -> Path:
    """Return the program, made now if it is not there yet; another process that makes it is waited for.

    Raises:
        roots.RootsError: it is not there and cannot be made.
    """
    final = cache() / f"python{VERSION}t"
    program = final / "bin" / f"python{VERSION}t"
    final.parent.mkdir(parents=True, exist_ok=True)
    with (cache() / f"{final.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent) as made:
                _make(Path(made), final)
    return program


def _make(folder: Path, final: Path) -> None:
    known = roots.sources()
    if not known:
        raise roots.RootsError("apt knows no Debian archive")
    # Lists and settings of its own: the machine's are left as they are.
    keys = f"[signed-by={known[0].keyring}] " if known[0].keyring else ""
    (folder / "sources.list").write_text(f"deb-src {keys}{known[0].uri} {SUITE} main\n")
    for name in ("lists/partial", "cache/archives/partial", "built"):
        (folder / name).mkdir(parents=True)
    options = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", *(f"-o{k}={v}" for k, v in options.items())]
    _run([*apt, "update"], folder)
    _run([*apt, "source", "--download-only", PACKAGE], folder)
    archive = next(iter(folder.glob("*.orig.tar.xz")), None)
    if archive is None:
        raise roots.RootsError(f"apt brought no source of {PACKAGE}")
    source = folder / "built"
    _run(["tar", "-xf", str(archive), "--strip-components=1", "-C", str(source)], folder)
    nice = ["nice", "-n", "19"]
    settings = (
        "--disable-gil",
        "--disable-test-modules",
        "--without-ensurepip",
        f"--prefix={final}",
        "CFLAGS=-O1",
    )
    _run([*nice, "./configure", *settings], source)
    _run([*nice, "make", f"-j{len(os.sched_getaffinity(0))}", "python", "platform"], source)
    ready = folder / "ready"
    (ready / "bin").mkdir(parents=True)
    shutil.copy2(source / "python", ready / "bin" / f"python{VERSION}t")
    shutil.copytree(source / "Lib", ready / "lib" / f"python{VERSION}t", ignore=_LEFT_OUT)
    (ready / "lib" / f"python{VERSION}t" / "lib-dynload").mkdir()
    # Made beside its place and renamed: what is there is whole.
    shutil.rmtree(final, ignore_errors=True)
    ready.rename(final)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        last = done.stdout.strip().splitlines()[-1:] or ["no output"]
        raise roots.RootsError(f"{command[0]}: {last[0]}")


def main() -> int:
    """Make it."""
    try:
        print(interpreter())
    except roots.RootsError as e:
        print(f"freethreaded: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
