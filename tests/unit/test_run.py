"""The supervisor: restarts, orderly stop, no orphans, and a small footprint."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from whyspan import cli
from whyspan.errors import ConfigError
from whyspan.pipeline import run as supervisor

from tests.unit.manager import Manager

WaitFor = Callable[..., None]
Start = Callable[..., "subprocess.Popen[str]"]

# Children are shell scripts that log to a file; {log} is its path.
FOREVER = "echo start {name} $$ >> {log}; while :; do sleep 0.02; done"
SERVE = 'trap "echo stop {name} >> {log}; exit 0" TERM; ' + FOREVER
STUBBORN = 'trap "" TERM INT; ' + FOREVER
PROGRAM = """
import sys
from whyspan import log
from whyspan.pipeline import run
log.setup()
run.STOP_S = float(sys.argv[1])
scripts = {"exporter": sys.argv[2], "collector": sys.argv[3]}
children = [run.Child(n, ["sh", "-c", s], {"PATH": "/usr/bin:/bin"}) for n, s in scripts.items()]
sys.exit(run.Supervisor(children).run())
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a supervisor of two shell scripts."""
    processes: list[subprocess.Popen[str]] = []

    def begin(exporter: str, collector: str, stop_s: float = 5.0) -> subprocess.Popen[str]:
        scripts = [
            s.replace("{name}", n).replace("{log}", str(tmp_path / "log"))
            for n, s in (("exporter", exporter), ("collector", collector))
        ]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(stop_s), *scripts], stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def events(tmp_path: Path) -> list[list[str]]:
    path = tmp_path / "log"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def started(tmp_path: Path, name: str) -> list[int]:
    return [int(e[2]) for e in events(tmp_path) if e[:2] == ["start", name]]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stops_the_collector_before_the_exporter(
    tmp_path: Path, start: Start, wait_for: WaitFor, number: signal.Signals
) -> None:
    process = start(SERVE, SERVE)
    wait_for(lambda: started(tmp_path, "exporter") and started(tmp_path, "collector"))
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert [e for e in events(tmp_path) if e[0] == "stop"] == [["stop", "collector"], ["stop", "exporter"]]
    messages = [re.sub(r"^.*whyspan.run: ", "", line) for line in err.splitlines()]
    assert [re.sub(r"\d+", "N", m) for m in messages] == [
        "exporter started, process N",
        "collector started, process N",
        f"stopping on {number.name}",
        "stopped",
    ]


def test_restarts_whichever_dies_with_growing_delays(tmp_path: Path, start: Start, wait_for: WaitFor) -> None:
    process = start(SERVE, "echo start collector $$ >> {log}; exit 1")
    wait_for(lambda: len(started(tmp_path, "collector")) >= 4 and started(tmp_path, "exporter"))
    os.kill(started(tmp_path, "exporter")[0], signal.SIGKILL)
    wait_for(lambda: len(started(tmp_path, "exporter")) == 2)
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    delays = re.findall(r"collector exited with status 1: restarting in (\S+) s", err)
    assert delays[:3] == ["0.2", "0.4", "0.8"]
    assert "exporter killed by signal 9: restarting in 0.2 s" in err


def test_a_wrong_configuration_stops_everything(tmp_path: Path, start: Start) -> None:
    process = start(SERVE, "sleep 0.3; exit 2")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "collector exited with status 2: stopping" in err
    assert ["stop", "exporter"] in events(tmp_path)


def test_a_child_that_does_not_stop_is_killed(tmp_path: Path, start: Start, wait_for: WaitFor) -> None:
    process = start(SERVE, STUBBORN, stop_s=0.3)
    wait_for(lambda: started(tmp_path, "exporter") and started(tmp_path, "collector"))
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "collector did not stop: killed" in err
    assert ["stop", "exporter"] in events(tmp_path)
    assert gone(started(tmp_path, "collector")[0])


def test_a_second_signal_kills(tmp_path: Path, start: Start, wait_for: WaitFor) -> None:
    process = start(STUBBORN, STUBBORN, stop_s=60)
    wait_for(lambda: started(tmp_path, "exporter") and started(tmp_path, "collector"))
    process.terminate()
    time.sleep(0.2)
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 1
    assert gone(started(tmp_path, "exporter")[0])


def test_no_orphans_after_sigkill(tmp_path: Path, start: Start, wait_for: WaitFor) -> None:
    process = start(SERVE, SERVE)
    wait_for(lambda: started(tmp_path, "exporter") and started(tmp_path, "collector"))
    process.kill()
    pids = started(tmp_path, "exporter") + started(tmp_path, "collector")
    wait_for(lambda: all(gone(pid) for pid in pids))


#: A child that speaks to its manager: ready at once, or after SIGHUP; it pings or is silent.
SPEAKER = """exec {python} -c '
import os, signal, socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
to = chr(0) + os.environ["NOTIFY_SOCKET"][1:]
def say(*lines): s.sendto(chr(10).join(lines).encode(), to)
def note(what): open("{log}", "a").write(what + " {name} " + str(os.getpid()) + chr(10))
for n in (signal.SIGTERM, signal.SIGHUP): signal.signal(n, lambda n, _: None)
signal.set_wakeup_fd((w := socket.socketpair())[1].setblocking(False) or w[1].fileno())
note("start")
say("READY=1", "STATUS=I am {name}")
while True:
    got = w[0].recv(1)[0]
    if got == signal.SIGTERM: note("stop"); sys.exit(0)
    note("reload"); say("RELOADING=1"); say("READY=1")
