"""A small disk of one's own: a loop device with a file system, or swap, on it; slow if asked to. Undone on exit."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_SBIN = "/usr/sbin:/sbin:/usr/bin:/bin"
_BLKIO = Path("/sys/fs/cgroup/blkio")


def run(*argv: object) -> str:
    """Run a program and return what it printed.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    env = {**os.environ, "PATH": _SBIN}
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, argv))}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def device(folder: Path, megabytes: int) -> Iterator[str]:
    """A loop device on a file of that size in *folder*; yields its path."""
    image = folder / f"disk-{os.getpid()}-{os.urandom(3).hex()}.img"
    with contextlib.ExitStack() as undo:
        undo.callback(image.unlink, missing_ok=True)
        run("truncate", "-s", f"{megabytes}M", image)
        node = run("losetup", "--direct-io=on", "-f", "--show", image)
        undo.callback(run, "losetup", "-d", node)
        yield node


@contextlib.contextmanager
def mounted(folder: Path, megabytes: int = 64, options: str = "defaults") -> Iterator[tuple[str, Path]]:
    """An ext4 file system on a loop device; yields the device and where it is mounted."""
    with device(folder, megabytes) as node, contextlib.ExitStack() as undo:
        # Without lazy initialisation: it would be somebody else's load on the disk.
        run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", node)
        at = folder / Path(node).name
        at.mkdir(exist_ok=True)
        undo.callback(at.rmdir)
        run("mount", "-o", options, node, at)
        undo.callback(unmount, at)
        yield node, at


def unmount(at: Path) -> None:
    """Take a file system away, even if somebody still has a file of it open."""
    try:
        run("umount", at)
    except RuntimeError:
        run("umount", "-l", at)


@contextlib.contextmanager
def swap(folder: Path, megabytes: int = 64) -> Iterator[str]:
    """Swap on a loop device, of lower priority than any other; yields the device."""
    with device(folder, megabytes) as node:
        run("mkswap", node)
        run("swapon", "-p", "0", node)
        try:
            yield node
        finally:
            run("swapoff", node)


def busy_ms(node: str) -> int:
    """Return for how long requests were in the device, each counted, since it was made."""
    fields = Path(f"/sys/class/block/{Path(node).name}/stat").read_text().split()
    return int(fields[3]) + int(fields[7])


def sectors_written(node: str) -> int:
    """Return how many sectors of 512 bytes were written to it."""
    return int(Path(f"/sys/class/block/{Path(node).name}/stat").read_text().split()[6])


def major_faults(pid: int) -> int:
    """Return the major faults of a process so far."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[9])


@contextlib.contextmanager
def slowed(node: str, **limits: int) -> Iterator[None]:
    """Throttle a device: ``read_bps``, ``write_bps``, ``read_iops``, ``write_iops``, for all who use it.

    Raises:
        RuntimeError: there is no version 1 hierarchy of the controller.
    """
    number = os.stat(node).st_rdev
    name = f"{os.major(number)}:{os.minor(number)}"
    files = {_BLKIO / f"blkio.throttle.{key}_device": value for key, value in limits.items()}
    if missing := [f for f in files if not f.exists()]:
        raise RuntimeError(f"no {missing[0]}: needs the blkio controller of cgroup v1")
    try:
        for file, value in files.items():
            file.write_text(f"{name} {value}")
        yield
    finally:
        for file in files:
            with contextlib.suppress(OSError):
                file.write_text(f"{name} 0")
