"""A request's way through vLLM's front end and core, with objects shaped as vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from whyspan import marks
from whyspan_inproc import asgi, emit
from whyspan_inproc.hooks import Hook
from whyspan_inproc.vllm_plugin import core, frontend, hashes, roles, stages, steps, worker
from whyspan_inproc.vllm_plugin.numbers import Numbers

from tests.unit.inproc.conftest import Caught
from tests.unit.inproc.scheduler import Cached, New, Output, Request, Scheduler, Status

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NO_HOOK: Any = None


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has seen no request."""
    for module in (core, frontend):
        monkeypatch.setattr(module, "numbers", Numbers())
        monkeypatch.setattr(module, "_session", emit.session)
    monkeypatch.setattr(core, "_maker", steps.Maker(core.numbers))
    monkeypatch.setattr(roles, "_playing", {})
    monkeypatch.setattr(worker, "_last", (0, 0, 0))
    yield
    asgi.current.set(asgi.Incoming())


def hook(hooks: list[Hook], target: str) -> Hook:
    """A plugin's hook, told of the parameters of the real method."""
    (found,) = (h for h in hooks if h.target == target and (h.before or h.after) and not h.always)
    return found


def arrived(caught: Caught, params: Any, **kwargs: Any) -> marks.Arrived:
    engine = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 32_000))
    add = hook(frontend.HOOKS, "AsyncLLM.add_request")
    frontend._arrive(add, (engine,), {"request_id": "cmpl-1", "params": params, **kwargs})
    (body,) = caught.bodies()
    assert isinstance(body, marks.Arrived)
    return body


def sampling(**more: Any) -> SimpleNamespace:
    plain = {"n": 1, "max_tokens": 16, "logprobs": None, "prompt_logprobs": None, "structured_outputs": None}
    return SimpleNamespace(**{**plain, **more})


def test_plain_request_is_short(caught: Caught) -> None:
    body = arrived(caught, sampling())
    assert body == marks.Arrived(request="cmpl-1", max_tokens=16)


def test_costly_options(caught: Caught) -> None:
    asked = SimpleNamespace(json=None, regex="a+", choice=None)
    body = arrived(
        caught,
        sampling(n=4, logprobs=5, prompt_logprobs=-1, structured_outputs=asked, max_tokens=None),
        priority=-2,
        lora_request=SimpleNamespace(lora_name="sql"),
    )
    assert body == marks.Arrived(
        *("cmpl-1",),
        n=4,
        logprobs=5,
        prompt_logprobs=32_000,
        grammar="regex",
        priority=-2,
        adapter="sql",
    )
    assert arrived(caught, sampling(structured_outputs=SimpleNamespace(json={"a": 1}))).grammar == "json"


def test_pooling_request(caught: Caught) -> None:
    assert arrived(caught, SimpleNamespace(task="embed")) == marks.Arrived(request="cmpl-1")


def test_connection_and_callers_trace(caught: Caught) -> None:
    asgi.current.set(asgi.Incoming(TRACE, SPAN, "req-1", 51_234, 8_000, "rag"))
    assert arrived(caught, sampling(max_tokens=0)) == marks.Arrived(
        *("cmpl-1", TRACE, SPAN),
        request_id="req-1",
        client_port=51_234,
        server_port=8_000,
        template="rag",
    )


def test_trace_headers_go_before_the_connections(caught: Caught) -> None:
    asgi.current.set(asgi.Incoming("1" * 32, "2" * 16))
    body = arrived(caught, sampling(), trace_headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    assert (body.trace_id, body.span_id) == (TRACE, SPAN)


def test_long_ids_are_cut(caught: Caught) -> None:
    add = hook(frontend.HOOKS, "AsyncLLM.add_request")
    frontend._arrive(add, (None,), {"request_id": "x" * 500, "params": sampling()})
    (body,) = caught.bodies()
    assert isinstance(body, marks.Arrived) and body.request == "x" * 128


def test_tokenisation_began_with_the_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100, 200, 300])
    monkeypatch.setattr(emit, "now_ns", lambda: next(now))
    frontend._render(NO_HOOK, (), {})
    assert frontend._tokenise(NO_HOOK, (), {}) == 100
    assert frontend._tokenise(NO_HOOK, (), {}) == 200  # another prompt of the same task: from its own begin


