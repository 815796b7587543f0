"""The supervisor behind ``whyspan run``: keeps collector and exporter running, and stops them in order.

It holds nothing but the two process ids, so it stays small: no numpy, no event, no finding passes through it. To both
it is what a service manager is: they say when they are ready and that they get on, and one that hangs is killed. To a
service manager above (or none) it says so of both.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whyspan import own
from whyspan.config import OVERRIDES_ENV, SUPERVISOR_ENV, load_config
from whyspan.errors import ConfigError, WhyspanError
from whyspan.log import LOG_ENV
from whyspan.pipeline.told import NotifySocket
from whyspan.systemd import SOCKET_ENV, WATCHDOG_ENV, Notifier

log = logging.getLogger("whyspan.run")

BACKOFF_S = (0.2, 5.0)
STOP_S = 5.0
#: A process that has been ready and says nothing for so long hangs. The exporter may wait long for a busy disk.
WATCHDOG_S = {"collector": 30.0, "exporter": 60.0}
#: After SIGABRT, by which it says where it hangs, until it is killed.
_ABORT_S = 2.0
#: What a process may ask the service manager for, at once.
_MAX_EXTENSION_S = 300.0
#: A child that lived this long died of something new: start again at the short delay.
_SETTLED_S = 10.0
#: Exit statuses that a restart cannot cure: wrong configuration or usage, missing privilege.
FATAL_STATUSES = frozenset({2, 3})

_PR_SET_PDEATHSIG = 1
_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP, signal.SIGIO})
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
_libc = ctypes.CDLL(None)


class Child:
    """One supervised process."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Describe it; `start` starts it."""
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self.restart_at_s = 0.0
        self.ready = False
        self._watchdog_s = WATCHDOG_S.get(name, 0.0)
        self._heard_s = self._kill_at_s = math.inf
        self._argv, self._env = list(argv), dict(env)
        self._delay_s = BACKOFF_S[0]
        self._started_s = 0.0

    def start(self, manager: str = "") -> None:
        """Start it: in its own process group, so that Ctrl-C reaches only the supervisor.

        Args:
            manager: The address to which it reports.
        """
        parent = os.getpid()
        env = self._env | {SUPERVISOR_ENV: str(parent)}
        if manager:
            env |= {SOCKET_ENV: manager}
            if self._watchdog_s:
                env |= {WATCHDOG_ENV[0]: str(round(self._watchdog_s * 1e6))}

        def in_child() -> None:
            # The children end (and flush) when the supervisor is killed; it may already be.
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            # Until it can read its configuration again it has not read it a first time.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])

        self._started_s = time.monotonic()
        self.ready, self._heard_s, self._kill_at_s = False, math.inf, math.inf
        # preexec_fn is unsafe only beside other threads, and the supervisor has none.
        self.process = subprocess.Popen(
            self._argv,
            env=env,
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

    def hear(self, said: Mapping[str, str]) -> None:
        """Take in what it says of itself."""
        self._heard_s = time.monotonic()
        if said.get("RELOADING") == "1":
            self.ready = False
        if said.get("READY") == "1":
            self.ready = True

    def due_s(self) -> float:
        """Return when it has to be looked after, on the clock of ``time.monotonic``."""
        silent_s = self._heard_s + self._watchdog_s if self._watchdog_s and self.ready else math.inf
        return min(silent_s, self._kill_at_s)

    def end_if_hung(self) -> None:
        """Have it say where it hangs, then kill it, when it has said nothing for too long."""
        now_s = time.monotonic()
        if self.process is None or now_s < self.due_s():
            return
        if now_s >= self._kill_at_s:
            self.send(signal.SIGKILL)
            self._kill_at_s = math.inf
            return
        log.error("%s makes no progress for %.0f s: killed", self.name, now_s - self._heard_s)
        self.send(signal.SIGABRT)
        self.ready, self._kill_at_s = False, now_s + _ABORT_S

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

    def __init__(
        self,
        children: Sequence[Child],
        check: Callable[[], object] = lambda: None,
        notifier: Notifier | None = None,
    ) -> None:
        """Take *children* in the order in which they are started; they are stopped in reverse.

        Args:
            children: The processes; the last one's status line is shown as that of all.
            check: Reads the configuration before a reload; raises WhyspanError when it is wrong.
            notifier: The line to the service manager above.
        """
        self._children, self._check = children, check
        self._notifier = notifier or Notifier({})
        self._announced = False

    def run(self) -> int:
        """Supervise until SIGTERM or SIGINT, then stop everything; a second signal kills. SIGHUP reloads.

        Returns:
            0 after an orderly stop, 1 when a child had to be killed, or the fatal status of a child.
        """
        # Blocked and taken one by one: no handler, so nothing can happen between two lines.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        # Of somebody's terminal a hang-up is the end.
        stops = _STOP_SIGNALS | ({signal.SIGHUP} if os.isatty(0) else set())
        inbox = NotifySocket()
        fatal = 0
        for child in self._children:
            child.start(inbox.address)
        while not fatal:
            received = self._wait(max(0.0, self._due_s() - time.monotonic()))
            if received in stops:
                log.info("stopping on %s", received.name)
                break
            if received == signal.SIGHUP:
                self._reload()
            self._hear(inbox)
            for child in self._children:
                child.end_if_hung()
                fatal = fatal or self._tend(child, inbox.address)
            self._notifier.alive()
        self._notifier.stopping()
        return max(fatal, self._stop())

    def _reload(self) -> None:
        try:
            self._check()
        except WhyspanError as e:
            log.error("not reloaded, the old configuration stays: %s", e)
            return
        log.info("reloading")
        self._notifier.reloading()
        self._announced = False
        for child in self._children:
            child.ready = False
            child.send(signal.SIGHUP)

    def _hear(self, inbox: NotifySocket) -> None:
        for tgid, said in inbox.read():
            child = next((c for c in self._children if c.process is not None and c.process.pid == tgid), None)
            if child is None:
                continue
            child.hear(said)
            wanted = said.get("EXTEND_TIMEOUT_USEC", "")
            if wanted.isdecimal() and not self._announced:
                self._notifier.extend(min(int(wanted[:12]) / 1e6, _MAX_EXTENSION_S))
            if child is self._children[-1]:
                self._notifier.status(said.get("STATUS", ""))
        if not self._announced and all(c.ready for c in self._children):
            self._announced = True
            self._notifier.ready()

    def _tend(self, child: Child, manager: str) -> int:
        status = child.reap()
        if status is None:
            if child.process is None and time.monotonic() >= child.restart_at_s:
                child.start(manager)
            return 0
        how = f"killed by signal {-status}" if status < 0 else f"exited with status {status}"
        if status in FATAL_STATUSES:
            log.error("%s %s: stopping", child.name, how)
            return status
        log.warning("%s %s: restarting in %.1f s", child.name, how, child.back_off())
        return 0

    def _due_s(self) -> float:
        """Return when something has to be done, at the latest, on the clock of ``time.monotonic``."""
        now_s = time.monotonic()
        waiting = [c.restart_at_s if c.process is None else c.due_s() for c in self._children]
        return min(*waiting, now_s + 3600.0, now_s + (self._notifier.ping_s or 3600.0))

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
    notifier = Notifier()  # before the environment is handed on
    config = load_config(config_path, overrides)
    config.socket_path  # noqa: B018  # too long a path is said once, here
    _check_owner(config.state_dir)
    env = dict(os.environ)
    env[OVERRIDES_ENV] = json.dumps(overrides)
    if verbose:
        env[LOG_ENV] = "debug"
    options = [] if config_path is None else ["--config", os.fspath(config_path)]

    def child(name: str, module: str) -> Child:
        return Child(name, [*own.command(module), *options], env)

    return Supervisor(
        [child("exporter", "whyspan_exporters.exporter"), child("collector", "whyspan.pipeline.collector")],
        lambda: load_config(config_path, overrides),
        notifier,
    ).run()


def _check_owner(state_dir: Path) -> None:
    """Refuse a state folder that is the services': the exporter gives up root's right to write what is others'."""
    try:
        info = state_dir.stat()
    except OSError:
        return  # it is made
    if info.st_uid != os.geteuid() and not info.st_mode & 0o022:
        raise ConfigError(
            f"{state_dir} belongs to user {info.st_uid}, as it does where whyspan is a service: "
            "`systemctl start whyspan`, or name another folder with --state-dir"
        )
