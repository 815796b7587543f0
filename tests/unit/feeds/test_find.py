"""Endpoints out of command lines and sockets."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from whyspan.feeds import find
from whyspan.feeds.find import Endpoint
from whyspan.feeds.messages import FORWARD_PASS, HEALTH, KV_EVENTS, METRICS

SERVE = "import socket, sys; s = socket.create_server((sys.argv[1], 0)); print(s.getsockname()[1], flush=True); input()"


def kv(engine: str, config: object, *more: str) -> list[Endpoint]:
    text = config if isinstance(config, str) else json.dumps(config)
    return [
        e
        for e in find.endpoints(os.getpid(), engine, ("python", "--kv-events-config", text, *more))
        if e.kind == KV_EVENTS
    ]


def test_options() -> None:
    line = ("vllm", "--port", "1", "--kv_events_config={}", "--port=2", "-dp", "3", "--last")
    assert find.option(line, "port") == "2"
    assert find.option(line, "kv-events-config") == "{}"
    assert find.option(line, "data-parallel-size", "dp") == "3"
    assert find.option(line, "last") == find.option(line, "no") == ""
    assert find.flag(("--enable_forward_pass_metrics",), "enable-forward-pass-metrics")


def test_vllm_events() -> None:
    on = {"enable_kv_cache_events": True}
    assert kv("vllm", on) == [Endpoint(KV_EVENTS, "tcp://127.0.0.1:5557")]
    full = on | {
        "endpoint": "tcp://*:7001",
        "replay_endpoint": "tcp://*:7002",
        "topic": "t",
        "publisher": "zmq",
    }
    assert kv("vllm", full) == [Endpoint(KV_EVENTS, "tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002", "t")]
    ranks = kv("vllm", full, "--data-parallel-size", "2")
    assert [(e.endpoint, e.replay, e.rank) for e in ranks] == [
        ("tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002", 0),
        ("tcp://127.0.0.1:7002", "tcp://127.0.0.1:7003", 1),
    ]
    assert kv("vllm", {}) == kv("vllm", on | {"publisher": "null"}) == []
    assert (
        kv("vllm", "{not json")
        == kv("vllm", "[]")
        == kv("vllm", "[" * 5000)
        == kv("vllm", on | {"endpoint": 5})
        == []
    )
    dotted = find.endpoints(
        os.getpid(),
        "vllm",
        ("x", "--kv-events-config.enable_kv_cache_events", "true", "--kv-events-config.endpoint=tcp://*:9"),
    )
    assert [e.endpoint for e in dotted] == ["tcp://127.0.0.1:9"]


def test_sglang_events() -> None:
    assert kv("sglang", {"endpoint": "tcp://*:7001"}) == []  # publisher null is its default
    assert [e.endpoint for e in kv("sglang", {"publisher": "zmq"})] == ["tcp://127.0.0.1:5557"]
    assert (
        kv("sglang", {"publisher": "zmq", "endpoint": "tcp://10.0.0.7:7001", "bind": True})[0].endpoint
        == "tcp://10.0.0.7:7001"
    )


@pytest.mark.parametrize(
    ("endpoint", "to", "problem"),
    [
        ("tcp://0.0.0.0:1", "tcp://127.0.0.1:1", ""),  # bound by SGLang; vLLM connects there, in vain
        ("tcp://[::]:1", "tcp://[::1]:1", ""),
        ("tcp://router:1", "", "connects there"),
        ("tcp://*:0", "", "run time"),
        ("inproc://x", "", "within"),
        ("ipc:///tmp/x", "ipc:///tmp/x", ""),
        ("ipc://@x", "ipc://@x", ""),
        ("ipc://x", "", "relative"),
        ("nonsense", "", "not an address"),
        ("tcp://*:1" + " " * 500, "", "too long"),
    ],
)
def test_where_to_subscribe(endpoint: str, to: str, problem: str) -> None:
    (e,) = kv("vllm", {"enable_kv_cache_events": True, "endpoint": endpoint})
    assert problem in e.problem
    assert bool(e.problem) == bool(problem)
    assert not to or e.endpoint == to


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A process that listens on 127.0.0.1: its id and port."""
    child = subprocess.Popen(
        [*getattr(request, "param", []), sys.executable, "-c", SERVE, "127.0.0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    yield child.pid, int(child.stdout.readline())
    child.kill()
    child.communicate()


def test_http_of_a_server(server: tuple[int, int]) -> None:
    pid, port = server
    base = f"http://127.0.0.1:{port}"
    for line in (("vllm", "serve", "--port", str(port)), ("vllm", "serve")):
        assert find.endpoints(pid, "vllm", line) == [
            Endpoint(METRICS, base + "/metrics"),
            Endpoint(HEALTH, base + "/health"),
        ]
    # Its /health makes a token.
    assert find.endpoints(pid, "sglang", ("x",))[1].endpoint == base + "/ping"
    assert find.endpoints(pid, "vllm", ("vllm", "--port", "1")) == []  # not yet
    assert find.endpoints(pid, "vllm", ("VLLM::EngineCore",)) == []  # its ports are no servers
    assert find.endpoints(pid, "uvicorn", ("uvicorn",)) == find.endpoints(pid, "vllm", ()) == []
    (one, two) = find.endpoints(pid, "vllm", ("x", "--ssl-keyfile", "k"))
    assert "TLS" in one.problem and "TLS" in two.problem


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root: makes a network namespace"
)
@pytest.mark.parametrize(
    "server",
    [["unshare", "--net", "sh", "-c", 'ip link set lo up 2>/dev/null; exec "$0" "$@"']],
    indirect=True,
)
def test_another_network_namespace_is_not_reachable(server: tuple[int, int]) -> None:
    line = ("x", "--kv-events-config", '{"enable_kv_cache_events": true}')
    found = find.endpoints(server[0], "vllm", line)
    assert [e.kind for e in found] == [METRICS, HEALTH, KV_EVENTS]
    assert {e.problem for e in found} == {"not reachable: in another network namespace"}


def test_forward_passes(tmp_path: Path) -> None:
    on = ("python", "-m", "sglang.launch_server", "--enable-forward-pass-metrics")
    named = find.endpoints(
        os.getpid(), "sglang", (*on, "--forward-pass-metrics-ipc-name", "ipc:///tmp/f", "--dp-size=2")
    )
    assert [(e.kind, e.endpoint, e.rank) for e in named] == [
        (FORWARD_PASS, "ipc:///tmp/f.0", 0),
        (FORWARD_PASS, "ipc:///tmp/f.1", 1),
    ]
    assert find.endpoints(os.getpid(), "sglang", on[:-1]) == []
    # Without a name SGLang makes a file of tempfile's, and the publisher adds the rank.
    path = f"{tmp_path}/tmpwhysp_00.3"
    with socket.socket(socket.AF_UNIX) as s, socket.socket(socket.AF_UNIX) as other:
        s.bind(path)
        s.listen()
        other.bind(str(tmp_path / "other"))
        other.listen()
        (found,) = find.endpoints(os.getpid(), "sglang", on)
    assert (found.kind, found.endpoint, found.rank) == (FORWARD_PASS, f"ipc://{path}", 3)


def test_gone_process() -> None:
    line = ("x", "--kv-events-config", '{"enable_kv_cache_events": true}', "--enable-forward-pass-metrics")
    assert [e.kind for e in find.endpoints(1 << 22, "sglang", line)] == []
    assert [e.kind for e in find.endpoints(1 << 22, "vllm", line)] == [KV_EVENTS]
