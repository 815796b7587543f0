"""Bursts that slow requests trigger: which process, when, and what became of them. Nothing here waits, but ``close``.

A burst runs in a process of its own, which holds its programs and takes them with it. It measures a watched process,
the one that the verdict blames or the one that served the request. What it found lies in a file (`whyspan.burst.files`)
and, added up by thread name and size, in the collector's state, from where the exporters make metrics.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from whyspan import clock, config, own
from whyspan.burst import files
from whyspan.burst.report import Report
from whyspan.burst.worker import DONE, TOO_DEAR
from whyspan.model import Finding
from whyspan.text import clean

log = logging.getLogger("whyspan.collector")

COMMAND: Final = tuple(own.command("whyspan.burst.worker"))
#: Rows by thread name and size in the state: each is some time series.
MAX_ROWS: Final = 32
OTHER: Final = "other"
#: The figures of a burst are shown for so long: later they say nothing of the present.
SHOWN_S: Final = 900.0
#: It looks, loads, measures, names symbols (30 s at most); one that takes longer than this beyond its time hangs.
_GRACE_S: Final = 60.0
_STOP_S: Final = 1.5
_NUMBERS: Final = re.compile(r"\d+")


class _Running(NamedTuple):
    process: subprocess.Popen[bytes]
    kind: str
    tgid: int
    service: str
    path: Path
    until_s: float
    message: Path


class Bursts:
    """At most one at a time."""

    def __init__(
        self, settings: config.Burst, state_dir: Path, btf: str = "", command: Sequence[str] = COMMAND
    ) -> None:
        """*command* is for tests."""
        self._settings, self._state_dir, self._btf = settings, state_dir, btf
        self._command = list(command)
        self._running: _Running | None = None
        self._waiting: list[tuple[str, int, str]] = []  # of the same breach: kind, process, service
        self._next_s = 0.0
        self._counts: dict[tuple[str, str], int] = {}
        self._last: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []
        self._rows_at_s = 0.0

    @property
    def tgid(self) -> int:
        """Its process, 0 when there is none."""
        return self._running.process.pid if self._running else 0

    def reconfigure(self, settings: config.Burst) -> None:
        """Go by other settings, from the next slow request on."""
        self._settings = settings

    def consider(self, finding: Finding, watched: Collection[int], now_s: float) -> None:
        """Start one, if the finding asks for it and enough time has passed. *now_s* is CLOCK_MONOTONIC."""
        s = self._settings
        if not s.on_breach or not finding.slow or self._running or self._waiting or now_s < self._next_s:
            return
        cause = finding.verdict.cause
        if not any(cause == c or cause.startswith(f"{c}.") for c in s.causes):
            return
        blamed, served = finding.verdict.culprit.tgid, finding.request.tgid
        tgid = blamed if blamed in watched else served
        if tgid not in watched:
            return
        self._next_s = now_s + s.min_interval_s
        log.info(
            "burst of process %d, since %s of trace %s was %s",
            tgid,
            finding.request.route,
            finding.request.trace_id,
            cause,
        )
        self._waiting = [(kind, tgid, finding.request.service) for kind in dict.fromkeys(s.on_breach)]

    def tend(self, now_s: float) -> None:
        """See to what runs, and start what waits."""
        if self._running is not None:
            status = self._running.process.poll()
            if status is not None:
                self._ended(self._running, status, now_s)
            elif now_s >= self._running.until_s:
                self._running.process.kill()
        if self._running is None and self._waiting:
            self._start(*self._waiting.pop(0), now_s)

    def new_counts(self) -> dict[tuple[str, str], int]:
        """Return how many there were since the last call, by kind and result: done, too dear, failed."""
        counts, self._counts = self._counts, {}
        return counts

    def state(self, now_s: float) -> dict[str, Any]:
        """Return what the newest was and, for a while, its figures; JSON-like."""
        shown = self._rows if now_s - self._rows_at_s < SHOWN_S else []
        return {"tgid": self.tgid, "last": self._last, "malloc": shown}

    def close(self) -> None:
        """End the one that runs: it stops and goes."""
        if self._running is None:
            return
        self._running.process.terminate()
        try:
            status = self._running.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._running.process.kill()
            status = self._running.process.wait()
        self._ended(self._running, status, time.monotonic())

    def _start(self, kind: str, tgid: int, service: str, now_s: float) -> None:
        path = files.path_for(self._state_dir, kind, clock.now_unix_ns(), tgid)
        message = path.with_suffix(".log")
        words = ["--pid", str(tgid), "--seconds", f"{self._settings.seconds:g}", "--parent", str(os.getpid())]
        words += ["--btf", self._btf] if self._btf else []
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with message.open("wb") as said:
                process = subprocess.Popen(
                    [*self._command, kind, *words, "--out", str(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    process_group=0,
                )
        except OSError as e:
            log.warning("burst %s of process %d cannot be started: %s", kind, tgid, e.strerror)
            self._count(kind, "failed")
            return
        until_s = now_s + self._settings.seconds + _GRACE_S
        self._running = _Running(process, kind, tgid, service, path, until_s, message)

    def _ended(self, r: _Running, status: int, now_s: float) -> None:
        self._running = None
        said = _last_line(r.message)
        r.message.unlink(missing_ok=True)
        report = files.read(r.path) if status == DONE else None
        result = "done" if report else "too dear" if status == TOO_DEAR else "failed"
        self._count(r.kind, result)
        why = said if status != DONE else ""
        self._last = {
            "kind": r.kind,
            "tgid": r.tgid,
            "service": r.service,
            "result": result,
            "reason": why,
            "file": str(r.path) if report else "",
            "unix_ns": clock.now_unix_ns(),
        }
        if report is None:
            log.warning("burst %s of process %d: %s: %s", r.kind, r.tgid, result, why or f"status {status}")
            return
        log.info(
            "burst %s of process %d: %s; see `whyspan burst last` or %s",
            r.kind,
            r.tgid,
            _told(report),
            r.path,
        )
        if r.kind == "malloc":
            self._rows, self._rows_at_s = summary(report, r.service), now_s
        files.tidy(self._state_dir)

    def _count(self, kind: str, result: str) -> None:
        self._counts[kind, result] = self._counts.get((kind, result), 0) + 1


def summary(report: Report, service: str) -> list[dict[str, Any]]:
    """Add a malloc burst up by thread name and size, those that blocked longest first, at most `MAX_ROWS`.

    Numbers in names count as one, so that the threads of a pool are one row.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for row in report.malloc:
        size = "none" if row.size_class < 0 else str(row.size_class)
        key = _NUMBERS.sub("N", clean(row.thread, 32)), size
        sums = found.setdefault(key, [0, 0, 0, 0])
        for i, value in enumerate((row.blocked_ns, row.lock_waits, row.timed, row.calls)):
            sums[i] += value
    ordered = sorted(found.items(), key=lambda item: (item[1], item[0]), reverse=True)
    for _, sums in ordered[MAX_ROWS - 1 :]:
        rest = found.setdefault((OTHER, OTHER), [0, 0, 0, 0])
        if rest is not sums:
            rest[:] = [a + b for a, b in zip(rest, sums, strict=True)]
    shown = ordered[: MAX_ROWS - 1]
    if (OTHER, OTHER) in found:
        shown.append(((OTHER, OTHER), found[OTHER, OTHER]))
    return [
        {
            "service": service,
            "thread": thread,
            "size_class": size,
            "calls": calls,
            "blocked_ns": blocked,
            "mean_blocked_ns": blocked / timed if timed else None,
            "lock_waits": waits if timed else None,
        }
        for (thread, size), (blocked, waits, timed, calls) in shown
    ]


def _told(report: Report) -> str:
    if report.kind == "samples":
        return f"{report.calls} samples"
    return (
        f"{report.calls} calls, {report.blocked_ns / 1e6:.1f} ms blocked, {report.lock_waits} lock acquisitions that "
        "blocked"
    )


def _last_line(path: Path) -> str:
    try:
        with path.open("rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - 4096))
            lines = f.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return clean(lines[-1], 300) if lines else ""
