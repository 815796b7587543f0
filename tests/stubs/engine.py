"""A streaming LLM-like server on the CUDA stubs: ``python -m tests.stubs.engine --port N`` with ``Device.env``.

``POST /v1/completions`` with ``{"prompt": [ids] or text, "max_tokens": N, "stream": true}`` streams tokens as events.
One event loop; an engine thread that schedules batches and drives the GPU as an engine does: copies the inputs from
pinned memory, launches a captured graph (or, with a prompt, some 160 kernels), copies the tokens back, waits for an
event, hands the tokens out. ``POST /fault`` with a JSON object of ``model.Faults`` changes what is wrong;
``GET /steps`` tells what was done. With ``--ranks 2`` a second process has the other half of the model on another GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import uvicorn

from tests.demo.procs import PR_SET_PDEATHSIG, _libc, set_name
from tests.stubs import engine_marks as marks
from tests.stubs.cuda import Nccl, unique_id
from tests.stubs.model import Faults, Model, OutOfMemory

SYNC_FLAGS = {"auto": 0, "spin": 1, "yield": 2, "blocking": 4}
MAX_BATCH = 64


@dataclass
class Request:
    """A request at the engine."""

    number: int
    prompt: int  # tokens
    max_tokens: int
    loop: asyncio.AbstractEventLoop
    out: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    produced: int = 0
    dropped: bool = False

    def tell(self, what: str) -> None:
        self.loop.call_soon_threadsafe(self.out.put_nowait, what)


class Engine:
    """The engine thread and what it works on."""

    def __init__(self, ranks: int, flags: int) -> None:
        self.faults = Faults()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps: deque[dict[str, Any]] = deque(maxlen=10_000)
        self.ready = threading.Event()
        self._work = threading.Condition()
        self._ranks, self._flags = ranks, flags
        self._number = 0
        self._other: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._run, name="engine-core", daemon=True).start()

    def submit(self, request: Request) -> None:
        marks.queued(request.number, request.prompt)
        with self._work:
            self.waiting.append(request)
            self._work.notify()

    def _model(self) -> Model:
        if self._ranks == 1:
            return Model(flags=self._flags)
        unique = unique_id()
        command = [sys.executable, "-m", "tests.stubs.engine", "--rank", "1", "--unique", unique.hex()]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "1"}
        self._other = subprocess.Popen(
            [*command, "--flags", str(self._flags)],
            stdin=subprocess.PIPE,
            env=environment,
        )
        return Model(lambda: Nccl(unique, 2, 0), flags=self._flags)

    def _run(self) -> None:
        set_name("engine-core")
        marks.hello("server", 0, self._ranks, MAX_BATCH)
        model = self._model()
        self.ready.set()
        while True:
            with self._work:
                while not self.waiting and not self.running:
                    self._work.wait()
                while self.waiting and len(self.running) < MAX_BATCH:
                    self.running.append(self.waiting.popleft())
            self._step(model)

    def _step(self, model: Model) -> None:
        faults, begin = self.faults, time.monotonic_ns()
        batch = self.running = [r for r in self.running if not r.dropped]
        if not batch:
            return
        prompts = [r.prompt for r in batch if not r.produced]
        self._number += 1
        decodes = [r.number for r in batch if r.produced]
        marks.step(
            self._number,
            begin,
            decodes,
            [(r.number, r.prompt) for r in batch if not r.produced],
            len(self.waiting),
        )
        sent = time.monotonic_ns()
        if self._other and self._other.stdin:
            order = {"step": self._number, "batch": len(batch), "prompts": prompts, "faults": asdict(faults)}
            self._other.stdin.write(json.dumps(order).encode() + b"\n")
            self._other.stdin.flush()
        try:
            graph = model.step(len(batch), prompts, faults)
        except OutOfMemory as error:
            model.wait()
            for request in batch:
                if not request.produced:
                    request.dropped = True
                    request.tell(f"error {error}")
            return
        enqueued = time.monotonic_ns()
        model.wait()
        end = time.monotonic_ns()
        marks.executed(self._number, sent, sum(prompts) + len(decodes), len(batch), graph)
        self.steps.append(
            {
                "begin_ns": begin,
                "enqueued_ns": enqueued,
                "end_ns": end,
                "batch": len(batch),
                "prompts": len(prompts),
                "graph": int(graph),
            }
        )
        for request in batch:
            request.produced += 1
            request.tell("last" if request.produced >= request.max_tokens else "token")
        self.running = [r for r in batch if r.produced < r.max_tokens]
        finished = [r.number for r in batch if r.produced >= r.max_tokens]
        marks.step_done(self._number, (sent, enqueued, end), len(batch), finished)


class App:
    """The ASGI application."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._requests = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            event = await receive()
            body += event.get("body", b"")
            more = event.get("more_body", False)
        if scope["path"] == "/v1/completions":
            await self._complete(scope, json.loads(body or b"{}"), send)
        elif scope["path"] == "/fault":
            self.engine.faults = Faults(**{**asdict(Faults()), **json.loads(body or b"{}")})
            await _answer(send, 200, json.dumps(asdict(self.engine.faults)).encode())
        elif scope["path"] == "/steps":
            await _answer(send, 200, json.dumps(list(self.engine.steps)).encode())
        else:
            await _answer(send, 200 if self.engine.ready.is_set() else 503, b"")

    async def _complete(self, scope: dict[str, Any], asked: dict[str, Any], send: Any) -> None:
        begin = marks.now_ns()
        prompt = asked.get("prompt", "")
        tokens = len(prompt) if isinstance(prompt, list) else len(prompt) // 4 + 1
        self._requests += 1
        request = Request(
            self._requests, tokens, int(asked.get("max_tokens", 16)), asyncio.get_running_loop()
        )
        marks.arrived(scope, request.number, tokens, request.max_tokens, begin)
        self.engine.submit(request)
        try:
            first = await request.out.get()
            if first.startswith("error"):
                await _answer(send, 500, json.dumps({"error": first}).encode())
                return
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-type", b"text/event-stream")],
                }
            )
            what, index = first, 0
            while True:
                marks.output(marks.now_ns(), request.number, what != "token")
                chunk = b'data: {"choices":[{"index":0,"text":" token%d"}]}\n\n' % index
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if what != "token":
                    break
                what, index = await request.out.get(), index + 1
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        finally:
            request.dropped = True


