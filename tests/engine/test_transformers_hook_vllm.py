"""Sampled layers in vLLM's worker: one step in so many, every layer of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from whyspan.marks import Executed, Layers

from tests.bench.ports import free_port
from tests.engine import inproc, vllm
from tests.engine.conftest import OTHER_CPU, WORKER_CPU

EVERY = 7


def test_layers_of_a_vllm_worker(tmp_path: Path) -> None:
    env = {**inproc.environment(tmp_path), "WHYSPAN_LAYERS_EVERY": str(EVERY)}
    with (tmp_path / "vllm.log").open("wb") as log:
        server = vllm.start(free_port(), env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            server.wait_ready(lambda line: print(line, flush=True))
            server.pin({WORKER_CPU}, {OTHER_CPU})
            assert [server.complete(11, 23) for _ in range(3)] == [200] * 3
            worker = server.worker
        finally:
            server.stop()
    marks = [m for m in inproc.read(tmp_path) if m.tgid == worker]
    sampled = [(m, m.body) for m in marks if isinstance(m.body, Layers)]
    assert sampled and all(b.available for _, b in sampled)
    executed = {m.body.step: m for m in marks if isinstance(m.body, Executed) and m.body.part == "execute"}
    assert [b.step for _, b in sampled] == sorted(executed)[::EVERY]  # steps without tokens are not counted
    for _, body in sampled:
        assert [(i, kind) for i, kind, _ in body.rows] == [
            (i, kind)
            for i in range(vllm.MODEL["num_hidden_layers"])
            for kind in ("layer", "attention", "mlp")
        ]
        step = executed[body.step]  # the layers lie inside the worker's part of that step
        assert isinstance(step.body, Executed)
        assert body.begin_ns >= step.body.begin_ns
        whole = sum(ns for _, kind, ns in body.rows if kind == "layer")
        assert whole <= step.ts_ns - step.body.begin_ns
