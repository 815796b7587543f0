"""What a scheduler decided, as marks: every number by hand."""

from __future__ import annotations

from typing import Any

import pytest
from whyspan import marks
from whyspan.marks import Scheduled
from whyspan_inproc.vllm_plugin import pool, steps
from whyspan_inproc.vllm_plugin.numbers import Numbers

from tests.unit.inproc.conftest import Caught
from tests.unit.inproc.scheduler import Cached, Named, New, Output, Request, Scheduler, Status

BEGIN, END = (1 << 61) - 2_000, (1 << 61) - 1_000


class Told:
    """A maker, and the one mark of its last step."""

    def __init__(self, caught: Caught) -> None:
        self.numbers = Numbers()
        self.maker = steps.Maker(self.numbers)
        self.caught = caught

    def all(self, scheduler: Scheduler, output: Output, throttled: bool = False) -> list[marks.Step]:
        scheduler.current_step += 1
        self.step = self.maker.step(scheduler, output, BEGIN, END, throttled)
        bodies = self.caught.bodies()
        return [b for b in bodies if isinstance(b, marks.Step)]

    def __call__(self, scheduler: Scheduler, output: Output, throttled: bool = False) -> marks.Step:
        (body,) = self.all(scheduler, output, throttled)
        return body


@pytest.fixture
def told(caught: Caught) -> Told:
    pool.forget()
    return Told(caught)


def test_decodes_are_numbers(told: Told) -> None:
    scheduler = Scheduler()
    scheduler.runs("a", "b", "c")
    for name in "abc":
        told.numbers.give(name)
    body = told(scheduler, Output({"c": 1, "a": 1}, cached=Cached(["c", "a"], set(), [None, None], [40, 41])))
    assert (body.step, body.begin_ns, body.end_ns) == (1, BEGIN, END)
    assert body.decodes == [3, 1] and body.others == [] and not body.more
    assert body.running == 3
    assert told.step == 1


def test_request_from_before_watching_gets_a_number(told: Told) -> None:
    scheduler = Scheduler()
    scheduler.runs("a", "b")
    assert told(scheduler, Output({"a": 1, "b": 1}, cached=Cached(["a", "b"]))).decodes == [1, 2]


def test_admission_with_a_prefix_in_the_cache(told: Told) -> None:
    scheduler = Scheduler()
    scheduler.runs("a", num_prompt_tokens=100)
    scheduler.requests["a"].is_prefill_chunk = True
    # 32 tokens (two blocks) were found, 48 are computed in this step: five blocks in all, three of them new
    body = told(scheduler, Output({"a": 48}, [New("a", 32, ([1, 2, 3, 4, 5],))]))
    assert body.others == [Scheduled(1, 48, computed=32, cached=32, new_blocks=3, left=20)]


def test_chunks_of_a_prefill(told: Told) -> None:
    scheduler = Scheduler()
    scheduler.runs("a", num_prompt_tokens=65)
    scheduler.requests["a"].is_prefill_chunk = True
    told(scheduler, Output({"a": 64}, [New("a", 0, ([1, 2, 3, 4],))]))
    scheduler.requests["a"].is_prefill_chunk = False  # the last token of the prompt is no decode
    body = told(scheduler, Output({"a": 1}, cached=Cached(["a"], set(), [([5],)], [64])))
    assert body.others == [Scheduled(1, 1, computed=64, new_blocks=1)] and body.decodes == []
    body = told(scheduler, Output({"a": 1}, cached=Cached(["a"], set(), [None], [65])))
    assert body.others == [] and body.decodes == [1]


def test_prompt_of_one_token_is_no_decode(told: Told) -> None:
    scheduler = Scheduler()
    scheduler.runs("a", num_prompt_tokens=1)
    body = told(scheduler, Output({"a": 1}, [New("a", 0, ([1],))]))
    assert body.others == [Scheduled(1, 1, new_blocks=1)] and body.decodes == []


def test_speculative_tokens(told: Told) -> None:
    scheduler = Scheduler()
    scheduler.runs("a", "b")
    body = told(scheduler, Output({"a": 4, "b": 1}, cached=Cached(["a", "b"], set(), [None, None], [20, 30])))
    assert body.others == [Scheduled(1, 4, computed=20)] or body.others == [Scheduled(2, 4, computed=20)]
    assert len(body.decodes) == 1


