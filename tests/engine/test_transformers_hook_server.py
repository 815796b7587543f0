"""The example server under ``whyspan-instrument``: what its worker thread tells of each request."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from whyspan.marks import Generated, Hello, Layers, Mark

from tests.bench.ports import free_port
from tests.demo.procs import stop, wait_http
from tests.engine import inproc, install

SERVER = Path(__file__).with_name("transformers_server.py")
REQUESTS = [(11, 23), (7, 5), (29, 13), (5, 3), (17, 7)]  # prompt and new tokens; no two take the same


def _ask(port: int, prompt: int, new: int) -> int:
    body = json.dumps({"prompt_tokens": prompt, "max_new_tokens": new}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.load(answer)["tokens"])


def test_the_server_tells_of_each_request(tmp_path: Path) -> None:
    port = free_port()
    python = str(install.python())
    env = {
        **os.environ,
        "PYTHONPATH": f"{inproc.SOURCE}{os.pathsep}{inproc.SINK}",
        "WHYSPAN_TEST_MARKS": str(tmp_path),
        "WHYSPAN_LAYERS_EVERY": "17",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, "-m", "whyspan_inproc.launcher", python, str(SERVER), "--port", str(port)]
    server = subprocess.Popen(command, env=env)
    try:
        wait_http(f"http://127.0.0.1:{port}/health", server, 120)
        with ThreadPoolExecutor(3) as pool:
            made = list(pool.map(lambda r: _ask(port, *r), REQUESTS))
    finally:
        stop(server)
    assert made == [new for _, new in REQUESTS]
    marks = list(inproc.read(tmp_path))
    generated = [(m, m.body) for m in marks if isinstance(m.body, Generated)]
    whole = [(m, b) for m, b in generated if b.whole]
    assert sorted(b.tokens for _, b in whole) == sorted(prompt + new - 1 for prompt, new in REQUESTS)
    (thread,) = {m.tid for m, _ in generated}
    assert thread != server.pid and {m.tgid for m in marks} == {server.pid}
    for mark, call in whole:  # its passes lie inside it, and are all of the thread's marks there
        inside = [(m, b) for m, b in generated if not b.whole and call.begin_ns <= m.ts_ns <= mark.ts_ns]
        assert len(inside) == {p + n - 1: n for p, n in REQUESTS}[call.tokens]
        assert sum(b.tokens for _, b in inside) == call.tokens
        assert _in_order([call.begin_ns, *(t for m, b in inside for t in (b.begin_ns, m.ts_ns)), mark.ts_ns])
    hello = _first(marks, Hello)
    assert isinstance(hello, Hello)
    assert (hello.engine, hello.state, hello.model["architecture"]) == (
        "transformers",
        "ok",
        "LlamaForCausalLM",
    )
    sampled = [m.body for m in marks if isinstance(m.body, Layers)]
    assert len(sampled) == (sum(new for _, new in REQUESTS) - 1) // 17 + 1
    assert {len(b.rows) for b in sampled} == {4 * 3}


def _first(marks: list[Mark], kind: type) -> object:
    return next(m.body for m in marks if isinstance(m.body, kind))


def _in_order(times: list[int]) -> bool:
    return times == sorted(times)
