"""The collector as a service manager sees it: ready after attach, alive while it drains, reloaded, stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from whyspan_exporters import link
from whyspan_probes.state import HEALTHY

from tests import sandbox
from tests.bench.capabilities import CAPABILITIES, COLLECTOR, GROUP, privileges
from tests.bpf.child import Child
from tests.bpf.conftest import Spawn, Watch
from tests.bpf.http import Http, reading, writing
from tests.bpf.kernel import held_by
from tests.bpf.waiting import until
from tests.unit.manager import Manager

pytestmark = pytest.mark.bpf

REQUEST = b"GET /r HTTP/1.1\r\nHost: test\r\n\r\n"
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Taker:
    """An exporter that keeps the traces of what it is given, in memory."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.fspath(path))
        path.chmod(0o666)  # the collector may be another user
        self._listener.listen(1)
        self._socket: socket.socket | None = None
        self._frames = link.Frames()
        self.findings: list[link.FindingMsg] = []
        self.status: dict[str, object] = {}

    def take(self) -> bool:
        """Take what is there; True, so that it can be waited with."""
        try:
            self._take()
        except TimeoutError:
            pass
        except (BrokenPipeError, ConnectionResetError):  # it is stopping, or begins anew
            self._drop()
        return True

    def _take(self) -> None:
        if self._socket is None:
            self._listener.settimeout(0.05)
            self._socket = self._listener.accept()[0]
            self._frames = link.Frames()
            self._socket.settimeout(0.05)
        data = self._socket.recv(1 << 16)
        if not data:
            self._drop()
            return
        for body in self._frames.feed(data):
            message = link.decode_to_exporter(body)
            if isinstance(message, link.Hello):
                continue
            if isinstance(message, link.FindingMsg):
                self.findings.append(message)
            elif isinstance(message, link.StatusMsg):
                self.status = message.status
            self._socket.sendall(link.encode(link.Ack(message.seq, "")))

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def close(self) -> None:
        self._listener.close()
        self._drop()