@pytest.mark.parametrize("second_runner", [False, True], ids=["resumed list", "among the new"])
def test_preemption_and_what_is_computed_again(told: Told, second_runner: bool) -> None:
    scheduler = Scheduler()
    scheduler.runs("a", "b", num_prompt_tokens=60)
    told.numbers.give("a")
    told.maker.preempted("b", 70)
    body = told(scheduler, Output({"a": 1}, cached=Cached(["a"], set(), [None], [60])))
    assert body.preempted == [(2, 70)]
    scheduler.requests["b"].num_preemptions = 1
    scheduler.requests["b"].is_prefill_chunk = True

    def resumed(tokens: int, computed: int, blocks: list[int]) -> Output:
        if second_runner:
            return Output({"b": tokens}, [New("b", computed, (blocks,))])
        return Output({"b": tokens}, cached=Cached(["b"], {"b"}, [(blocks,)], [computed]))

    body = told(scheduler, resumed(40, 16, [1, 2, 3, 4]))
    assert body.others == [Scheduled(2, 40, 16, 16, new_blocks=3, recomputed=40, resumed=True, left=4)]
    assert body.preempted == []
    scheduler.requests["b"].is_prefill_chunk = False
    body = told(scheduler, Output({"b": 20}, cached=Cached(["b"], set(), [([5],)], [56])))
    # 56..69 had been computed, 70..75 are new
    assert body.others == [Scheduled(2, 20, 56, new_blocks=1, recomputed=14)]
    body = told(scheduler, Output({"b": 1}, cached=Cached(["b"], set(), [None], [76])))
    assert body.decodes == [2]


def test_preempted_twice_while_it_catches_up(told: Told) -> None:
    scheduler = Scheduler()
    scheduler.runs("a", num_prompt_tokens=90)
    told.maker.preempted("a", 80)
    told.maker.preempted("a", 16)
    body = told(scheduler, Output({"a": 90}, cached=Cached(["a"], {"a"}, [([1] * 6,)], [0])))
    assert body.preempted == [(1, 80), (1, 16)]
    assert body.others[0].recomputed == 80


def test_step_of_preemptions_alone_is_told(told: Told) -> None:
    scheduler = Scheduler()
    told.maker.preempted("a", 5)
    assert told(scheduler, Output({})).preempted == [(1, 5)]


