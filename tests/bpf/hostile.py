"""A process that does odd things, by name: what an observer of strange processes has to bear. Prints ``ready``.

python -m tests.bpf.hostile KIND FOLDER
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.demo.procs import set_name

EVIL = "\x1b]0;x\x07\n\x1b[31m"
_libc = ctypes.CDLL(None)


def names(folder: Path) -> None:
    """Escape codes and newlines in the names of the process, of a thread, and of a file that it has open and mapped."""
    set_name(EVIL + "evil")
    path = folder / f"evil\n{EVIL}.so.1"
    path.write_bytes(b"\x7fELF" + b"\0" * 8188)
    with path.open("rb") as f:
        mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
        threading.Thread(target=_named, daemon=True).start()
        _rest()


def _named() -> None:
    set_name("\n" + EVIL)
    time.sleep(3600)


def mapped(folder: Path) -> None:
    """Ten thousand mapped files."""
    kept = []
    for number in range(10_000):
        path = folder / f"lib{number}.so"
        path.write_bytes(b"x")
        with path.open("rb") as f:
            kept.append(mmap.mmap(f.fileno(), 1, prot=mmap.PROT_READ))
        path.unlink()
    _rest()


def deleted(folder: Path) -> None:
    """A library that is deleted while it is mapped, and an executable that is replaced while it runs."""
    source = next(
        Path(p)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if (p := line.split()[-1]).endswith("libc.so.6")
    )
    copy = folder / "libllama.so"
    shutil.copy(source, copy)
    ctypes.CDLL(str(copy))
    copy.unlink()
    copy.write_bytes(b"not a library")
    _rest()


def renaming(folder: Path) -> None:
    """Threads that are renamed all the time."""

    def rename(number: int) -> None:
        count = 0
        while True:
            set_name(f"{EVIL[:3]}{number}-{count}")
            count += 1
            time.sleep(0.001)

    for number in range(7):
        threading.Thread(target=rename, args=(number,), daemon=True).start()
    _rest()


def children(folder: Path) -> None:
    """Short children, one after the other, and zombies that nobody asks for."""
    for _ in range(23):
        if os.fork() == 0:
            os._exit(0)
    _ready()
    while True:
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        os.waitpid(pid, 0)
        time.sleep(0.001)


def replaced(folder: Path) -> None:
    """An executable that is replaced while it runs, by rubbish."""
    exe = folder / "server"
    shutil.copy("/bin/sleep", exe)
    pid = os.posix_spawn(exe, ["vllm", "3600"], dict(os.environ))
    with contextlib.suppress(OSError):
        exe.unlink()
    exe.write_bytes(b"\x7fELF" + os.urandom(4096))
    try:
        _rest()
    finally:
        os.kill(pid, 9)


def brief(folder: Path) -> None:
    """Processes that call themselves a server and end while somebody attaches to them."""
    _ready()
    while True:
        pid = os.posix_spawn("/bin/sh", ["vllm", "-c", "sleep 0.02"], dict(os.environ))
        os.waitpid(pid, 0)


KINDS: dict[str, Callable[[Path], None]] = {
    f.__name__: f for f in (names, mapped, deleted, renaming, children, replaced, brief)
}


def _ready() -> None:
    os.write(1, b"ready\n")


def _rest() -> None:
    _ready()
    while True:
        time.sleep(0.01)


if __name__ == "__main__":
    _libc.prctl(1, 9, 0, 0, 0)  # ends with its parent
    KINDS[sys.argv[1]](Path(sys.argv[2]))