class Service:
    """The collector's own process below a manager, with a configuration that can be changed."""

    def __init__(
        self, folder: Path, watched: Child, watchdog_s: float = 0.0, before: Sequence[str] = ()
    ) -> None:
        self._folder, self._watched = folder, watched
        self.manager = Manager(watchdog_s)
        (folder / "state").mkdir(exist_ok=True)
        self.taker = Taker(folder / "state/exporter.sock")
        self.configure()
        env = {k: v for k, v in os.environ.items() if not k.startswith("WHYSPAN")} | self.manager.env
        with (folder / "log").open("w") as log:
            words = [sys.executable, "-P", "-m", "whyspan.pipeline.collector"]
            self.process = subprocess.Popen(
                [*before, *words, "--config", str(folder / "whyspan.toml")], env=env, stderr=log, cwd="/"
            )

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def configure(self, *, slo_ms: str = "0.000001", collector: str = "", targets: str = "") -> None:
        mine = f'{{ pid = {self._watched.tgid}, service = "mine" }}'
        text = f"""
            [targets]
            auto = false
            match = [{targets or mine}]
            [slo]
            e2e_ms = {slo_ms}
            [collector]
            explain_per_s = 1000
            ordinary_per_s = 0
            budget_core_ratio = 1.0
            {collector}
            [run]
            state_dir = "{self._folder}/state"
        """
        (self._folder / "whyspan.toml").write_text("\n".join(line.strip() for line in text.splitlines()))

    def ready(self) -> dict[str, str]:
        return self.manager.until(lambda said: said.get("READY") == "1", 60)

    def reload(self) -> dict[str, str]:
        self.process.send_signal(signal.SIGHUP)
        began = self.manager.until(lambda said: said.get("RELOADING") == "1")
        assert int(began["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
        return self.ready()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.taker.close()
        self.manager.__exit__(None, None, None)


Start = Callable[..., Service]


@pytest.fixture
def server(spawn: Spawn) -> Child:
    """A scripted server."""
    return spawn("scripted_server")


@pytest.fixture
def start(tmp_path: Path, server: Child) -> Iterator[Start]:
    """Starts the collector on the server; it is ready."""
    started: list[Service] = []

    def begin(watchdog_s: float = 0.0, before: Sequence[str] = ()) -> Service:
        started.append(Service(tmp_path, server, watchdog_s, before))
        started[-1].ready()
        return started[-1]

    yield begin
    for one in started:
        one.close()


def talk(http: Http, service: Service, count: int) -> int:
    """Send requests and return how many findings came of them; waits until all that can come have come."""
    before = len(service.taker.findings)
    for _ in range(count):
        http.talk(REQUEST, [reading(len(REQUEST)), writing(REPLY)])
    until(lambda: service.taker.take() and len(service.taker.findings) >= before + count, "all have come")
    return len(service.taker.findings) - before


def test_it_is_ready_after_attach_and_says_so_while_it_attaches(start: Start) -> None:
    service = start()
    heard = service.manager.heard
    assert {"prog", "link", "map"} == {kind for kind, _ in held_by(service.process.pid)}
    assert [m for m in heard if "READY" in m] == heard[-1:]
    assert "watching 1 processes (mine)" in heard[-1]["STATUS"]
    extended = [m["STATUS"] for m in heard if "EXTEND_TIMEOUT_USEC" in m and "STATUS" in m]
    assert "attaching the probes: sched" in extended
    # In the order of the probes' names, and each is heard once it has been attached.
    assert len(extended) >= 10


def test_it_pings_while_it_drains_and_not_when_it_does_not(start: Start) -> None:
    service = start(2.0)
    for _ in range(3):
        service.manager.until(lambda said: said.get("WATCHDOG") == "1")
    service.process.send_signal(signal.SIGSTOP)
    service.manager.drain()
    assert service.manager.next(3.0) is None  # six pings' time
    service.process.send_signal(signal.SIGCONT)
    service.manager.until(lambda said: said.get("WATCHDOG") == "1")


def test_a_hung_one_says_where_it_hangs(start: Start) -> None:
    service = start()
    service.process.send_signal(signal.SIGABRT)  # what the watchdog sends
    assert service.process.wait(20) == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in service.log
    assert "collector.py" in service.log


def test_a_new_objective_is_taken_over_while_everything_stays_attached(
    start: Start, server: Child, watch: Watch
) -> None:
    service = start()
    http = Http(watch("sockets"), server)
    assert talk(http, service, 7) == 7
    held = held_by(service.process.pid)
    service.configure(slo_ms="60000")
    service.reload()
    assert "reloaded: slo.e2e_ms" in service.log
    for _ in range(5):
        http.talk(REQUEST, [reading(len(REQUEST)), writing(REPLY)])
    service.configure()
    service.reload()
    # What ended before the second reload was not slow; what ends after it is, and comes after it.
    assert talk(http, service, 3) == 3
    assert held_by(service.process.pid) == held
    assert service.log.count("ready after") == 1


def test_other_targets_are_watched_and_the_old_ones_are_not(start: Start, spawn: Spawn, watch: Watch) -> None:
    service = start()
    other = spawn("scripted_server")
    service.configure(targets=f'{{ pid = {other.tgid}, service = "other" }}')
    said = service.reload()
    assert "watching 1 processes (other)" in said["STATUS"]
    assert "is no longer watched" in service.log
    assert talk(Http(watch("sockets"), other), service, 3) == 3
    assert {m.finding.request.service for m in service.taker.findings} == {"other"}


def test_what_concerns_the_probes_attaches_them_anew_in_the_same_process(
    start: Start, server: Child, watch: Watch
) -> None:
    service = start()
    held = held_by(service.process.pid)
    service.configure(collector='disable_probes = ["power"]')
    service.reload()
    assert "reloading: collector.disable_probes: all probes are attached anew" in service.log
    again = held_by(service.process.pid)
    assert again
    assert not again & held
    assert service.log.count("ready after") == 2
    assert talk(Http(watch("sockets"), server), service, 3) == 3


@pytest.mark.parametrize("collector", ["nonsense = 1", 'record = "/proc/none/recording"'])
def test_a_configuration_that_cannot_be_used_changes_nothing(
    start: Start, server: Child, watch: Watch, collector: str
) -> None:
    service = start()
    kept = Counter(kind for kind, _ in held_by(service.process.pid))
    service.configure(collector=collector)
    service.reload()
    assert service.log.count(" ERROR ") == 1
    assert "not reloaded" in service.log
    assert Counter(kind for kind, _ in held_by(service.process.pid)) == kept  # nothing of what was given up
    assert talk(Http(watch("sockets"), server), service, 3) == 3


@pytest.mark.parametrize("left_out", ["", "CAP_SYS_ADMIN"])
def test_it_works_as_its_unit_has_it(
    start: Start, server: Child, watch: Watch, tmp_path: Path, left_out: str
) -> None:
    if lacking := sandbox.lacking():
        pytest.skip(lacking)
    (tmp_path / "state/collector").mkdir(parents=True)
    os.chown(tmp_path / "state/collector", COLLECTOR, GROUP)
    held = [name for name in CAPABILITIES if name != left_out]
    filtered = [sys.executable, sandbox.__file__, str(sandbox.UNITS / "whyspan.service")]
    service = start(0.0, [*privileges(COLLECTOR, held), *filtered])
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    assert f"Uid:\t{COLLECTOR}\t{COLLECTOR}" in status
    assert "Seccomp:\t2" in status
    assert talk(Http(watch("sockets"), server), service, 3) == 3
    until(lambda: service.taker.take() and service.taker.status, "a status")
    states = {p["name"]: p["state"] for p in service.taker.status["probes"]}  # type: ignore[attr-defined]
    assert {name: state for name, state in states.items() if state not in HEALTHY} == {}
    lacks = "cost of the probes is not measured" in service.log
    assert lacks == (left_out == "CAP_SYS_ADMIN")
    service.process.send_signal(signal.SIGTERM)
    until(lambda: service.taker.take() and service.process.poll() is not None, "it has ended")
    assert service.process.returncode == 0
    assert (tmp_path / "state/collector/baseline.json").exists()


def test_a_stop_is_announced_and_delivers(start: Start, server: Child, watch: Watch, tmp_path: Path) -> None:
    service = start()
    http = Http(watch("sockets"), server)
    for _ in range(3):
        http.talk(REQUEST, [reading(len(REQUEST)), writing(REPLY)])
    service.process.send_signal(signal.SIGTERM)
    until(lambda: service.taker.take() and len(service.taker.findings) >= 3, "all have come")
    until(lambda: service.taker.take() and service.process.poll() is not None, "it has ended")
    service.manager.drain()
    assert [m for m in service.manager.heard if "STOPPING" in m]
    assert service.process.returncode == 0
    assert (tmp_path / "state/collector/baseline.json").exists()
