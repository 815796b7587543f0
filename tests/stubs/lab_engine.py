"""A stub of an inference engine: real processes, sockets, threads and marks, a device that only sleeps.

It stands for an engine whose faults a CPU-only machine cannot produce on demand (KV transfer, stragglers, speculative
decoding, adapter loading ...). A front end (HTTP/1.1, event streams, one asyncio loop), a core that schedules batches
over a block pool with a prefix cache, and workers whose "device" sleeps for as long as the batch would take. It marks
through ``whyspan_inproc`` exactly what the vLLM plugin marks. ``POST /fault`` with a JSON object changes ``Faults``.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from whyspan_inproc import emit as marker
from whyspan_inproc import kinds

from tests.demo.procs import PR_SET_PDEATHSIG, _libc, set_name

BLOCK = 16
DECODE_S = 0.002
PER_SEQUENCE_S = 0.0001
PER_PROMPT_TOKEN_S = 0.00006
PER_LOGPROB_S = 0.0002
CHUNK = 2048
_LENGTH = struct.Struct("<I")


@dataclass
class Faults:
    """What is wrong at the moment. Times in seconds; 0 is healthy."""

    max_num_seqs: int = 16
    blocks: int = 4096
    batch_wait_s: float = 0.0  # an idle core waits so long for more requests
    remote_kv_s: float = 0.0  # each request's blocks come so much later
    adapter_s: float = 0.0  # the core loads an adapter for each request
    compile: bool = False  # the worker compiles for each batch with a prompt
    again: bool = False  # ... and says that it is the same function
    straggler_s: float = 0.0  # rank 1 begins so much later
    drafts: int = 0  # tokens drafted per sequence and step, none accepted
    payload_bytes: int = 0  # the core's message per token
    schedule_s: float = 0.0  # CPU time of each scheduling
    spin: bool = False  # the core polls for its workers without rest, on their CPU; their device is that CPU
    chunk_cpu_s: float = 0.0  # the front end's CPU time per chunk
    chunk_bytes: int = 0  # size of a chunk to the client
    forget_cache: bool = False  # nothing is found by prefix
    evict: bool = False  # cached blocks beyond the free ones are overwritten, the oldest first
    keep_zombies: bool = False  # disconnects are not passed on
    slow_model: float = 1.0  # steps take so many times longer
    dtype: str = "float32"


class Link:
    """Length-prefixed JSON over a socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self.socket, self._buffer = end, bytearray()

    def send(self, message: Any, padding: int = 0) -> None:
        data = json.dumps(message).encode()
        self.socket.sendall(_LENGTH.pack(len(data)) + _LENGTH.pack(padding) + data + b"x" * padding)

    def take(self, block: bool) -> list[Any]:
        """Return the messages that have come; wait for the first if told to."""
        while True:
            found = self._parsed()
            if found or not (block or self._readable()):
                return found
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError
            self._buffer += data

    def _readable(self) -> bool:
        return bool(select.select([self.socket], [], [], 0)[0])

    def _parsed(self) -> list[Any]:
        out = []
        while len(self._buffer) >= 2 * _LENGTH.size:
            size, padding = struct.unpack_from("<II", self._buffer)
            end = 2 * _LENGTH.size + size + padding
            if len(self._buffer) < end:
                break
            out.append(json.loads(bytes(self._buffer[2 * _LENGTH.size : 2 * _LENGTH.size + size])))
            del self._buffer[:end]
        return out


# -- worker ---------------------------------------------------------------------------------------------------


def worker(rank: int, link: Link) -> None:
    """Run batches as they come: sleep as the device would, and tell."""
    set_name(f"lab-worker-{rank}")
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    hello("worker", rank, {})
    while True:
        for batch in link.take(block=True):
            if batch["late_s"] and rank == 1:
                _burn(batch["late_s"])
            begin = marker.now_ns()
            if batch["compile"] and rank == 0:
                _compile(batch["again"])
            if batch["burn"]:
                _burn(batch["device_s"])
            else:
                time.sleep(batch["device_s"])
            body = {
                "step": batch["step"],
                "begin_ns": begin,
                "tokens": batch["tokens"],
                "requests": batch["requests"],
            }
            marker.emit(kinds.EXECUTED, body)
            link.send({"step": batch["step"]})


