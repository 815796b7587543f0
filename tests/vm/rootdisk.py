"""The disk that guests run on: this machine's own programs and libraries and ``.venv``, copied once per state of both.

A root shared over 9p was tried first: each import is thousands of round trips there, and pytest did not come to its
first test in five minutes. The disk is a raw ext4 image that guests use as a snapshot: tests may write anywhere and
nothing stays. The tree itself is not in it: each run brings it along (``guest.py``).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from tests.engine.install import cache

REPOSITORY = Path(__file__).resolve().parents[2]
_FORMAT = "2"  # raise it when what the disk holds changes
#: Sparse: what is not filled is room for a guest's own files, which go to a temporary file.
SIZE_BYTES = 12 << 30
NEEDED_BYTES = 6 << 30
#: Large, and no test of the tier `bpf` uses it; or slow: systemd-tmpfiles costs 13 s of a guest's start, and what this
#: machine hangs into every Python's start (`.pth`) is paid by each of the children of the tests.
_NOT = (
    "usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/icons", "usr/share/vim", "usr/share/package-lists",
    "usr/lib/jvm", "usr/lib/google-cloud-sdk", "usr/lib/chromium", "usr/lib/postgresql", "usr/lib/node_modules",
    "usr/local/cuda*", "usr/lib/modules", "usr/bin/systemd-tmpfiles", "usr/bin/udevadm", "usr/lib/firmware",
    "*/site-packages/playwright", "*/site-packages/mypy", "*/site-packages/mypyc", "*/.venv/bin/ruff",
    "*/dist-packages/*.pth",
)  # fmt: skip
_SBIN = ":/usr/sbin:/sbin"


class RootDiskError(Exception):
    """The disk cannot be made here; the text says why, in one line."""


def _state() -> str:
    """What the disk's content depends on: the machine's packages and those of the environment, but for our own."""
    try:
        shown = subprocess.run(
            ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${db:Status-Abbrev}\n"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as e:
        raise RootDiskError(f"needs a Debian system: {e}") from None
    site = Path(sysconfig.get_path("purelib"))
    names = [*shown.splitlines(), *(p.name for p in site.glob("*.dist-info"))]
    parts = [_FORMAT, str(REPOSITORY), *sorted(n for n in names if not n.startswith("whyspan"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _run(*command: str) -> None:
    env = {**os.environ, "PATH": os.environ.get("PATH", "") + _SBIN}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["no output"]
        raise RootDiskError(f"{command[0]}: {last[0]}")


def _copied() -> list[str]:
    """The folders that the disk holds, relative to the root: programs, settings, the environment and its Python."""
    folders = ["usr", "etc", "var/lib/dpkg", str(REPOSITORY / ".venv").lstrip("/")]
    base = sys.base_prefix.lstrip("/")
    if base != "usr" and not base.startswith("usr/"):
        folders.append(base)
    folders += [name for name in ("bin", "sbin", "lib", "lib64", "lib32") if os.path.lexists(f"/{name}")]
    return folders


def _fill(root: Path) -> None:
    with contextlib.ExitStack() as stack:
        excludes = [f"--exclude={pattern}" for pattern in _NOT]
        packed = stack.enter_context(
            subprocess.Popen(
                ["tar", "--create", "--directory=/", "--one-file-system", *excludes, *_copied()],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
        _tar_in(packed, root)
    for name in (
        "proc",
        "sys",
        "dev",
        "run",
        "tmp",
        "root",
        "home",
        "opt",
        "srv",
        "mnt",
        "var/log",
        "var/tmp",
        "var/cache",
    ):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    (root / "usr/lib/modules").mkdir(exist_ok=True)


def _tar_in(packed: subprocess.Popen[bytes], root: Path) -> None:
    done = subprocess.run(
        ["tar", "--extract", "--preserve-permissions", "--numeric-owner", f"--directory={root}"],
        stdin=packed.stdout,
        capture_output=True,
        check=False,
    )
    # tar gives 1 when a file changed while it was read: others may install something just now.
    if done.returncode or packed.wait() > 1:
        raise RootDiskError(f"tar: {done.stderr.decode(errors='replace').strip()[-200:] or 'failed'}")


@contextlib.contextmanager
def _mounted(image: Path) -> Iterator[Path]:
    point = image.with_suffix(".mnt")
    point.mkdir(exist_ok=True)
    while os.path.ismount(point):  # left by one that was killed
        _run("umount", str(point))
    _run("mount", "-o", "loop", str(image), str(point))
    try:
        yield point
    finally:
        _run("umount", str(point))
        point.rmdir()


def rootdisk() -> Path:
    """Return the image for the present state of this machine, made now if need be; older ones are removed.

    Raises:
        RootDiskError: it is not there and cannot be made.
    """
    folder = cache() / "rootdisk"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        final = folder / f"{_state()}.ext4"
        if final.exists():
            return final
        if os.geteuid() != 0:
            raise RootDiskError("needs root: the image is mounted while it is filled")
        if shutil.disk_usage(folder).free < NEEDED_BYTES:
            raise RootDiskError(f"needs {NEEDED_BYTES >> 30} GiB free in {folder}")
        for old in folder.glob("*.ext4"):
            old.unlink()  # a guest that runs on it keeps it until it ends
        made = folder / "made.ext4.tmp"
        with made.open("wb") as f:
            f.truncate(SIZE_BYTES)
        _run("mkfs.ext4", "-q", "-F", "-O", "^metadata_csum", "-E", "lazy_itable_init=1", str(made))
        with _mounted(made) as root:
            _fill(root)
        made.rename(final)
        return final


def main() -> int:
    """Make the disk now, and say where it is."""
    began = time.monotonic()
    try:
        print(rootdisk())
    except RootDiskError as e:
        print(f"rootdisk: {e}", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