def test_tokenised(caught: Caught) -> None:
    process = hook(frontend.HOOKS, "InputProcessor.process_inputs")
    for tokens, embeds, count in (([1, 2, 3], None, 3), (None, [[0.1]] * 5, 5), (None, None, 0)):
        result = SimpleNamespace(prompt_token_ids=tokens, prompt_embeds=embeds)
        frontend._tokenised(process, (1 << 61) - 7, result, (), {"request_id": "cmpl-1"})
        assert caught.bodies() == [marks.Tokenised("cmpl-1", (1 << 61) - 7, count)]


class Processor:
    """vLLM's OutputProcessor: the requests of the front end."""

    def __init__(self) -> None:
        self.request_states: dict[str, object] = {}

    def add(self, engine_id: str, known_as: str | None = None) -> None:
        request = SimpleNamespace(request_id=engine_id, external_req_id=known_as)
        frontend._enqueue(NO_HOOK, (self, request), {})
        self.request_states[engine_id] = object()

    def outputs(self, ids: list[str], done: list[str]) -> None:
        outputs = [SimpleNamespace(request_id=i) for i in ids]
        token = frontend._process(NO_HOOK, (self, outputs), {})
        for i in done:
            del self.request_states[i]
        frontend._processed(NO_HOOK, token, None, (self, outputs), {})


def test_outputs_and_numbers(caught: Caught) -> None:
    processor = Processor()
    processor.add("a-1", "a")
    processor.add("0_b-2", "b")
    processor.add("1_b-2", "b")
    processor.add("a-1", "a")  # the next part of a streamed prompt
    assert caught.bodies() == [
        marks.Enqueued("a", "a-1", 1),
        marks.Enqueued("b", "0_b-2", 2),
        marks.Enqueued("b", "1_b-2", 3),
    ]
    processor.outputs(["a-1", "unknown", "1_b-2"], ["1_b-2"])
    (body,) = caught.bodies()
    assert isinstance(body, marks.Output)
    assert (body.requests, body.finished) == ([1, 3], [3])
    assert frontend.numbers.of == {"a-1": 1, "0_b-2": 2}
    processor.outputs(["unknown"], [])
    assert caught.bodies() == []


def test_large_output_is_several_marks(caught: Caught) -> None:
    processor = Processor()
    names = [f"r{i}" for i in range(1_009)]
    for name in names:
        processor.add(name)
    caught.bodies()
    processor.outputs(names, names)
    bodies = [b for b in caught.bodies() if isinstance(b, marks.Output)]
    assert len(bodies) == 3
    assert sorted(n for b in bodies for n in b.requests) == list(range(1, 1_010))
    assert all(sorted(b.finished) == sorted(b.requests) for b in bodies)
    assert frontend.numbers.of == {}


def test_abort_of_a_parent_is_told_once(caught: Caught) -> None:
    processor = Processor()
    processor.add("0_b-2", "b")
    processor.add("1_b-2", "b")
    caught.bodies()
    frontend._aborted(NO_HOOK, None, ["0_b-2", "1_b-2"], (), {})  # the inner call, with the children
    frontend._aborted(NO_HOOK, None, ["0_b-2", "1_b-2", "unknown"], (), {})  # the outer one
    assert caught.bodies() == [marks.Aborted("frontend", [1, 2])]