def _burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def _compile(again: bool) -> None:
    """Compile something, for real; a compiler is seen without marks, that it is the same function again is not."""
    begin = marker.now_ns()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cc"
        source.write_text(
            "#include <map>\n#include <string>\nstd::map<std::string, int> f() { return {}; }\n"
        )
        subprocess.run(["g++", "-O1", "-c", str(source), "-o", str(source) + ".o"], check=True)
    if again:
        marker.emit(kinds.STAGE, {"name": "compile", "begin_ns": begin, "what": "kernel"})


# -- core -----------------------------------------------------------------------------------------------------


@dataclass
class Sequence:
    """A request at the core."""

    number: int
    engine_id: str
    prompt: list[int]
    max_tokens: int
    logprobs: int
    computed: int = 0
    produced: int = 0
    blocks: int = 0
    cached: int = 0
    ready_s: float = 0.0
    resumed: bool = False
    peak: int = 0  # tokens that had been computed before a preemption
    fresh: bool = True
    deferred: str = ""
    chain: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Tokens whose keys and values are wanted before the next token can be made."""
        return len(self.prompt) + self.produced


class Core:
    """Schedules, sends, waits, updates."""

    def __init__(self, front: Link, workers: list[Link]) -> None:
        self.front, self.workers = front, workers
        self.faults = Faults()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.used = 0
        self.cache: dict[str, None] = {}
        self.step = 0
        self.numbers = 0

    def run(self) -> None:
        while True:
            idle = not self.waiting and not self.running
            for message in self.front.take(block=idle):
                self.handle(message)
            if idle and self.waiting and self.faults.batch_wait_s:
                time.sleep(self.faults.batch_wait_s)
                for message in self.front.take(block=False):
                    self.handle(message)
            if self.waiting or self.running:
                self.one_step()

    def handle(self, message: dict[str, Any]) -> None:
        if "fault" in message:
            self.faults = Faults(**message["fault"])
            if self.faults.forget_cache:
                self.cache.clear()
            self.hello()
            return
        if "abort" in message:
            gone = message["abort"]
            numbers = [s.number for s in [*self.running, *self.waiting] if s.engine_id == gone]
            self.running = [s for s in self.running if not self.dropped(s, gone)]
            self.waiting = deque(s for s in self.waiting if s.engine_id != gone)
            if numbers:
                marker.emit(kinds.ABORTED, {"side": "core", "numbers": numbers})
            return
        if self.faults.adapter_s:
            begin = marker.now_ns()
            time.sleep(self.faults.adapter_s)
            marker.emit(kinds.STAGE, {"name": "adapter", "begin_ns": begin, "what": "lab-adapter"})
        self.numbers += 1
        s = Sequence(
            self.numbers, message["id"], message["prompt"], message["max_tokens"], message["logprobs"]
        )
        s.ready_s = time.monotonic() + self.faults.remote_kv_s
        s.chain, alone = hashes(s.prompt)
        self.waiting.append(s)
        marker.emit(
            kinds.QUEUED,
            {
                "engine_id": s.engine_id,
                "number": s.number,
                "prompt_tokens": len(s.prompt),
                "block_size": BLOCK,
                "chain": "".join(s.chain),
                "blocks": "".join(alone),
            },
        )

    def dropped(self, s: Sequence, engine_id: str) -> bool:
        if s.engine_id != engine_id:
            return False
        self.used -= s.blocks
        return True

    def hello(self) -> None:
        config = {"max_num_seqs": str(self.faults.max_num_seqs), "num_blocks": str(self.faults.blocks)}
        if self.faults.batch_wait_s:
            config["batch_wait_ms"] = f"{self.faults.batch_wait_s * 1e3:g}"
        hello("core", 0, config, {"name": "lab", "dtype": self.faults.dtype})

    def admit(self, s: Sequence, budget: int) -> str:
        """Try to start a waiting sequence; return why not, or nothing."""
        if s.ready_s > time.monotonic():
            return "remote_kv"
        if len(self.running) >= self.faults.max_num_seqs or budget <= 0:
            return "budget"
        found = 0
        for end in s.chain[: (len(s.prompt) - 1) // BLOCK]:
            if end not in self.cache:
                break
            found += 1
        wanted = -(-(s.total + 1) // BLOCK)
        if wanted > self.faults.blocks - self.used:
            return "capacity"
        s.cached = s.computed = found * BLOCK
        return ""

    def grow(self, s: Sequence, tokens: int) -> int:
        wanted = -(-(s.computed + tokens) // BLOCK)
        more = max(wanted - s.blocks, 0)
        s.blocks += more
        self.used += more
        return more

    def one_step(self) -> None:
        faults, begin = self.faults, marker.now_ns()
        if faults.schedule_s:
            _burn(faults.schedule_s)
        decodes: list[int] = []
        others: list[list[Any]] = []
        preempted: list[list[int]] = []
        deferred: list[list[Any]] = []
        batch: list[tuple[Sequence, int]] = []
        budget, prompt_tokens = CHUNK, 0
        for s in list(self.running):
            if s not in self.running:
                continue
            tokens = min(s.total - s.computed, budget) or 1
            while self.used + max(-(-(s.computed + tokens) // BLOCK) - s.blocks, 0) > faults.blocks:
                victim = self.running.pop()
                preempted.append([victim.number, victim.computed])
                batch = [(b, n) for b, n in batch if b is not victim]
                decodes = [n for n in decodes if n != victim.number]
                others = [row for row in others if row[0] != victim.number]
                self.used -= victim.blocks
                victim.peak = max(victim.peak, victim.computed)
                victim.blocks = victim.computed = 0
                victim.resumed = victim.fresh = True
                self.waiting.appendleft(victim)
                if victim is s:
                    break
            if s in self.running:
                budget -= tokens
                self.enter(s, tokens, decodes, others, batch)
                prompt_tokens += tokens if tokens > 1 else 0
        while self.waiting:
            s = self.waiting[0]
            why = self.admit(s, budget)
            if why:
                if s.deferred != why:
                    s.deferred = why
                    deferred.append([s.number, why])
                break
            self.waiting.popleft()
            self.running.append(s)
            tokens = min(s.total - s.computed, budget)
            budget -= tokens
            self.enter(s, tokens, decodes, others, batch)
            prompt_tokens += tokens
        self.step += 1
        marker.emit(
            kinds.STEP,
            {
                "step": self.step,
                "begin_ns": begin,
                "end_ns": marker.now_ns(),
                "decodes": decodes,
                "others": others,
                "preempted": preempted,
                "deferred": deferred,
                "running": len(self.running),
                "waiting": len(self.waiting),
                "kv_used": self.used,
                "kv_free": faults.blocks - self.used,
                "evicted": self.evict(),
            },
        )
        drafted = faults.drafts * len(batch)
        device = DECODE_S + PER_SEQUENCE_S * len(batch) + PER_PROMPT_TOKEN_S * prompt_tokens
        device += sum(PER_LOGPROB_S * s.logprobs for s, _ in batch) + PER_SEQUENCE_S * 10 * drafted
        self.execute(batch, device * faults.slow_model, prompt_tokens, drafted)

    def enter(
        self,
        s: Sequence,
        tokens: int,
        decodes: list[int],
        others: list[list[Any]],
        batch: list[tuple[Sequence, int]],
    ) -> None:
        blocks = self.grow(s, tokens)
        batch.append((s, tokens))
        if tokens == 1 and not s.fresh and s.produced:
            decodes.append(s.number)
            return
        again = max(min(s.peak, s.computed + tokens) - s.computed, 0)
        left = s.total - s.computed - tokens
        cached = s.cached if s.fresh else 0
        others.append([s.number, tokens, s.computed, cached, blocks, again, s.resumed and s.fresh, left])
        s.fresh = False

    def execute(self, batch: list[tuple[Sequence, int]], device_s: float, prompt: int, drafted: int) -> None:
        faults = self.faults
        if not batch:
            now = marker.now_ns()
            body = {"step": self.step, "sent_ns": now, "wait_ns": now, "got_ns": now}
            marker.emit(kinds.STEP_DONE, body)
            time.sleep(0.001)
            return
        order = {
            "step": self.step,
            "device_s": device_s,
            "late_s": faults.straggler_s,
            "compile": faults.compile and prompt > 0,
            "again": faults.again,
            "burn": faults.spin,
            "tokens": sum(n for _, n in batch),
            "requests": len(batch),
        }
        sent = marker.now_ns()
        for link in self.workers:
            link.send(order)
        wait = marker.now_ns()
        for link in self.workers:
            if faults.spin:
                spin_until(link)
            link.take(block=True)
        got = marker.now_ns()
        finished, out = [], []
        for s, tokens in batch:
            s.computed += tokens
            if s.computed < s.total:
                continue
            s.produced += 1
            done = s.produced >= s.max_tokens
            out.append([s.engine_id, s.number, done])
            if done:
                finished.append([s.number, "length"])
                self.running.remove(s)
                self.used -= s.blocks
                self.remember(s)
        for entry in out:
            self.front.send({"token": entry}, faults.payload_bytes)
        marker.emit(
            kinds.STEP_DONE,
            {
                "step": self.step,
                "sent_ns": sent,
                "wait_ns": wait,
                "got_ns": got,
                "tokens": len(out),
                "finished": finished,
                "drafted": drafted,
            },
        )

    def evict(self) -> int:
        over = len(self.cache) - (self.faults.blocks - self.used)
        if not self.faults.evict or over <= 0:
            return 0
        for key in list(self.cache)[:over]:
            del self.cache[key]
        return over

    def remember(self, s: Sequence) -> None:
        if not self.faults.forget_cache:
            self.cache.update(dict.fromkeys(s.chain))


def spin_until(link: Link) -> None:
    """Poll without rest, giving way only now and then: what a bounded spin window on a full CPU does."""
    while not link._readable():
        end = time.monotonic() + 0.004
        while time.monotonic() < end and not link._readable():
            pass
        os.sched_yield()


def hashes(prompt: list[int]) -> tuple[list[str], list[str]]:
    """Return the keyed hashes of each prefix and of each block."""
    chain, alone = [], []
    whole = hashlib.blake2b(key=_SECRET)
    for i in range(0, len(prompt) - BLOCK + 1, BLOCK):
        data = b",".join(b"%d" % t for t in prompt[i : i + BLOCK])
        whole.update(data)
        chain.append(whole.hexdigest()[:8])
        alone.append(hashlib.blake2b(data, key=_SECRET).hexdigest()[:8])
    return chain[:256], alone[:256]


_SECRET = os.urandom(16)


def hello(role: str, rank: int, config: dict[str, str], model: dict[str, str] | None = None) -> None:
    """Say who this process is, now and to each new watcher."""
    body = {
        "engine": "lab",
        "version": "1",
        "role": role,
        "rank": rank,
        "config": config,
        "model": model or {},
    }
    _said[os.getpid()] = body
    if len(_said) == 1:
        marker.on_watch(lambda: marker.emit(kinds.HELLO, _said.get(os.getpid(), body)))
    marker.emit(kinds.HELLO, body)


_said: dict[int, dict[str, Any]] = {}


# -- front end ------------------------------------------------------------------------------------------------


class Front:
    """The ASGI application."""

    def __init__(self, core: Link) -> None:
        self.core, self.faults = core, Faults()
        self.queues: dict[str, asyncio.Queue[bool]] = {}
        self.numbers: dict[str, int] = {}
        self.count = 0
        self.watching = False

    def _watch(self) -> None:
        if not self.watching:
            self.watching = True
            hello("frontend", 0, {})
            asyncio.get_running_loop().add_reader(self.core.socket, self._received)

    def _received(self) -> None:
        begin = marker.now_ns()
        got: list[int] = []
        finished: list[int] = []
        for message in self.core.take(block=False):
            engine_id, _, done = message["token"]
            queue = self.queues.get(engine_id)
            number = self.numbers.get(engine_id, 0)
            got.append(number)
            if done:
                finished.append(number)
            if queue is not None:
                queue.put_nowait(done)
        if got:
            marker.emit(kinds.OUTPUT, {"begin_ns": begin, "requests": got, "finished": finished})

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self._watch()
        body = b""
        while True:
            event = await receive()
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        if scope["path"] == "/fault":
            self.faults = Faults(**{**asdict(Faults()), **json.loads(body or b"{}")})
            self.core.send({"fault": asdict(self.faults)})
            await _answer(send, 200, json.dumps(asdict(self.faults)).encode())
        elif scope["path"] == "/v1/completions":
            await self._complete(scope, json.loads(body), receive, send)
        else:
            await _answer(send, 200, b"ok")

    async def _complete(self, scope: dict[str, Any], asked: dict[str, Any], receive: Any, send: Any) -> None:
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        parts = headers.get("traceparent", "").split("-")
        self.count += 1
        request, engine_id = f"cmpl-{self.count}", f"cmpl-{self.count}-0"
        arrived = {
            "request": request,
            "client_port": scope["client"][1],
            "server_port": scope["server"][1],
            "max_tokens": asked["max_tokens"],
        }
        if len(parts) == 4:
            arrived |= {"trace_id": parts[1], "span_id": parts[2]}
        if asked.get("logprobs"):
            arrived["logprobs"] = asked["logprobs"]
        marker.emit(kinds.ARRIVED, arrived)
        begin = marker.now_ns()
        prompt = [int(t) for t in asked["prompt"]]
        marker.emit(kinds.TOKENISED, {"request": request, "begin_ns": begin, "prompt_tokens": len(prompt)})
        queue: asyncio.Queue[bool] = asyncio.Queue()
        self.queues[engine_id], self.numbers[engine_id] = queue, self.count
        marker.emit(kinds.ENQUEUED, {"request": request, "engine_id": engine_id, "number": self.count})
        order = {
            "id": engine_id,
            "prompt": prompt,
            "max_tokens": asked["max_tokens"],
            "logprobs": asked.get("logprobs", 0),
        }
        self.core.send(order)
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await self._stream(queue, send, gone)
        finally:
            gone.cancel()
            del self.queues[engine_id], self.numbers[engine_id]

    async def _stream(self, queue: asyncio.Queue[bool], send: Any, gone: asyncio.Future[None]) -> None:
        begun = done = False
        while not done:
            token = asyncio.ensure_future(queue.get())
            either: list[asyncio.Future[Any]] = [token, gone]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not token.done():
                token.cancel()
                if not self.faults.keep_zombies:
                    engine_id = next((k for k, q in self.queues.items() if q is queue), "")
                    number = self.numbers.get(engine_id, 0)
                    marker.emit(kinds.ABORTED, {"side": "frontend", "numbers": [number]})
                    self.core.send({"abort": engine_id})
                return
            done = token.result()
            if self.faults.chunk_cpu_s:
                _burn(self.faults.chunk_cpu_s)
            if not begun:
                begun = True
                await send(
                    {
                        "type": "http.response.start",
                        "status": 200,
                        "headers": [(b"content-type", b"text/event-stream")],
                    }
                )
            chunk = b'data: {"token":1}' + b" " * self.faults.chunk_bytes + b"\n\n"
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--send-buffer", type=int, default=0, help="bytes of the listening socket's send buffer"
    )
    args = parser.parse_args()
    front_end, core_end = socket.socketpair()
    for end in (front_end, core_end):  # a stuck core must not stop the front end
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    pairs = [socket.socketpair() for _ in range(args.workers)]
    if os.fork() == 0:
        _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        for rank, (_, theirs) in enumerate(pairs):
            if os.fork() == 0:
                with suppress(EOFError, KeyboardInterrupt):
                    worker(rank, Link(theirs))
                os._exit(0)
        set_name("lab-core")
        core = Core(Link(core_end), [Link(ours) for ours, _ in pairs])
        core.hello()
        with suppress(EOFError, KeyboardInterrupt):
            core.run()
        os._exit(0)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if args.send_buffer:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, args.send_buffer)
    listening.bind(("127.0.0.1", args.port))
    config = uvicorn.Config(
        Front(Link(front_end)), log_level="error", loop="asyncio", http="h11", lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
