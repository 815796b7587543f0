"""The supervisor behind ``whyspan run``: keeps collector and exporter running, and stops them in order.

It holds nothing but the two process ids, so it stays small: no numpy, no event, no finding passes through it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whyspan.config import OVERRIDES_ENV, load_config
from whyspan.log import LOG_ENV

log = logging.getLogger("whyspan.run")

BACKOFF_S = (0.2, 5.0)
STOP_S = 5.0
#: A child that lived this long died of something new: start again at the short delay.
_SETTLED_S = 10.0
#: Exit statuses that a restart cannot cure: wrong configuration or usage, missing privilege.
FATAL_STATUSES = frozenset({2, 3})

_PR_SET_PDEATHSIG = 1
_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
_libc = ctypes.CDLL(None)


class Child:
    """One supervised process."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Describe it; `start` starts it."""
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self.restart_at_s = 0.0
        self._argv, self._env = list(argv), dict(env)
        self._delay_s = BACKOFF_S[0]
        self._started_s = 0.0

    def start(self) -> None:
        """Start it: in its own process group, so that Ctrl-C reaches only the supervisor."""
        parent = os.getpid()

        def in_child() -> None:
            # The children end (and flush) when the supervisor is killed; it may already be.
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])

        self._started_s = time.monotonic()
        # preexec_fn is unsafe only beside other threads, and the supervisor has none.
        self.process = subprocess.Popen(
            self._argv,
            env=self._env,
            stdin=subprocess.DEVNULL,
            preexec_fn=in_child,  # noqa: PLW1509
            process_group=0,
        )
        log.info("%s started, process %d", self.name, self.process.pid)

    def reap(self) -> int | None:
        """Return the exit status (negative: a signal) if the process has just ended, and plan its restart."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        self.process = None
        now_s = time.monotonic()
        if now_s - self._started_s >= _SETTLED_S:
            self._delay_s = BACKOFF_S[0]
        self.restart_at_s = now_s + self._delay_s
        return status

    def back_off(self) -> float:
        """Return the delay before the planned restart, in s; the next one will be twice as long."""
        delay_s, self._delay_s = self._delay_s, min(self._delay_s * 2, BACKOFF_S[1])
        return delay_s

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process is there."""
        if self.process is not None:
            self.process.send_signal(number)


class Supervisor:
    """Runs children until a signal. Not reusable; must own the main thread, whose signals it blocks."""

    def __init__(self, children: Sequence[Child]) -> None:
        """Take *children* in the order in which they are started; they are stopped in reverse."""
        self._children = children

    def run(self) -> int:
        """Supervise until SIGTERM or SIGINT, then stop everything; a second signal kills.

        Returns:
            0 after an orderly stop, 1 when a child had to be killed, or the fatal status of a child.
        """
        # Blocked and taken one by one: no handler, so nothing can happen between two lines.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        fatal = 0
        for child in self._children:
            child.start()
        while not fatal:
            received = self._wait(self._next_restart_s())
            if received in _STOP_SIGNALS:
                log.info("stopping on %s", received.name)
                break
            for child in self._children:
                fatal = fatal or self._tend(child)
        return max(fatal, self._stop())

    def _tend(self, child: Child) -> int:
        status = child.reap()
        if status is None:
            if child.process is None and time.monotonic() >= child.restart_at_s:
                child.start()
            return 0
        how = f"killed by signal {-status}" if status < 0 else f"exited with status {status}"
        if status in FATAL_STATUSES:
            log.error("%s %s: stopping", child.name, how)
            return status
        log.warning("%s %s: restarting in %.1f s", child.name, how, child.back_off())
        return 0

    def _next_restart_s(self) -> float:
        waiting = [c.restart_at_s for c in self._children if c.process is None]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else 3600.0

    def _wait(self, timeout_s: float) -> signal.Signals | None:
        info = signal.sigtimedwait(_SIGNALS, timeout_s)
        return None if info is None else signal.Signals(info.si_signo)

    def _stop(self) -> int:
        killed = 0
        for child in reversed(self._children):
            child.send(signal.SIGTERM)
            deadline_s = time.monotonic() + STOP_S
            while child.process is not None and child.reap() is None:
                received = self._wait(max(0.0, deadline_s - time.monotonic()))
                impatient = received in _STOP_SIGNALS
                if impatient or time.monotonic() >= deadline_s:
                    log.warning("%s did not stop: killed", child.name)
                    killed = 1
                    for one in self._children if impatient else [child]:
                        one.send(signal.SIGKILL)
                    deadline_s += 3600.0  # a killed process ends
        log.info("stopped")
        return killed


def supervise(config_path: Path | None, overrides: Mapping[str, Any], *, verbose: bool = False) -> int:
    """Run the collector and the exporter until a signal; the body of ``whyspan run``.

    Args:
        config_path: The configuration file, or None for the default.
        overrides: What the command line sets, in the shape of the file.
        verbose: Log at debug level, here and in both processes.

    Returns:
        The exit status, see `Supervisor.run`.

    Raises:
        ConfigError: The configuration or the overrides are wrong.
    """
    config = load_config(config_path, overrides)
    config.socket_path  # noqa: B018  # too long a path is said once, here
    env = dict(os.environ)
    env[OVERRIDES_ENV] = json.dumps(overrides)
    if verbose:
        env[LOG_ENV] = "debug"
    options = [] if config_path is None else ["--config", os.fspath(config_path)]

    def child(name: str, module: str) -> Child:
        return Child(name, [sys.executable, "-m", module, *options], env)

    return Supervisor(
        [child("exporter", "whyspan_exporters.exporter"), child("collector", "whyspan.pipeline.collector")]
    ).run()
