"""What a process tells its service manager."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest
from whyspan.systemd import Notifier, parse

from tests.unit.manager import Manager


def test_nothing_happens_without_a_manager() -> None:
    notifier = Notifier({})
    notifier.ready("x")
    notifier.alive()
    assert (notifier.connected, notifier.ping_s) == (False, 0.0)


def test_the_life_of_a_service() -> None:
    with Manager() as manager:
        notifier = Notifier(dict(manager.env))
        notifier.extend(60, "attaching")
        notifier.ready("watching 1 process")
        notifier.status("watching 1 process")  # has not changed: not sent
        notifier.status("watching 2 processes")
        notifier.reloading()
        notifier.ready()
        notifier.stopping()
        manager.drain()
    reload = manager.heard.pop(3)
    assert reload["RELOADING"] == "1"
    assert int(reload["MONOTONIC_USEC"]) > 0
    assert manager.heard == [
        {"EXTEND_TIMEOUT_USEC": "60000000", "STATUS": "attaching"},
        {"READY": "1", "STATUS": "watching 1 process"},
        {"STATUS": "watching 2 processes"},
        {"READY": "1"},
        {"STOPPING": "1", "STATUS": "stopping"},
    ]


def test_children_do_not_speak_for_it() -> None:
    with Manager(watchdog_s=1) as manager:
        env = manager.env | {"WATCHDOG_PID": str(os.getpid()), "OTHER": "stays"}
        assert Notifier(env).ping_s == 0.25
    assert env == {"OTHER": "stays"}


@pytest.mark.parametrize(
    "more",
    [{"WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "-5"}, {"WATCHDOG_USEC": "0"}],
)
def test_pings_that_nobody_asked_for_are_not_sent(more: dict[str, str]) -> None:
    with Manager(watchdog_s=1) as manager:
        notifier = Notifier(manager.env | more)
        notifier.alive()
        manager.drain()
        assert (notifier.ping_s, manager.heard) == (0.0, [])


def test_pings_are_as_rare_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with Manager(watchdog_s=20) as manager:
        notifier = Notifier(dict(manager.env))
        now_s = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: now_s)
        for _ in range(200):  # twenty seconds of ten calls each
            now_s += 0.1
            notifier.alive()
        monkeypatch.undo()
        manager.drain()
    assert manager.heard == [{"WATCHDOG": "1"}] * 4


def test_a_status_is_one_line_whatever_is_in_it() -> None:
    with Manager() as manager:
        Notifier(dict(manager.env)).status("service evil\nREADY=1\nMAINPID=1" + "x" * 9999)
        manager.drain()
    (said,) = manager.heard
    assert list(said) == ["STATUS"]
    assert len(said["STATUS"]) <= 400


def test_a_manager_that_is_away_or_does_not_read_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(os.fspath(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        with caplog.at_level(logging.WARNING):
            for n in range(5000):  # more than its queue holds
                notifier.status(str(n))
    notifier.status("and now it has gone")
    assert len(caplog.records) == 1  # said once, however often it fails


def test_what_is_no_assignment_is_left_out() -> None:
    assert parse(b"READY=1\nnonsense\nSTATUS=a=b\n\xff=1") == {"READY": "1", "STATUS": "a=b", "\ufffd": "1"}


def test_a_manager_that_is_busy_is_pinged_again(caplog: pytest.LogCaptureFixture) -> None:
    with Manager(watchdog_s=1) as manager:
        notifier = Notifier(dict(manager.env))
        n = 0
        while notifier._send(f"STATUS={n}"):  # until its queue is full
            n += 1
        assert n > 0
        notifier.alive()
        manager.drain()
        assert all("WATCHDOG" not in said for said in manager.heard)
        notifier.alive()
        manager.drain()
        assert manager.heard[-1] == {"WATCHDOG": "1"}
    assert not caplog.records
