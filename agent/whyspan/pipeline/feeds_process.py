"""The feeds process as the collector has it: started when needed, heard without waiting, restarted when it dies."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from whyspan import own
from whyspan.feeds import messages
from whyspan.feeds.messages import FeedsMessageError, Marks, Report, Setup

log = logging.getLogger("whyspan.collector")

COMMAND: Final = tuple(own.command("whyspan.feeds.worker"))
BACKOFF_S: Final = (0.5, 60.0)
_SETTLED_S: Final = 60.0
#: It reports every 2 s; one that says nothing for so long hangs, and keeps its publishers' queues full.
SILENT_S: Final = 30.0
_MAX_PACKETS: Final = 64  # per call: 6 MB
_STOP_S: Final = 1.0


class FeedsProcess:
    """One process at a time. Nothing here waits, except ``close``."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        """*command* is for tests; ``--fd N`` is added."""
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._delay_s = BACKOFF_S[0]
        self._started_s = self._heard_s = self._again_s = 0.0
        self._cpu_before_s = self._cpu_s = 0.0
        self._unsent: Setup | None = None
        self.restarts = 0
        self.rss_bytes = 0
        self.last_end = ""

    @property
    def tgid(self) -> int:
        """Its process id, 0 when there is none."""
        return self._process.pid if self._process else 0

    @property
    def cpu_s(self) -> float:
        """CPU seconds of this and all earlier ones, as they last said."""
        return self._cpu_before_s + self._cpu_s

    def tend(self, setup: Setup, changed: bool) -> bool:
        """Start it or start it again; tell it what has changed. Returns whether it was started just now."""
        now_s = time.monotonic()
        if self._process is not None:
            self._look_after(self._process, now_s)
        started = False
        if self._process is None and setup.feeds and now_s >= self._again_s:
            started = self._start(now_s)
        if started or changed:
            self._unsent = setup
        if self._unsent is not None and self._link is not None:
            try:
                self._link.send(messages.frame(self._unsent))
                self._unsent = None
            except BlockingIOError:
                pass
            except OSError:
                self._kill("does not listen")
        return started

    def receive(self) -> tuple[list[Marks], Report | None, int]:
        """Return what it said: marks, the newest report, and how many packets were none of either."""
        marks: list[Marks] = []
        report, bad = None, 0
        for _ in range(_MAX_PACKETS):
            if self._link is None:
                break
            try:
                packet = self._link.recv(messages.MAX_PACKET)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                packet = b""
            if not packet:  # the process is ending: tend() sees it
                self._link.close()
                self._link = None
                break
            try:
                message = messages.decode_to_collector(packet)
            except FeedsMessageError:
                bad += 1
                continue
            if isinstance(message, Marks):
                marks.append(message)
            else:
                report = message
                self._heard_s = time.monotonic()
                self._cpu_s, self.rss_bytes = message.cpu_s, message.rss_bytes
        return marks, report, bad

    def close(self) -> None:
        """End it: it goes when its socket is closed, else it is killed."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._process is not None:
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _start(self, now_s: float) -> bool:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                [*self._command, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        except OSError as e:
            ours.close()
            self._plan(f"cannot be started: {e.strerror}", now_s)
            return False
        finally:
            theirs.close()
        ours.setblocking(False)
        self._link = ours
        self._started_s = self._heard_s = now_s
        log.info("feeds started, process %d", self._process.pid)
        return True

    def _look_after(self, process: subprocess.Popen[bytes], now_s: float) -> None:
        status = process.poll()
        if status is None:
            if now_s - self._heard_s > SILENT_S:
                self._kill(f"silent for {SILENT_S:.0f} s")
            return
        self._process = None
        if self._link is not None:  # what it still said is not worth the trouble
            self._link.close()
            self._link = None
        self._cpu_before_s, self._cpu_s, self.rss_bytes = self.cpu_s, 0.0, 0
        if now_s - self._started_s >= _SETTLED_S:
            self._delay_s = BACKOFF_S[0]
        self.restarts += 1
        self._plan(f"killed by signal {-status}" if status < 0 else f"exited with status {status}", now_s)

    def _plan(self, how: str, now_s: float) -> None:
        self.last_end = how
        self._again_s = now_s + self._delay_s
        log.warning("feeds %s: restarting in %.1f s", how, self._delay_s)
        self._delay_s = min(2 * self._delay_s, BACKOFF_S[1])

    def _kill(self, why: str) -> None:
        log.warning("feeds process %d is killed: %s", self.tgid, why)
        self._heard_s = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(self.tgid, signal.SIGKILL)