def test_requests_that_ended_unwatched_are_forgotten(caught: Caught, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = Processor()
    processor.add("old")
    processor.add("lives")
    del processor.request_states["old"]
    monkeypatch.setattr(emit, "session", emit.session + 1)
    processor.add("new")
    assert frontend.numbers.of == {"lives": 2, "new": 3}


# --- core


def queue(scheduler: Scheduler, name: str, tokens: int, **more: Any) -> Request:
    request = scheduler.waits(name, num_prompt_tokens=tokens)
    plain = {
        "prompt_token_ids": list(range(tokens)),
        "block_hashes": [],
        "trace_headers": None,
        "priority": 0,
    }
    for field, value in {**plain, **more}.items():
        setattr(request, field, value)
    core._queued(NO_HOOK, None, None, (scheduler, request), {})
    return request


def test_queued(caught: Caught) -> None:
    scheduler = Scheduler(hash_block_size=16)
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    queue(scheduler, "a", 40, trace_headers=headers, priority=3)
    again = queue(scheduler, "b", 47)
    core._queued(NO_HOOK, None, None, (scheduler, again), {})
    first, second = (b for b in caught.bodies() if isinstance(b, marks.Queued))
    assert (first.engine_id, first.number, first.prompt_tokens) == ("a", 1, 40)
    assert (first.trace_id, first.priority, first.block_size) == (TRACE, 3, 16)
    assert len(first.chain) == len(first.blocks) == 16
    assert (first.chain, first.blocks) == (second.chain, second.blocks)
    assert second.number == 2


def test_longest_prompt_fits_into_a_mark(caught: Caught) -> None:
    queue(Scheduler(hash_block_size=16), "x" * 300, 1_000_000)
    (body,) = caught.bodies()
    assert isinstance(body, marks.Queued) and len(body.chain) == 2_048 and body.engine_id == "x" * 128


def test_hashes_are_made_in_the_input_thread(caught: Caught, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(scheduler=SimpleNamespace(hash_block_size=16))
    scheduler = Scheduler(hash_block_size=16)
    request: Any = scheduler.waits("a", num_prompt_tokens=32)
    request.prompt_token_ids, request.block_hashes = list(range(32)), [b"x" * 32, b"y" * 32]
    request.trace_headers, request.priority = None, 0
    core._hash(NO_HOOK, None, (request, 0), (engine,), {})
    monkeypatch.setattr(hashes, "hashed", pytest.fail)
    core._queued(NO_HOOK, None, None, (scheduler, request), {})
    (body,) = caught.bodies()
    assert isinstance(body, marks.Queued) and len(body.chain) == 16


def test_prompt_of_embeddings_has_no_hashes(caught: Caught) -> None:
    queue(Scheduler(hash_block_size=16), "a", 40, prompt_token_ids=None)
    (body,) = caught.bodies()
    assert isinstance(body, marks.Queued) and (body.chain, body.blocks) == ("", "")


def core_output(*rows: tuple[str, int, str | None]) -> dict[int, Any]:
    outputs = [
        SimpleNamespace(request_id=r, new_token_ids=[7] * count, finish_reason=reason)
        for r, count, reason in rows
    ]
    return {0: SimpleNamespace(outputs=outputs)}


class Waits:
    """vLLM's context manager around the wait."""

    def __enter__(self) -> str:
        return "details"

    def __exit__(self, *_: object) -> None:
        pass


def test_step_from_decision_to_result(caught: Caught) -> None:
    scheduler = Scheduler(hash_block_size=16)
    for name in ("a", "b"):
        queue(scheduler, name, 16)
    scheduler.waiting.clear()
    caught.bodies()
    new = [New("a", 0, ([1],)), New("b", 0, ([2],))]
    output: Any = Output({"a": 16, "b": 16}, new)
    output.scheduled_spec_decode_tokens = {"b": [1, 2, 3]}
    scheduler.current_step = 42
    schedule = hook(core.HOOKS, "Scheduler.schedule")
    token = core._schedule(schedule, (scheduler,), {})
    core._scheduled(schedule, token, output, (scheduler, False), {})
    assert output._whyspan_step == 42
    core._send(NO_HOOK, (None, output), {})
    waiting = core._wait(NO_HOOK, None, Waits(), (None, output), {})
    with waiting as details:
        assert details == "details"
    token = core._update(NO_HOOK, (scheduler, output), {})
    result = core_output(("a", 1, None), ("b", 3, "length"))
    del scheduler.requests["b"]
    core._updated(NO_HOOK, token, result, (scheduler, output), {})
    step, done = caught.bodies()
    assert isinstance(step, marks.Step) and isinstance(done, marks.StepDone)
    assert done.step == step.step == 42
    assert step.begin_ns <= step.end_ns <= done.sent_ns <= done.wait_ns <= done.got_ns
    assert (done.tokens, done.finished, done.drafted, done.accepted) == (4, [(2, "length")], 3, 2)
    assert core.numbers.of == {"a": 1}


def test_step_from_before_watching_has_no_result(caught: Caught) -> None:
    output: Any = Output({"a": 1})
    output.scheduled_spec_decode_tokens = {}
    inner = Waits()
    assert core._wait(NO_HOOK, None, inner, (None, output), {}) is inner
    core.numbers.give("a")
    core._updated(NO_HOOK, 5, core_output(("a", 1, "stop")), (Scheduler(), output), {})
    assert caught.bodies() == []
    assert core.numbers.of == {}  # but a request that ends is forgotten


def test_many_that_finish_at_once(caught: Caught) -> None:
    output: Any = Output({})
    output.scheduled_spec_decode_tokens, output._whyspan_step = {}, 3
    rows = [(f"r{i}", 1, "length") for i in range(601)]
    for name, _, _ in rows:
        core.numbers.give(name)
    core._updated(NO_HOOK, 5, core_output(*rows), (Scheduler(), output), {})
    bodies = [b for b in caught.bodies() if isinstance(b, marks.StepDone)]
    assert [len(b.finished) for b in bodies] == [256, 256, 89]
    assert [b.tokens for b in bodies] == [601, 0, 0]
    assert {b.step for b in bodies} == {3}


def test_turn_of_a_streamed_prompt_is_not_the_end(caught: Caught) -> None:
    scheduler, output = Scheduler(), Output({})
    output.scheduled_spec_decode_tokens, output._whyspan_step = {}, 3  # type: ignore[attr-defined]
    request = scheduler.waits("a")
    core.numbers.give("a")
    core._updated(NO_HOOK, 5, core_output(("a", 1, "stop")), (scheduler, output), {})
    request.status = Status.FINISHED_STOPPED  # its blocks are freed later, when a transfer is over
    core._updated(NO_HOOK, 5, core_output(("a", 1, "stop")), (scheduler, output), {})
    assert [b.finished for b in caught.bodies() if isinstance(b, marks.StepDone)] == [[], [(1, "stop")]]


def test_requests_that_vanish_are_forgotten_in_the_end(caught: Caught) -> None:
    scheduler = Scheduler()
    scheduler.runs("lives")
    core.numbers.give("lives")
    for i in range(core._MAX_GONE + 1):
        core.numbers.give(f"gone{i}")
        core._maker.preempted(f"gone{i}", 5)
    core._schedule(NO_HOOK, (scheduler,), {})
    assert len(core.numbers.of) == core._MAX_GONE + 2
    core.numbers.give("one more")
    core._schedule(NO_HOOK, (scheduler,), {})
    assert core.numbers.of == {"lives": 1} and not core._maker._had


@pytest.mark.parametrize(("status", "told"), [("FINISHED_ABORTED", True), ("FINISHED_ERROR", False)])
def test_abort_in_the_core(caught: Caught, status: str, told: bool) -> None:
    scheduler = Scheduler(hash_block_size=16)
    request = queue(scheduler, "a", 16)
    caught.bodies()
    finish = hook(core.HOOKS, "Scheduler.finish_requests")
    kwargs = {"finished_status": SimpleNamespace(name=status)}
    core._finished(finish, None, [request], (scheduler, ["a"]), kwargs)
    assert caught.bodies() == ([marks.Aborted("core", [1])] if told else [])
    assert core.numbers.of == ({} if told else {"a": 1})


def test_preemption_is_seen_before_the_tokens_are_lost(caught: Caught) -> None:
    scheduler = Scheduler(hash_block_size=16)
    request = queue(scheduler, "a", 16)
    request.num_computed_tokens, request.status = 20, Status.RUNNING
    core._preempt(NO_HOOK, (scheduler, request, 1.0), {})
    caught.bodies()
    core._maker.step(scheduler, Output({}), 1, 2, False)
    (body,) = caught.bodies()
    assert isinstance(body, marks.Step) and body.preempted == [(1, 20)]


# --- worker, stages, roles


def run_worker(output: Any) -> None:
    execute = hook(worker.HOOKS, "Worker.execute_model")
    token = worker._execute(execute, (None,), {"scheduler_output": output})
    if output.total_num_scheduled_tokens:
        worker._note(SimpleNamespace(name="PIECEWISE"), 24)
    worker._executed(execute, token, None, (None, output), {})
    worker._sampled(NO_HOOK, worker._sample(NO_HOOK, (), {}), None, (), {})


def test_worker_tells_both_parts(caught: Caught) -> None:
    output: Any = Output({"a": 16, "b": 1})
    output._whyspan_step = 9
    run_worker(output)
    execute, sample = (b for b in caught.bodies() if isinstance(b, marks.Executed))
    assert (execute.step, execute.part, execute.tokens, execute.requests) == (9, "execute", 17, 2)
    assert (execute.graph, execute.padded) == ("piecewise", 24)
    assert (sample.step, sample.part, sample.graph) == (9, "sample", "")


def test_worker_is_silent_on_empty_and_unknown_steps(caught: Caught) -> None:
    empty: Any = Output({})
    empty._whyspan_step = 9
    run_worker(empty)
    run_worker(Output({"a": 1}, cached=Cached(["a"])))
    assert caught.bodies() == []


def test_stage(caught: Caught) -> None:
    stages.tell("adapter", (1 << 61) - 5, "x" * 1_000)
    assert caught.bodies() == [marks.Stage("adapter", (1 << 61) - 5, "x" * 256)]


def test_compilation(caught: Caught) -> None:
    class Handler:
        def register_start_callback(self, call: Any) -> None:
            self.start = call

        def register_end_callback(self, call: Any) -> None:
            self.end = call

    handler = Handler()
    stages.follow_compilation(SimpleNamespace(callback_handler=handler))
    handler.start(SimpleNamespace(compile_id="0/0"))
    handler.end(SimpleNamespace(compile_id="0/0"))
    handler.end(SimpleNamespace(compile_id="1/0"))  # its start was not watched
    (body,) = caught.bodies()
    assert isinstance(body, marks.Stage) and (body.name, body.what) == ("compile", "0/0")


def test_hello_of_each_role(caught: Caught, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Hook("core", "m", "Scheduler.schedule", "self")
    broken.state = "missing"
    absent = Hook("core", "m", "Other.thing", "self", optional=True)
    absent.state = "missing"
    monkeypatch.setattr(roles, "HOOKS", [broken, absent])
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=128, policy="fcfs"),
        cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=None),
        model_config=SimpleNamespace(
            served_model_name=["one", "two"], model="/models/m", revision=None, dtype="torch.bfloat16"
        ),
    )
    emit.on_watch(roles.say_hello)
    roles.play("frontend", config)
    roles.play("core", config, rank=3)
    hellos = {b.role: b for b in caught.bodies() if isinstance(b, marks.Hello)}
    assert hellos["frontend"].state == "ok" and hellos["frontend"].missing == []
    body = hellos["core"]
    assert (body.engine, body.rank, body.state, body.missing) == (
        "vllm",
        3,
        "degraded",
        ["Scheduler.schedule"],
    )
    assert body.config == {"max_num_seqs": "128", "policy": "fcfs", "block_size": "16"}
    assert body.model == {"name": "one", "path": "/models/m", "dtype": "torch.bfloat16"}


def test_configuration_that_makes_no_sense(caught: Caught) -> None:
    class Angry:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("theirs")

    emit.on_watch(roles.say_hello)
    roles.play("core", Angry())
    roles.play("worker", None)
    assert [b.config for b in caught.bodies() if isinstance(b, marks.Hello)][-1] == {}


def test_start_of_the_process() -> None:
    assert 0 < roles.started_ns() <= emit.now_ns()
