"""The plugin in a real vLLM with a small pool: every mark against what the client saw and vLLM itself counts."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, TypeVar

import pytest
from whyspan import marks
from whyspan.marks import Mark

from tests.bench.ports import free_port
from tests.engine import inproc, install, vllm
from tests.engine.conftest import OTHER_CPU, WORKER_CPU

#: Of 32 tokens: less than four of the long requests below need at their end.
BLOCKS = 120
PROMPT, OUTPUT = 907, 149
LONG = 8
TRACE = "5af9{:028x}"
SPAN = "6b{:014x}"

T = TypeVar("T")


class Watched:
    """A server whose processes write their marks to files while ``switch`` exists."""

    def __init__(self, server: vllm.Server, folder: Path, switch: Path) -> None:
        self.server, self.folder, self.switch = server, folder, switch
        self._serial = itertools.count(1)

    def marks(self) -> list[Mark]:
        return list(inproc.read(self.folder))

    def complete(self, prompt: list[int], tokens: int, **more: Any) -> tuple[int, int, int]:
        """Do one completion; return its serial number, status and the client's port."""
        serial = next(self._serial)
        body = {"model": vllm.NAME, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        headers = {
            "content-type": "application/json",
            "traceparent": f"00-{TRACE.format(serial)}-{SPAN.format(serial)}-01",
            "x-request-id": f"serial-{serial}",
        }
        text = json.dumps({**body, "return_token_ids": True, **more})
        connection.request("POST", "/v1/completions", text, headers)
        assert connection.sock is not None
        port = connection.sock.getsockname()[1]
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return serial, answer.status, port

    def counters(self) -> dict[str, float]:
        """Return vLLM's own counters."""
        with urllib.request.urlopen(f"{self.server.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(r'^vllm:(\w+)_total\{engine="0",model_name="[^"]*"\} (\S+)$', text, re.MULTILINE)
        return {name: float(value) for name, value in found}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A small pool, the plugin installed as a user would, somebody watching from the start."""
    folder = tmp_path_factory.mktemp("inproc")
    (folder / "marks").mkdir()
    (folder / "switch").touch()
    with (folder / "vllm.log").open("wb") as log:
        server = vllm.start(
            free_port(),
            extra=["--num-gpu-blocks-override", str(BLOCKS)],
            env=inproc.environment(folder / "marks", folder / "switch"),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            server.wait_ready(lambda line: print(line, flush=True))
            server.pin({WORKER_CPU}, {OTHER_CPU})
            yield Watched(server, folder / "marks", folder / "switch")
        finally:
            server.stop()


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [(i * 7 + seed * 11) % 1_000 + 3 for i in range(tokens)]


class Ran:
    """What the load did, and what was told of it."""

    def __init__(self, watched: Watched) -> None:
        before = watched.counters()
        seen = len(watched.marks())
        # served: serial: prompt tokens, output tokens, completions, port
        self.served: dict[int, tuple[int, int, int, int]] = {}

        def do(tokens: int, output: int, seed: int = 0, n: int = 1) -> None:
            serial, status, port = watched.complete(prompt(tokens, seed), output, n=n)
            assert status == 200
            self.served[serial] = (tokens, output, n, port)

        do(101, 11)
        do(101, 11)  # three whole blocks are in the cache
        do(67, 7, n=2)
        do(1_501, 5)
        threads = [threading.Thread(target=do, args=(PROMPT, OUTPUT, i + 1)) for i in range(LONG)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(self.served) == 4 + LONG
        after = watched.counters()
        self.counted = {name: after[name] - before.get(name, 0) for name in after}
        self.marks = watched.marks()[seen:]

    def of(self, kind: type[T]) -> list[T]:
        return [m.body for m in self.marks if isinstance(m.body, kind)]


def until(ready: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Wait until something is true; return it."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = ready()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come about")


@pytest.fixture(scope="module")
def ran(watched: Watched) -> Ran:
    """The load, once for all tests."""
    return Ran(watched)


def test_each_role_has_all_its_hooks(watched: Watched) -> None:
    hellos = [(m.tgid, m.body) for m in watched.marks() if isinstance(m.body, marks.Hello)]
    server = watched.server
    roles = {"frontend": server.pid, "core": server.engine_core, "worker": server.worker}
    assert {(tgid, h.role) for tgid, h in hellos} == {(tgid, role) for role, tgid in roles.items()}
    for _, hello in hellos:
        assert (hello.engine, hello.version, hello.state, hello.missing) == ("vllm", "0.32.0", "ok", [])
        # a worker knows its blocks once its cache is set up
        assert hello.config.get("num_blocks") in (
            {None, str(BLOCKS)} if hello.role == "worker" else {str(BLOCKS)}
        )
        assert (hello.config["block_size"], hello.config["max_num_batched_tokens"]) == ("32", "2048")
        assert (hello.model["name"], hello.model["dtype"]) == (vllm.NAME, "torch.float32")
    assert any(h.model.get("attention") == "CPU_ATTN" for _, h in hellos if h.role == "worker")


def test_cold_start(watched: Watched) -> None:
    stages = [m for m in watched.marks() if isinstance(m.body, marks.Stage)]
    told: dict[int, list[str]] = defaultdict(list)
    for mark in stages:
        assert isinstance(mark.body, marks.Stage) and 0 < mark.body.begin_ns <= mark.ts_ns
        told[mark.tgid].append(mark.body.name)
    server = watched.server
    assert told[server.worker] == ["device", "weights", "load_model", "warmup", "kv_cache", "warmup"]
    assert told[server.engine_core] == ["kv_cache", "import"]
    assert told[server.pid] == ["import", "ready"]
    begins = {
        m.body.name: m.body.begin_ns
        for m in stages
        if m.tgid == server.pid and isinstance(m.body, marks.Stage)
    }
    assert begins["import"] == pytest.approx(begins["ready"], abs=20_000_000)  # both from the process's start


def test_every_request_is_told_from_end_to_end(ran: Ran) -> None:
    arrived = {a.trace_id: a for a in ran.of(marks.Arrived)}
    tokenised = {t.request: t for t in ran.of(marks.Tokenised)}
    enqueued = defaultdict(list)
    for e in ran.of(marks.Enqueued):
        enqueued[e.request].append(e)
    queued = {q.engine_id: q for q in ran.of(marks.Queued)}
    delivered = Counter(n for o in ran.of(marks.Output) for n in o.requests)
    finished = Counter(n for o in ran.of(marks.Output) for n in o.finished)
    done = dict(f for d in ran.of(marks.StepDone) for f in d.finished)
    for serial, (tokens, output, n, port) in ran.served.items():
        request = arrived[TRACE.format(serial)]
        assert request.request == f"cmpl-serial-{serial}-0"
        assert (request.span_id, request.request_id) == (SPAN.format(serial), f"serial-{serial}")
        assert (request.client_port, request.n, request.max_tokens) == (port, n, output)
        assert tokenised[request.request].prompt_tokens == tokens
        assert len(enqueued[request.request]) == n
        for e in enqueued[request.request]:
            assert queued[e.engine_id].prompt_tokens == tokens
            assert len(queued[e.engine_id].chain) == len(queued[e.engine_id].blocks) == 8 * (tokens // 32)
            assert (delivered[e.number], finished[e.number]) == (output, 1)
            assert done[queued[e.engine_id].number] == "length"
    assert len(arrived) == len(ran.served)


def test_prefixes_are_equal_where_the_prompts_are(ran: Ran) -> None:
    by_length: dict[int, list[str]] = defaultdict(list)
    for q in ran.of(marks.Queued):
        by_length[q.prompt_tokens].append(q.chain)
    assert by_length[101][0] == by_length[101][1]
    assert len({*by_length[PROMPT]}) == LONG


def test_every_preemption_on_its_request(ran: Ran) -> None:
    preempted = [p for s in ran.of(marks.Step) for p in s.preempted]
    assert len(preempted) == ran.counted["num_preemptions"] > 0
    resumed = [o for s in ran.of(marks.Step) for o in s.others if o.resumed]
    assert sorted(o.number for o in resumed) == sorted(number for number, _ in preempted)
    again: Counter[int] = Counter()
    for s in ran.of(marks.Step):
        for o in s.others:
            again[o.number] += o.recomputed
    lost = Counter({number: 0 for number, _ in preempted})
    for number, tokens in preempted:
        lost[number] += tokens
    for o in resumed:
        lost[o.number] -= o.cached
    assert again == +lost


def test_prefix_hits_are_the_engines(ran: Ran) -> None:
    first = [o for s in ran.of(marks.Step) for o in s.others if not o.resumed]
    assert sum(o.cached for o in first) == ran.counted["prefix_cache_hits"] > 0


def test_tokens_of_every_request_add_up(ran: Ran) -> None:
    computed: Counter[int] = Counter()
    for s in ran.of(marks.Step):
        computed.update(s.decodes)
        for o in s.others:
            computed[o.number] += o.tokens + o.cached
        for number, tokens in s.preempted:
            computed[number] -= tokens
    length = {q.number: q.prompt_tokens for q in ran.of(marks.Queued)}
    expected = {tokens: output for tokens, output, _, _ in ran.served.values()}
    # the last token that comes out is not computed on
    assert computed == {number: t + expected[t] - 1 for number, t in length.items()}
    out = sum(d.tokens for d in ran.of(marks.StepDone))
    assert out == ran.counted["generation_tokens"]
    assert sum(length.values()) == ran.counted["prompt_tokens"]


def test_steps_are_followed_through_core_and_worker(ran: Ran, watched: Watched) -> None:
    steps = {m.body.step: m for m in ran.marks if isinstance(m.body, marks.Step)}
    done = {m.body.step: m for m in ran.marks if isinstance(m.body, marks.StepDone)}
    parts: dict[int, dict[str, Mark]] = defaultdict(dict)
    for mark in ran.marks:
        if isinstance(mark.body, marks.Executed):
            assert mark.tgid == watched.server.worker
            parts[mark.body.step][mark.body.part] = mark
    assert steps.keys() == done.keys() == parts.keys()
    assert len({m.tid for m in [*steps.values(), *done.values()]}) == 1
    for step, mark in steps.items():
        s, d, e = mark.body, done[step].body, parts[step]["execute"].body
        assert isinstance(s, marks.Step) and isinstance(d, marks.StepDone) and isinstance(e, marks.Executed)
        tokens = len(s.decodes) + sum(o.tokens for o in s.others)
        assert (e.tokens, e.requests) == (tokens, len(s.decodes) + len(s.others))
        assert (e.graph, e.padded) == ("none", tokens)
        sample = parts[step]["sample"]
        assert isinstance(sample.body, marks.Executed)
        moments = [s.begin_ns, s.end_ns, mark.ts_ns, d.sent_ns, e.begin_ns, parts[step]["execute"].ts_ns]
        moments += [sample.body.begin_ns, d.got_ns, done[step].ts_ns]
        assert moments == sorted(moments)
        assert d.sent_ns <= d.wait_ns <= d.got_ns


def test_pool_is_the_engines(ran: Ran) -> None:
    steps = ran.of(marks.Step)
    assert {s.kv_used + s.kv_free for s in steps} == {BLOCKS - 1}
    assert max(s.kv_used for s in steps) > BLOCKS * 0.9
    assert all(s.kv_cached <= s.kv_free for s in steps)
    assert sum(s.evicted for s in steps) > 0


def test_who_waits_waits_for_blocks(ran: Ran) -> None:
    reasons = Counter(reason for s in ran.of(marks.Step) for _, reason in s.deferred)
    assert reasons["capacity"] > 50
    assert {*reasons} <= {"capacity", "budget"}
    for s in ran.of(marks.Step):
        assert len(s.deferred) == s.waiting
        if s.preempted:
            assert {reason for _, reason in s.deferred} == {"capacity"}


def test_prompts_are_nowhere(ran: Ran, watched: Watched) -> None:
    told = b"".join(f.read_bytes() for f in watched.folder.glob("*.jsonl"))
    for tokens in (prompt(101), prompt(1_501), prompt(PROMPT, 1)):
        for at in range(0, len(tokens) - 4, 50):
            assert ",".join(map(str, tokens[at : at + 4])).encode() not in told
    del ran


def test_abort(watched: Watched) -> None:
    seen = len(watched.marks())
    connection = HTTPConnection("127.0.0.1", watched.server.port, timeout=60)
    body = {
        "model": vllm.NAME,
        "prompt": prompt(33, 5),
        "max_tokens": 1_500,
        "ignore_eos": True,
        "stream": True,
    }
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps({**body, "return_token_ids": True}),
        {"content-type": "application/json", "x-request-id": "gone"},
    )
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data:")
    answer.close()
    connection.close()

    def both() -> dict[str, Mark] | None:
        found = {m.body.side: m for m in watched.marks()[seen:] if isinstance(m.body, marks.Aborted)}
        return found if len(found) == 2 else None

    aborted = until(both)
    new = watched.marks()[seen:]
    (enqueued,) = (m.body for m in new if isinstance(m.body, marks.Enqueued))
    (queued,) = (m.body for m in new if isinstance(m.body, marks.Queued))
    assert enqueued.request == "cmpl-gone-0" and enqueued.engine_id == queued.engine_id
    assert aborted["frontend"].body == marks.Aborted("frontend", [enqueued.number])
    assert aborted["core"].body == marks.Aborted("core", [queued.number])
    late = [m.body for m in new if isinstance(m.body, marks.Step) and m.ts_ns > aborted["core"].ts_ns]
    assert not [step for step in late if queued.number in step.decodes]


def test_watching_can_end_and_begin_again(watched: Watched) -> None:
    watched.switch.unlink()
    seen = len(watched.marks())
    assert watched.complete(prompt(41, 9), 23)[1] == 200
    assert len(watched.marks()) == seen
    watched.switch.touch()
    serial, status, _ = watched.complete(prompt(43, 9), 29)
    assert status == 200
    new = watched.marks()[seen:]
    assert {m.body.role for m in new if isinstance(m.body, marks.Hello)} == {"frontend", "core", "worker"}
    first = {m.tgid: m for m in reversed(new)}
    assert all(isinstance(m.body, marks.Hello) for m in first.values())
    (queued,) = (m.body for m in new if isinstance(m.body, marks.Queued))
    assert queued.engine_id.startswith(f"cmpl-serial-{serial}-0")
    numbers = {n for m in new if isinstance(m.body, marks.Step) for n in m.body.decodes}
    assert numbers == {queued.number}


CHECK = """
import importlib, json
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm.v1.core.sched.scheduler as scheduler
print(json.dumps({"wrapped": hasattr(scheduler.Scheduler.schedule, "__wrapped__"), "states": states()}))
"""
ON = """
def states():
    from whyspan_inproc.vllm_plugin.roles import HOOKS
    found = {}
    for hook in HOOKS:
        try:
            importlib.import_module(hook.module)
        except ImportError as exc:
            found[hook.module] = str(exc)
        found[hook.module + ":" + hook.target] = hook.state
    return found
"""
OFF = """
def states():
    import sys
    return {name: "loaded" for name in sys.modules if name.startswith("whyspan_inproc.vllm")}
"""


@pytest.mark.parametrize(("value", "code"), [("", ON), ("0", OFF)], ids=["on", "off"])
def test_plugin_on_and_off(value: str, code: str) -> None:
    env = {**vllm.settings(), **inproc.environment(), "WHYSPAN_INPROC": value}
    done = subprocess.run(
        [str(install.python()), "-c", code + CHECK],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    if value == "0":
        assert found == {"wrapped": False, "states": {}}
    else:
        assert found["wrapped"]
        wrong = {name: state for name, state in found["states"].items() if state != "on"}
        # modules that need a GPU's packages cannot be imported here: their hooks wait
        assert not [name for name, state in wrong.items() if state in ("missing", "off")], wrong
