"""Asks the symboliser, a process of its own, what functions are called: the question, its answer, checked, and how."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from whyspan import own
from whyspan.code.asked import Line, Question
from whyspan.code.functions import shorten
from whyspan.code.names import Range
from whyspan.text import clean

COMMAND: Final = tuple(own.command("whyspan.code.symboliser"))
#: It is niced: on a machine that is busy it takes its time.
TIMEOUT_S: Final = 60.0
_MAX_ANSWER: Final = 8 << 20
_MAX_LINES: Final = 4096
_NAME_CHARS: Final = 160
_NOWHERE: Final = 1 << 63


class Answer(msgspec.Struct):
    """All that was answered. ``by``: bcc, maps (no names of files' functions), or empty when it came to nothing.

    A module whose number is not in ``modules`` was not come to: ``whole`` is false then, and the first such one is
    what the symboliser ended over. ``why`` says what went wrong.
    """

    by: str = ""
    why: str = ""
    modules: dict[int, list[Range]] = {}
    made: dict[int, list[Range]] = {}
    kernel: dict[int, str] = {}
    syscalls: dict[int, str] = {}
    whole: bool = False
    cpu_s: float = 0.0


_LINE: Final = msgspec.json.Decoder(Line)


def decode(data: bytes, status: int) -> Answer:
    """Take an answer apart, as far as it is one; *status* is how the symboliser ended."""
    out = Answer()
    try:
        for raw in data[:_MAX_ANSWER].split(b"\n")[:_MAX_LINES]:
            if raw:
                _take(_LINE.decode(raw), out)
    except (msgspec.DecodeError, ValueError):
        out.why = "the symboliser's answer is none"
    if not out.whole and not out.why:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        out.why = f"the symboliser ended with {how}"
    return out


def _take(line: Line, out: Answer) -> None:
    if line.by:
        out.by, out.why = clean(line.by, 20), clean(line.why)
    if line.module >= 0:
        out.modules[line.module] = _ranges(line.ranges)
    if line.made >= 0:
        out.made[line.made] = _ranges(line.ranges)
    if line.kernel is not None:
        out.kernel = _names(line.kernel)
    if line.syscalls is not None:
        out.syscalls = _names(line.syscalls)
    out.whole = out.whole or line.end


def _ranges(raw: list[tuple[int, int, str]]) -> list[Range]:
    return [
        Range(start, end, clean(shorten(name), _NAME_CHARS))
        for start, end, name in raw
        if 0 <= start < end <= _NOWHERE
    ]


def _names(raw: dict[str, str]) -> dict[int, str]:
    return {int(a): clean(text, _NAME_CHARS) for a, text in raw.items() if text}


def text(name: str, module: str) -> str:
    """Return a frame in words."""
    return f"{module}{name}" if name.startswith("+") else f"{name} [{module}]"


class Asker:
    """One question at a time, asked without waiting: question and answer lie in memory files."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        """*command* is for tests."""
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._answer = -1
        self._until_s = 0.0

    @property
    def tgid(self) -> int:
        """The symboliser's process id, 0 when there is none."""
        return self._process.pid if self._process else 0

    def ask(self, question: Question, now_s: float) -> None:
        """Start it. Raises OSError when it cannot be started."""
        question.parent = os.getpid()
        asked = _written(question)
        answer = os.memfd_create("whyspan-answer", os.MFD_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                self._command, stdin=asked, stdout=answer, stderr=subprocess.DEVNULL, process_group=0
            )
        except BaseException:
            os.close(answer)
            raise
        finally:
            os.close(asked)
        self._answer, self._until_s = answer, now_s + TIMEOUT_S

    def poll(self, now_s: float) -> Answer | None:
        """Return the answer once it is there; None while there is none."""
        if self._process is None:
            return None
        pid, status, used = os.wait4(self._process.pid, os.WNOHANG)
        if not pid:
            if now_s >= self._until_s:
                self._process.kill()
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        out = decode(os.pread(self._answer, _MAX_ANSWER, 0), self._process.returncode)
        out.cpu_s = used.ru_utime + used.ru_stime
        os.close(self._answer)
        self._process = None
        return out

    def close(self) -> None:
        """End it, if it runs."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._answer)
            self._process = None


def _written(question: Question) -> int:
    """Return a descriptor of a memory file that holds the question, at its beginning: it may be read twice."""
    fd = os.memfd_create("whyspan-question", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as f:
        f.write(msgspec.json.encode(question))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def ask(question: Question, command: Sequence[str] = COMMAND) -> Answer:
    """Ask, and wait for the answer."""
    fd = _written(question)
    try:
        done = subprocess.run(list(command), stdin=fd, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return Answer(why=f"the symboliser failed: {type(e).__name__}")
    finally:
        os.close(fd)
    return decode(done.stdout, done.returncode)
