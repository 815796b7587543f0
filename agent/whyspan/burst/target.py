"""The process that a burst looks at: whether it may, and waiting beside it."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from whyspan_probes.features import Features, read_features

from whyspan.burst.errors import BurstError
from whyspan.text import clean

_PROC = Path("/proc")
MAX_SECONDS = 60.0
_TICK_S = 0.1
_NAME_CHARS = 32


class Target:
    """A process, held by a descriptor so that its number cannot become another's."""

    def __init__(self, tgid: int, proc: Path = _PROC) -> None:
        """Find it.

        Raises:
            BurstError: there is no such process, or it is no process that can be looked at.
        """
        self.tgid, self._proc = tgid, proc
        if tgid == os.getpid():
            raise BurstError(f"{tgid} is this process itself")
        fields = self._status()
        if int(fields.get("Tgid", "0")) != tgid:
            raise BurstError(f"{tgid} is a thread of process {fields.get('Tgid', '?')}: name that")
        if fields.get("State", "").startswith(("Z", "X")) or "VmSize" not in fields:
            raise BurstError(f"process {tgid} has ended or has no memory of its own")
        try:
            self._fd = os.pidfd_open(tgid)
        except OSError as e:
            raise BurstError(f"process {tgid}: {e.strerror}") from e
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self.name = clean(fields.get("Name", ""), _NAME_CHARS)

    def __enter__(self) -> Target:
        """Hold it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let it go."""
        os.close(self._fd)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return not self._poll.poll(0)

    def wait(
        self, seconds: float, stopped: Callable[[], bool], progress: Callable[[float], None]
    ) -> tuple[float, str]:
        """Wait; return how long that was and why it ended: time, asked, or process ended."""
        begun = time.monotonic()
        while True:
            passed = time.monotonic() - begun
            progress(min(passed, seconds))
            if passed >= seconds:
                return passed, "time"
            if stopped():
                return passed, "asked"
            if self._poll.poll(min(_TICK_S, seconds - passed) * 1000):
                return time.monotonic() - begun, "process ended"

    def threads(self) -> dict[int, str]:
        """Return the names of its threads by number; none when it has ended."""
        out = {}
        try:
            for folder in (self._proc / str(self.tgid) / "task").iterdir():
                try:
                    out[int(folder.name)] = clean((folder / "comm").read_text(errors="replace").rstrip("\n"))
                except (OSError, ValueError):
                    continue
        except OSError:
            pass
        return out

    def _status(self) -> dict[str, str]:
        try:
            text = (self._proc / str(self.tgid) / "status").read_text(errors="replace")
        except OSError as e:
            raise BurstError(f"there is no process {self.tgid}") from e
        return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def check_host() -> Features:
    """Return what the host allows.

    Raises:
        BurstError: it does not allow a burst.
    """
    features = read_features()
    if not features.may_load:
        raise BurstError("a burst needs root (CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE at least)")
    if not features.host_pids:
        raise BurstError("a burst needs the host's process ids: run this container with --pid=host")
    return features
