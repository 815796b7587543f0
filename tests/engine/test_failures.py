"""Failed requests of a real vLLM: refused, left by their clients, and cut down with the worker that is killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from whyspan.model import Finding

from tests.engine import vllm
from tests.engine.conftest import OTHER_CPU, Started
from tests.engine.watch import Watch
from tests.unit.receivers import GrpcReceiver

EXPLAIN_ALL = "[collector]\nexplain_per_s = 1000\nexplain_core_ratio = 2\nordinary_per_s = 1000\n"
PROMPT = list(range(3, 35))
MANY = 1900  # tokens: seconds of work


def trace_of(n: int) -> str:
    """Return the trace id of a request."""
    return f"{0xFA11 << 64 | n:032x}"


def request_text(n: int, body: bytes) -> bytes:
    """Return a completion request as it goes over the wire."""
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        b"traceparent: 00-%s-00000000000000aa-01\r\nContent-Length: %d\r\n\r\n"
        % (trace_of(n).encode(), len(body))
    ) + body


def completion(model: str = vllm.NAME, *, stream: bool) -> bytes:
    """Return the body of a long completion."""
    wanted = {"model": model, "prompt": PROMPT, "max_tokens": MANY, "ignore_eos": True, "stream": stream}
    return json.dumps(wanted | {"return_token_ids": True}).encode()


def ask(server: vllm.Server, n: int, body: bytes) -> socket.socket:
    """Send a request on a connection of its own."""
    s = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    s.sendall(request_text(n, body))
    return s


def refused(server: vllm.Server, n: int, body: bytes) -> int:
    """Send a request and return the status that it is answered with."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as c:
        headers = {"content-type": "application/json", "traceparent": f"00-{trace_of(n)}-00000000000000aa-01"}
        c.request("POST", "/v1/completions", body, headers)
        answer = c.getresponse()
        answer.read()
        return answer.status


def read_events(s: socket.socket, count: int) -> None:
    """Read until so many events of a stream have come."""
    got = b""
    while got.count(b"data: ") < count:
        data = s.recv(65536)
        assert data, got[-500:]
        got += data


def read_to_the_end(s: socket.socket) -> None:
    """Read until the server has nothing more to say."""
    s.settimeout(120)
    with contextlib.suppress(OSError):
        while s.recv(65536):
            pass
    s.close()


class Run(NamedTuple):
    """Findings by number of the request, what the clients were told, and the process that was killed."""

    found: dict[int, Finding]
    statuses: dict[int, int]
    worker: int


MALFORMED, NO_MODEL, LEFT, RESET, WAITED, STREAMED = range(6)


@pytest.fixture(scope="module")
def run(receiver: GrpcReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A server of its own, which does not survive this."""
    folder = tmp_path_factory.mktemp("failures")
    with Started(folder, receiver) as server, Watch(folder, server.pid, EXPLAIN_ALL, {OTHER_CPU}) as watch:
        worker = server.worker
        statuses = {
            MALFORMED: refused(server, MALFORMED, b"{not json"),
            NO_MODEL: refused(server, NO_MODEL, completion("no-such-model", stream=False)),
        }
        s = ask(server, LEFT, completion(stream=True))
        read_events(s, 5)
        s.shutdown(socket.SHUT_RDWR)
        s.close()
        s = ask(server, RESET, completion(stream=True))
        read_events(s, 5)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        s.close()
        waits, streams = (
            ask(server, WAITED, completion(stream=False)),
            ask(server, STREAMED, completion(stream=True)),
        )
        read_events(streams, 5)
        os.kill(worker, signal.SIGKILL)
        clients = [threading.Thread(target=read_to_the_end, args=(s,)) for s in (waits, streams)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        time.sleep(3)  # a request of a process that died waits a second for its connection
        numbers = {trace_of(n): n for n in range(6)}
        watch.wait(lambda: len(numbers.keys() & watch.findings().keys()) == len(numbers), 60, "explained")
        found = {numbers[t]: f for t, f in watch.findings().items() if t in numbers}
        yield Run(found, statuses, worker)


@pytest.mark.parametrize("n", [MALFORMED, NO_MODEL])
def test_a_refused_request_has_the_status_that_its_client_saw(run: Run, n: int) -> None:
    f = run.found[n]
    assert 400 <= run.statuses[n] < 500
    assert (f.request.status, f.request.outcome, f.request.ended_by) == (run.statuses[n], "error", "server")
    assert f.verdict.sentence.startswith(f"Failed with {run.statuses[n]} after ")


@pytest.mark.parametrize(("n", "how"), [(LEFT, ("client_close", "client_reset")), (RESET, ("client_reset",))])
def test_a_stream_that_its_client_left(run: Run, n: int, how: tuple[str, ...]) -> None:
    f = run.found[n]
    assert (f.request.status, f.request.outcome) == (200, "reset")
    assert f.request.ended_by in how
    assert f.request.chunks >= 5
    assert f" ms and {f.request.chunks} chunks" in f.verdict.sentence


@pytest.mark.parametrize("n", [WAITED, STREAMED])
def test_the_death_of_the_worker_is_told_of_the_requests_it_took_along(run: Run, n: int) -> None:
    f = run.found[n]
    # The front end may answer, close or end: that is its affair.
    assert f.request.outcome in ("error", "reset", "killed", "ok")
    died = f"process {run.worker} (VLLM::Worker) of the same service was killed by signal 9 (SIGKILL)"
    assert any(died in line for line in f.verdict.evidence) or f.request.outcome == "ok", f.verdict
    if n == WAITED:
        assert f.request.outcome != "ok"
        assert died in f.verdict.sentence


def test_every_one_tiles(run: Run) -> None:
    assert len(run.found) == 6
    for f in run.found.values():
        at = f.request.start_ns
        for s in f.segments:
            assert (s.start_ns, s.end_ns > s.start_ns) == (at, True)
            at = s.end_ns
        assert at == f.request.end_ns