async def _answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def follow(unique: bytes, rank: int, flags: int) -> None:
    """Be the other rank: run the steps that rank 0 says, one line each."""
    set_name(f"engine-rank-{rank}")
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    marks.hello("worker", rank, 2, MAX_BATCH)
    model = Model(lambda: Nccl(unique, 2, rank), flags=flags)
    for line in sys.stdin.buffer:
        order, begin = json.loads(line), time.monotonic_ns()
        faults = Faults(**order["faults"])
        if faults.straggler_ms:
            end = time.perf_counter() + faults.straggler_ms / 1e3
            while time.perf_counter() < end:
                pass
        graph = False
        with suppress(OutOfMemory):
            graph = model.step(order["batch"], order["prompts"], faults)
        model.wait()
        decodes = order["batch"] - len(order["prompts"])
        marks.executed(order["step"], begin, sum(order["prompts"]) + decodes, order["batch"], graph)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1)
    parser.add_argument(
        "--sync", choices=SYNC_FLAGS, default="auto", help="how host threads wait for the GPU"
    )
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--unique", default="", help=argparse.SUPPRESS)
    parser.add_argument("--flags", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        follow(bytes.fromhex(args.unique), args.rank, args.flags)
        return
    set_name("stub-engine")
    uvicorn.run(
        App(Engine(args.ranks, SYNC_FLAGS[args.sync])),
        host="127.0.0.1",
        port=args.port,
        loop="asyncio",
        http="httptools",
        ws="none",
        access_log=False,
        log_level="error",
        timeout_keep_alive=600,
    )


if __name__ == "__main__":
    main()