'"""
MANAGED = """
import json, os, sys
from whyspan import log
from whyspan.errors import ConfigError
from whyspan.pipeline import run
from whyspan.systemd import Notifier
log.setup()
run.WATCHDOG_S["collector"] = float(sys.argv[3])
notifier = Notifier()
def check():
    if os.path.exists(sys.argv[4]): raise ConfigError("it is broken")
scripts = {"exporter": sys.argv[1], "collector": sys.argv[2]}
children = [run.Child(n, ["sh", "-c", s], {"PATH": "/usr/bin:/bin"}) for n, s in scripts.items()]
sys.exit(run.Supervisor(children, check, notifier).run())
"""


class Managed:
    """A supervisor of two children that speak, below a manager."""

    def __init__(self, folder: Path, watchdog_s: float = 0.0, watchdog_above_s: float = 0.0) -> None:
        self.folder, self.manager = folder, Manager(watchdog_above_s)
        scripts = [
            SPEAKER.replace("{name}", n)
            .replace("{log}", str(folder / "log"))
            .replace("{python}", sys.executable)
            for n in ("exporter", "collector")
        ]
        words = [sys.executable, "-c", MANAGED, *scripts, str(watchdog_s), str(folder / "broken")]
        self.process = subprocess.Popen(
            words,
            env=os.environ | self.manager.env,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.manager.until(lambda said: said.get("READY") == "1")

    def end(self) -> str:
        self.process.terminate()
        _, err = self.process.communicate(timeout=20)
        self.manager.__exit__(None, None, None)
        return err


def test_it_is_ready_when_both_are_and_shows_the_collectors_status(tmp_path: Path) -> None:
    managed = Managed(tmp_path)
    assert started(tmp_path, "exporter")
    assert started(tmp_path, "collector")
    managed.end()
    assert [m for m in managed.manager.heard if "READY" in m] == [{"READY": "1"}]
    assert {"STATUS": "I am collector"} in managed.manager.heard
    assert managed.process.returncode == 0


def test_a_stranger_cannot_speak_for_a_child(tmp_path: Path, wait_for: WaitFor) -> None:
    managed = Managed(tmp_path)
    pid = started(tmp_path, "collector")[0]
    env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    address = next(e for e in env if e.startswith(b"NOTIFY_SOCKET=@"))[len(b"NOTIFY_SOCKET=@") :]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.sendto(b"STATUS=all is well, trust me", b"\0" + address)
    # What comes after it over the same socket has been heard: so has it been.
    os.kill(pid, signal.SIGHUP)
    wait_for(lambda: ["reload", "collector", str(pid)] in events(tmp_path))
    managed.end()
    assert not [m for m in managed.manager.heard if "trust" in m.get("STATUS", "")]


def test_a_child_that_makes_no_progress_is_killed_and_started_again(
    tmp_path: Path, wait_for: WaitFor
) -> None:
    managed = Managed(tmp_path, watchdog_s=0.3)
    wait_for(lambda: len(started(tmp_path, "collector")) >= 2)
    err = managed.end()
    assert "collector makes no progress for 0 s: killed" in err
    assert "collector killed by signal 6: restarting" in err
    assert len(started(tmp_path, "exporter")) == 1


def test_it_pings_the_manager_above(tmp_path: Path) -> None:
    managed = Managed(tmp_path, watchdog_above_s=0.2)
    for _ in range(3):
        managed.manager.until(lambda said: said.get("WATCHDOG") == "1")
    managed.end()


def test_a_reload_reaches_both(tmp_path: Path) -> None:
    managed = Managed(tmp_path)
    managed.process.send_signal(signal.SIGHUP)
    managed.manager.until(lambda said: said.get("RELOADING") == "1")
    managed.manager.until(lambda said: said.get("READY") == "1")
    assert {e[1] for e in events(tmp_path) if e[0] == "reload"} == {"exporter", "collector"}
    managed.end()


def test_a_broken_configuration_is_not_reloaded(tmp_path: Path) -> None:
    managed = Managed(tmp_path)
    (tmp_path / "broken").touch()
    managed.process.send_signal(signal.SIGHUP)
    assert managed.process.stderr is not None
    while "it is broken" not in (line := managed.process.stderr.readline()):
        assert line, "not said"
    assert "not reloaded, the old configuration stays" in line
    managed.end()
    assert not [e for e in events(tmp_path) if e[0] == "reload"]
    assert managed.process.returncode == 0


def test_a_state_folder_of_the_services_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    tmp_path.chmod(0o750)
    with pytest.raises(ConfigError, match=r"belongs to user .*systemctl start whyspan"):
        supervisor.supervise(None, {"run": {"state_dir": str(tmp_path)}})


@pytest.mark.parametrize("module", ["whyspan.pipeline.run", "whyspan.cli", "whyspan_exporters.exporter"])
def test_heavy_libraries_stay_out(module: str) -> None:
    code = f"import sys, {module}; print({{'numpy', 'rich', 'psutil'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_command_line_becomes_overrides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[object, object, bool]] = []

    def fake(config_path: object, overrides: object, *, verbose: bool) -> int:
        seen.append((config_path, overrides, verbose))
        return 5

    monkeypatch.setattr(supervisor, "supervise", fake)
    monkeypatch.setattr("whyspan.log.setup", lambda verbose: None)
    arguments = [
        "run",
        "--pid",
        "7",
        "--comm",
        "vllm",
        "--service",
        "chat",
        "--record",
        str(tmp_path / "r"),
        "-v",
    ]
    arguments += ["--set", "collector.window_s=30", "--set", "store.path=/x", "--state-dir", "/s"]
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 5
    match = [{"pid": 7, "service": "chat"}, {"comm": "vllm", "service": "chat"}]
    overrides = {
        "collector": {"window_s": 30, "record": str(tmp_path / "r")},
        "store": {"path": "/x"},
        "targets": {"match": match, "auto": False},
        "run": {"state_dir": "/s"},
    }
    assert seen == [(None, overrides, True)]


def test_wrong_overrides_stop_before_any_process() -> None:
    with pytest.raises(ConfigError, match=r"unknown key collector\.windows"):
        supervisor.supervise(None, {"collector": {"windows": 1}})
