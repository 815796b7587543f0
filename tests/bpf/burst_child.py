"""The counted work of ``burst_work.c``, and a burst that lasts as long as it."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from whyspan.burst.options import Options
from whyspan.burst.report import Report

HERE = Path(__file__).parent
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)  # BPF_RET | BPF_K, SECCOMP_RET_ALLOW


def build(folder: Path, source: str, name: str, *flags: str) -> Path:
    """Compile a C file of this folder."""
    path = folder / name
    if not path.exists():
        command = ["cc", "-O2", "-fno-builtin", "-pthread", *flags, "-o", str(path), str(HERE / source)]
        subprocess.run(command, check=True)
    return path


def allow_all() -> None:
    """Have this process filtered by seccomp, by a filter that allows everything."""
    libc = ctypes.CDLL(None, use_errno=True)
    program = ctypes.create_string_buffer(_ALLOW, len(_ALLOW))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(program)), 16)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filters, 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


class Work:
    """Threads a0 to a7 of one process, which do what ``do`` says."""

    def __init__(
        self, path: Path, env: Mapping[str, str] | None = None, before: Callable[[], None] | None = None
    ) -> None:
        """Start it; *before* runs in it before the program begins."""
        self._process = subprocess.Popen(
            [str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **(env or {})},
            preexec_fn=before,  # noqa: PLW1509
        )
        self.tgid = self._process.pid
        self._expect("ready")

    def do(self, order: str) -> None:
        """Have threads do something, such as ``1-2 malloc 1009 100``, and wait for it."""
        self.begin(order)
        self._expect("done")

    def begin(self, order: str) -> None:
        """The same without waiting; ``end`` waits."""
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")

    def end(self) -> None:
        """Wait for what was begun."""
        self._expect("done")

    def tid(self, name: str) -> int:
        """Return the number of a thread."""
        for folder in Path(f"/proc/{self.tgid}/task").iterdir():
            if (folder / "comm").read_text().strip() == name:
                return int(folder.name)
        raise AssertionError(f"no thread {name}")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line == f"{word}\n", f"the work said {line!r}"


def during(kind: ModuleType, work: Work, *orders: str) -> Report:
    """Make a burst that is on for as long as the work takes."""
    done: list[str] = []

    def progress(_: float) -> None:
        if not done:
            for order in orders:
                work.do(order)
            done.append("done")

    options = Options(work.tgid, 60, force=True, top=1000, progress=progress, stopped=lambda: bool(done))
    report: Report = kind.run(options)
    return report