def test_empty_steps_are_told_rarely(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler()
    assert told.all(scheduler, Output({})) == [] and told.step == 0
    scheduler.waits("a", status=Status.WAITING_FOR_REMOTE_KVS)
    told.maker._told_ns = END - steps._EMPTY_NS
    (body,) = told.all(scheduler, Output({}))
    assert (body.waiting, body.deferred) == (1, [(1, "remote_kv")])
    assert told.all(scheduler, Output({})) == []


def reasons(told: Told, scheduler: Scheduler, tokens: int = 1, throttled: bool = False) -> list[str]:
    scheduler.runs("runs")
    scheduled = {"runs": tokens}
    body = told(scheduler, Output(scheduled, cached=Cached(["runs"], set(), [None], [16])), throttled)
    assert body.waiting == len(scheduler.waiting) + len(scheduler.kv_holding_waiting)
    return [reason for _, reason in body.deferred]


def test_no_blocks(told: Told) -> None:
    scheduler = Scheduler()
    scheduler.waits("a")
    scheduler.waits("b")
    assert reasons(told, scheduler) == ["capacity", "capacity"]


def test_blocks_taken_from_another(told: Told) -> None:
    scheduler = Scheduler(max_num_running_reqs=1)
    scheduler.waits("a")
    told.maker.preempted("a", 3)
    assert reasons(told, scheduler) == ["capacity"]


def test_no_room_in_the_batch(told: Told) -> None:
    scheduler = Scheduler(max_num_running_reqs=1)
    scheduler.waits("a")
    assert reasons(told, scheduler) == ["budget"]


def test_no_tokens_left(told: Told) -> None:
    scheduler = Scheduler()
    scheduler.waits("a")
    assert reasons(told, scheduler, tokens=64) == ["budget"]


def test_prompt_that_must_not_be_cut(told: Told) -> None:
    scheduler = Scheduler(enable_chunked_prefill=False)
    scheduler.waits("a", num_prompt_tokens=60)
    assert reasons(told, scheduler, tokens=5) == ["budget"]


def test_prefills_held_back(told: Told) -> None:
    scheduler = Scheduler()
    scheduler.waits("a")
    assert reasons(told, scheduler, throttled=True) == ["throttled"]


def test_paused(told: Told) -> None:
    scheduler = Scheduler(pause_state=Named("PAUSED_NEW"))
    scheduler.waits("a")
    assert reasons(told, scheduler) == ["throttled"]


def test_between_prefills_of_033(told: Told) -> None:
    scheduler = Scheduler(local_prefill_interval=4, num_executed_steps=10, last_prefill_step=8)
    scheduler.waits("a")
    assert reasons(told, scheduler) == ["throttled"]


def test_each_for_its_own_reason(told: Told) -> None:
    scheduler = Scheduler(lora_config="yes", connector="yes")
    scheduler.kv_holding_waiting.append(Request("kv", status=Status.WAITING_FOR_REMOTE_KVS))
    scheduler.waits("grammar", status=Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    scheduler.waits("client", status=Status.WAITING_FOR_STREAMING_REQ)
    scheduler.deferred_waiting = {
        scheduler.waits("adapter", lora_request="one"),
        scheduler.waits("connector"),
    }
    scheduler.waits("blocks")
    assert reasons(told, scheduler) == ["remote_kv", "grammar", "adapter", "remote_kv", "capacity"]


def test_passed_over_without_a_connector(told: Told) -> None:
    scheduler = Scheduler()
    scheduler.deferred_waiting = {scheduler.waits("stale", lora_request="one")}
    assert reasons(told, scheduler) == ["throttled"]


def test_long_queue_is_told_from_its_head(told: Told) -> None:
    scheduler = Scheduler()
    for i in range(1_009):
        scheduler.waits(f"w{i}")
    assert reasons(told, scheduler) == ["capacity"] * steps._MAX_DEFERRED
    assert [told.numbers.of[f"w{i}"] for i in range(3)] == [2, 3, 4]


def test_priority_queue_is_read_without_sorting_it(told: Told) -> None:
    class Heap:
        def __init__(self) -> None:
            self._heap = [Request("a"), Request("b")]

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            pytest.fail("sorts a copy")

    scheduler = Scheduler()
    scheduler.waiting = Heap()  # type: ignore[assignment]
    assert reasons(told, scheduler) == ["capacity", "capacity"]


def test_pool(told: Told) -> None:
    scheduler = Scheduler(blocks=101, used=60)
    for block in scheduler.blocks[:7]:
        block.block_hash = "h"
    scheduler.blocks[0].ref_cnt = 1
    scheduler.runs("a")
    told.numbers.give("a")
    body = told(scheduler, Output({"a": 1}, cached=Cached(["a"])))
    assert (body.kv_used, body.kv_free, body.kv_cached, body.evicted) == (60, 40, 6, 0)
    queue: Any = object()
    hook: Any = None
    pool._freed(hook, (queue, scheduler.blocks[2:4]), {})
    pool._reused(hook, (queue, scheduler.blocks[4]), {})
    pool._evict(hook, None, True, (queue, scheduler.blocks[5]), {})
    pool._evict(hook, None, True, (queue, scheduler.blocks[0]), {})  # in use: was not among the free
    pool._evict(hook, None, False, (queue, scheduler.blocks[50]), {})
    body = told(scheduler, Output({"a": 1}, cached=Cached(["a"])))
    assert (body.kv_cached, body.evicted) == (6 + 2 - 1 - 1, 2)
    assert told(scheduler, Output({"a": 1}, cached=Cached(["a"]))).evicted == 0


@pytest.mark.parametrize("requests", [1_013, 4_099])
def test_long_batch_goes_on_in_more_marks(told: Told, requests: int) -> None:
    scheduler = Scheduler()
    names = [f"r{i}" for i in range(requests)]
    scheduler.runs(*names)
    told.numbers._next = iter(range(1_000_000, 9_999_999))  # type: ignore[assignment]
    for name in names:
        told.numbers.give(name)
    prefills = names[:307]
    scheduled = {name: 999_999 if name in prefills else 1 for name in names}
    for name in names[:101]:
        told.maker.preempted(name, 131_072)
    cached = Cached(names, set(), [([1] * 9,)] * requests, [131_072] * requests)
    bodies = told.all(scheduler, Output(scheduled, cached=cached))
    assert told.caught.sent == []
    assert [b.more for b in bodies] == [False] + [True] * (len(bodies) - 1) and len(bodies) > 1
    assert {(b.step, b.begin_ns, b.end_ns) for b in bodies} == {(1, BEGIN, END)}
    assert [b.running for b in bodies] == [requests] + [0] * (len(bodies) - 1)
    assert sorted(n for b in bodies for n in b.decodes) == sorted(told.numbers.of[n] for n in names[307:])
    assert [o.number for b in bodies for o in b.others] == [told.numbers.of[n] for n in prefills]
    assert len([p for b in bodies for p in b.preempted]) == 101


def test_nothing_is_kept_of_requests_that_ended(told: Told) -> None:
    scheduler = Scheduler()
    scheduler.runs("a", "b", num_prompt_tokens=100)
    scheduler.requests["a"].is_prefill_chunk = True
    told.maker.preempted("b", 50)
    told(scheduler, Output({"a": 10}, [New("a", 0, ([1],))]))
    assert told.maker._prefilling == {"a"} and told.maker._had == {"b": 50}
    told.maker.drop("a")
    told.maker.drop("b")
    assert not told.maker._prefilling and not told.maker._had
    told.maker.preempted("c", 1)
    told.maker.forget()
    assert not told.maker._lost and not told.maker._had


def test_numbers_are_never_used_again() -> None:
    numbers = Numbers()
    assert [numbers.give(r) for r in "aba"] == [1, 2, 1]
    assert numbers.drop("a") == 1 and numbers.drop("a") is None
    assert numbers.give("a") == 3
    numbers.keep({"b", "z"})
    assert numbers.of == {"b": 2}
