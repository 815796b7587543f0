"""The exporter as a service: ready, alive, reloaded, stopped; and who may hand findings to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from whyspan.model import Finding
from whyspan.systemd import Notifier
from whyspan_exporters import sharing
from whyspan_exporters.client import Client
from whyspan_exporters.endpoint import Endpoint
from whyspan_exporters.exporter import Exporter
from whyspan_exporters.records import Record

from tests import sandbox
from tests.unit.manager import Manager

MakeFinding = Callable[..., Finding]


class Service:
    """A real exporter process with a configuration file, and its manager."""

    def __init__(self, folder: Path, watchdog_s: float = 0.0, before: Sequence[str] = ()) -> None:
        self.state, self._config, self._log = folder / "state", folder / "whyspan.toml", folder / "log"
        self.manager = Manager(watchdog_s)
        self.configure("")
        env = {k: v for k, v in os.environ.items() if not k.startswith("WHYSPAN")} | self.manager.env
        with self._log.open("w") as log:
            command = [
                sys.executable,
                "-P",
                "-m",
                "whyspan_exporters.exporter",
                "--config",
                str(self._config),
            ]
            self.process = subprocess.Popen([*before, *command], env=env, stderr=log)
        self.manager.until(lambda said: said.get("READY") == "1")

    def configure(self, text: str) -> None:
        self._config.write_text(f'[run]\nstate_dir = "{self.state}"\n{text}')

    def reload(self, text: str) -> None:
        self.configure(text)
        self.process.send_signal(signal.SIGHUP)
        self.manager.until(lambda said: said.get("RELOADING") == "1")
        self.manager.until(lambda said: said.get("READY") == "1")

    @property
    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.manager.__exit__(None, None, None)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """One that is ready."""
    running = Service(tmp_path)
    yield running
    running.close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def scraped(port: int) -> str:
    # No proxy that the environment may name: this is the loopback interface.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


def stored(state: Path) -> int:
    db = sqlite3.connect(state / "whyspan.db")
    try:
        return int(db.execute("SELECT count(*) FROM findings").fetchone()[0])
    finally:
        db.close()


def test_it_is_ready_once_it_listens_and_has_its_store(service: Service) -> None:
    assert "STATUS" in service.manager.heard[-1]
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(service.state / "exporter.sock"))  # no waiting: it said so
    assert (service.state / "whyspan.db").exists()


def test_it_says_that_it_stops(service: Service) -> None:
    service.process.send_signal(signal.SIGTERM)
    service.manager.until(lambda said: said.get("STOPPING") == "1")
    assert service.process.wait(20) == 0


def test_a_reload_opens_what_is_new_and_keeps_what_was_stored(
    service: Service, make_finding: MakeFinding
) -> None:
    client = Client(service.state / "exporter.sock")
    assert client.offer(make_finding(1))
    port = free_port()
    service.reload(f'[prometheus]\nlisten = "127.0.0.1:{port}"\n[store]\nmax_mb = 64\n')
    assert "opened anew: prometheus, store" in service.log
    assert client.offer(make_finding(2))
    assert client.close(20.0)
    assert client.peer == service.process.pid
    assert stored(service.state) == 2
    assert "whyspan" in scraped(port)
    service.reload("")
    assert "opened anew: prometheus, store" in service.log
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 5).close()


def test_a_reload_without_a_change_touches_nothing(service: Service) -> None:
    service.reload("[slo]\nttft_ms = 5\n")
    assert "no output has changed" in service.log


def test_a_broken_file_changes_nothing_and_is_one_line(service: Service, make_finding: MakeFinding) -> None:
    service.reload("[store]\nmax_mb = 'many'\n")
    lines = [line for line in service.log.splitlines() if " ERROR " in line]
    assert len(lines) == 1
    assert "not reloaded, the old configuration stays" in lines[0]
    client = Client(service.state / "exporter.sock")
    assert client.offer(make_finding(1))
    assert client.close(20.0)


def test_a_store_that_cannot_be_opened_is_left_where_it_was(
    service: Service, make_finding: MakeFinding
) -> None:
    service.reload('[store]\npath = "/proc/none/whyspan.db"\n')
    assert "store stays as it was" in service.log
    client = Client(service.state / "exporter.sock")
    assert client.offer(make_finding(1))
    assert client.close(20.0)
    assert stored(service.state) == 1


def test_another_state_folder_waits_for_the_next_start(service: Service, tmp_path: Path) -> None:
    service.state = tmp_path / "elsewhere"
    service.reload("")
    assert "run.state_dir: taken over at the next start" in service.log
    assert not service.state.exists()


def test_it_pings_without_any_work(tmp_path: Path) -> None:
    service = Service(tmp_path, watchdog_s=0.2)
    try:
        for _ in range(3):
            service.manager.until(lambda said: said.get("WATCHDOG") == "1")
    finally:
        service.close()


class Stuck:
    """A sink whose disk never answers."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def emit(self, records: Sequence[Record]) -> None: ...

    def flush(self) -> str:
        self.reached.set()
        assert self.go_on.wait(60)
        return ""

    def status(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def test_it_does_not_ping_while_its_loop_is_stuck(tmp_path: Path, make_finding: MakeFinding) -> None:
    sink = Stuck()
    reader, writer = socket.socketpair()
    with Manager(watchdog_s=0.2) as manager, Endpoint(tmp_path / "s") as endpoint:
        exporter = Exporter(endpoint.listener, {"stuck": sink}, Notifier(dict(manager.env)))
        thread = threading.Thread(target=exporter.run, args=(reader,))
        thread.start()
        manager.until(lambda said: said.get("WATCHDOG") == "1")
        client = Client(tmp_path / "s")
        client.offer(make_finding(1))
        assert sink.reached.wait(30)
        manager.drain()
        assert manager.next(0.5) is None  # ten pings' time
        sink.go_on.set()
        manager.until(lambda said: said.get("WATCHDOG") == "1")
        assert client.close(20.0)
        writer.send(bytes([signal.SIGTERM]))
        thread.join(20)
        assert not thread.is_alive()
    reader.close()
    writer.close()


def test_it_works_below_its_units_filter(tmp_path: Path, make_finding: MakeFinding) -> None:
    if lacking := sandbox.lacking():
        pytest.skip(lacking)
    unit = sandbox.UNITS / "whyspan-exporter.service"
    service = Service(tmp_path, before=[sys.executable, sandbox.__file__, str(unit)])
    try:
        assert "Seccomp:\t2" in Path(f"/proc/{service.process.pid}/status").read_text()
        port = free_port()
        endpoint = f"http://127.0.0.1:{free_port()}"
        for protocol in ("grpc", "http/protobuf"):  # nobody listens: the spool takes it
            otlp = f'[otlp]\nendpoint = "{endpoint}"\nprotocol = "{protocol}"\n'
            service.reload(f'{otlp}[prometheus]\nlisten = "127.0.0.1:{port}"\n')
            client = Client(service.state / "exporter.sock")
            assert client.offer(make_finding(1))
            assert client.close(20.0)
        assert "whyspan" in scraped(port)
        assert stored(service.state) >= 1
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
        assert " ERROR " not in service.log
        assert "Operation not permitted" not in service.log
    finally:
        service.close()


def test_who_may_deliver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 77)
    users = {"whyspan": SimpleNamespace(pw_uid=78)}
    monkeypatch.setattr("pwd.getpwnam", users.__getitem__)
    assert [uid for uid in (0, 1, 77, 78, 79, 65534) if sharing.may_deliver(uid)] == [0, 77, 78]
    users.clear()
    assert not sharing.may_deliver(78)


def test_the_socket_is_the_groups_also_where_nothing_may_be_given_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("grp.getgrnam", lambda _: SimpleNamespace(gr_gid=tmp_path.stat().st_gid))
    monkeypatch.setattr("os.chown", refuse)
    with Endpoint(tmp_path / "s"):
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o660
    monkeypatch.setattr("grp.getgrnam", lambda _: SimpleNamespace(gr_gid=tmp_path.stat().st_gid + 1))
    with Endpoint(tmp_path / "s"):
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_a_wrong_configuration_is_found_before_a_reload(tmp_path: Path) -> None:
    def check(text: str) -> tuple[int, str]:
        path = tmp_path / "c.toml"
        path.write_text(text)
        done = subprocess.run(
            [sys.executable, "-I", "-m", "whyspan.checkconfig", "--config", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stderr

    assert check("[slo]\nttft_ms = 1\n") == (0, "")
    code, said = check("[slo]\nttft = 1\n")
    assert (code, said.count("\n")) == (2, 1)
    assert "unknown key slo.ttft; did you mean slo.ttft_ms?" in said
    assert json.dumps(said)
