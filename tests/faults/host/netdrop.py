"""Lose packets, in a network namespace only: a tc program where netem is not there. And counters of a namespace."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests.demo.procs import ROOT, DemoError

SOURCE = Path(__file__).with_name("netdrop.bpf.c")
#: Tables of counters: /proc/PID/net/NAME are those of the process's own namespace.
TABLES = ("snmp", "netstat")
_ENV = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
T = TypeVar("T")


def _run(*words: object) -> None:
    argv = [str(w) for w in words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=_ENV)
    if done.returncode:
        raise DemoError(f"{' '.join(argv)}: {done.stderr.strip()}")


def build(folder: Path, port: int, percent: int = 0, syns: int = 0) -> Path:
    """Compile the program and return its object."""
    out = folder / f"netdrop-{port}-{percent}-{syns}.o"
    flags = ("-O2", "-g", "-target", "bpf", f"-I{ROOT / 'build'}")
    values = (f"-DPORT={port}", f"-DPERCENT={percent}", f"-DSYNS={syns}")
    _run("clang", *flags, *values, "-c", SOURCE, "-o", out)
    return out


@contextmanager
def dropping(
    pid: int,
    folder: Path,
    port: int,
    *,
    percent: int = 0,
    syns: int = 0,
    device: str = "lo",
    way: str = "ingress",
) -> Iterator[None]:
    """Lose *percent* of the packets with data at a port, or each connection's first *syns* SYNs.

    In the network namespace of *pid* only, on one device and way (``ingress``, ``egress``).

    Raises:
        DemoError: it is this process's own namespace, or tc refused.
    """
    if os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        raise DemoError("packets are lost in a namespace of their own only")
    tc = ("nsenter", f"--net=/proc/{pid}/ns/net", "tc")
    program = build(folder, port, percent, syns)
    _run(*tc, "qdisc", "add", "dev", device, "clsact")
    try:
        _run(*tc, "filter", "add", "dev", device, way, "bpf", "da", "obj", program, "sec", "tc")
        yield
    finally:
        _run(*tc, "qdisc", "del", "dev", device, "clsact")


def counters(pid: int | str = "self") -> dict[str, int]:
    """Return the TCP counters of a process's network namespace, by name: of RFC 1213 and the kernel's own."""
    found: dict[str, int] = {}
    for table in TABLES:
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()
        for names, values in zip(lines[::2], lines[1::2], strict=True):
            if names.startswith("Tcp"):
                found.update(zip(names.split()[1:], map(int, values.split()[1:]), strict=True))
    return found


def within(pid: int, make: Callable[[], T]) -> T:
    """Return what *make* returns when called in the network namespace of a process: a namespace is a thread's."""
    made: list[T] = []
    failed: list[BaseException] = []

    def enter() -> None:
        try:
            with open(f"/proc/{pid}/ns/net") as f:
                if ctypes.CDLL(None, use_errno=True).setns(f.fileno(), 0x40000000):  # CLONE_NEWNET
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(make())
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]
