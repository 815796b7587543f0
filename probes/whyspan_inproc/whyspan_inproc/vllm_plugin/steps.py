"""A scheduler's decision as ``Step`` marks: who is in the batch, who was thrown out of it, who was passed over."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from whyspan_inproc import emit
from whyspan_inproc.kinds import STEP
from whyspan_inproc.vllm_plugin import pool
from whyspan_inproc.vllm_plugin.numbers import Numbers

if TYPE_CHECKING:
    from collections.abc import Container

#: Waiting requests whose reason is told in each step, from the head of the queue: half a microsecond each.
_MAX_DEFERRED = 32
#: An empty step with requests waiting is told this often at most: the core may spin.
_EMPTY_NS = 100_000_000
#: What an entry takes in JSON at most (numbers of seven digits), and what a mark has room for.
_DECODE, _OTHER, _PREEMPTED, _ROOM = 8, 60, 18, 6000

_BLOCKED = {
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": "grammar",
    "WAITING_FOR_FSM": "grammar",
    "WAITING_FOR_REMOTE_KVS": "remote_kv",
    "WAITING_FOR_STREAMING_REQ": "",  # it waits for its own client
}


class Maker:
    """Makes the marks; follows what the scheduler does not tell of each request.

    Bounded: what it keeps is dropped with the request.
    """

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._lost: list[tuple[str, int]] = []  # preempted since the step before
        self._had: dict[str, int] = {}  # request: tokens computed before its preemption
        self._prefilling: set[str] = set()
        self._blocked: dict[Any, str | None] = {}  # status: reason it blocks, as far as met
        self._told_ns = 0
        self._count = 0

    def forget(self) -> None:
        """Watching began: drop what was kept before."""
        self._lost.clear()
        self._had.clear()
        self._prefilling.clear()

    def keep(self, live: Container[str]) -> None:
        """All but the live requests have ended."""
        for request in [r for r in chain(self._had, self._prefilling) if r not in live]:
            self.drop(request)

    def drop(self, request: str) -> None:
        """A request has ended."""
        self._had.pop(request, None)
        self._prefilling.discard(request)

    def preempted(self, request: str, computed: int) -> None:
        """A request is about to lose its ``computed`` tokens."""
        self._lost.append((request, computed))
        self._had[request] = max(computed, self._had.get(request, 0))
        self._prefilling.discard(request)

    def step(self, scheduler: Any, output: Any, begin_ns: int, end_ns: int, throttled: bool) -> int:
        """Send a decision; return the step's number, 0 if there is nothing to tell.

        Args:
            scheduler: vLLM's.
            output: Its SchedulerOutput.
            begin_ns: When it began.
            end_ns: When it had decided.
            throttled: It was told to hold prefills back.
        """
        self._count += 1
        running, waiting = scheduler.get_request_counts()
        tokens = output.total_num_scheduled_tokens
        if not tokens and not self._lost and (not waiting or end_ns - self._told_ns < _EMPTY_NS):
            return 0
        self._told_ns = end_ns
        step = getattr(scheduler, "current_step", 0) or self._count
        decodes, others = self._members(scheduler, output)
        lost = [[self._numbers.give(request), computed] for request, computed in self._lost]
        capacity = bool(lost)
        self._lost.clear()
        body: dict[str, Any] = {"step": step, "begin_ns": begin_ns, "end_ns": end_ns}
        if running:
            body["running"] = running
        if waiting:
            body["waiting"] = waiting
            deferred = self._deferred(scheduler, tokens, throttled, capacity)
            if deferred:
                body["deferred"] = deferred
        for name, value in pool.state(scheduler).items():
            if value:
                body[name] = value
        _send(body, decodes, others, lost)
        return int(step)

    def _members(self, scheduler: Any, output: Any) -> tuple[list[int], list[list[Any]]]:
        """Return the numbers of plain decodes, and the rows of ``Scheduled``."""
        of, scheduled = self._numbers.of, output.num_scheduled_tokens
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        others: list[list[Any]] = []
        special = self._prefilling
        if new or resumed:
            special = {*special, *resumed, *(n.req_id for n in new)}
        try:
            decodes = [of[r] for r, n in scheduled.items() if n == 1 and r not in special]
        except KeyError:  # from before watching began
            give = self._numbers.give
            decodes = [give(r) for r, n in scheduled.items() if n == 1 and r not in special]
        for one in new:
            again = scheduler.requests[one.req_id].num_preemptions > 0
            blocks = sum(map(len, one.block_ids))
            others.append(
                self._row(scheduler, one.req_id, scheduled, one.num_computed_tokens, blocks, again, True)
            )
        if len(decodes) + len(others) < len(scheduled):
            for at, request in enumerate(cached.req_ids):
                if scheduled[request] != 1 or request in special:
                    blocks = sum(map(len, cached.new_block_ids[at] or ()))
                    computed, again = cached.num_computed_tokens[at], request in resumed
                    others.append(self._row(scheduler, request, scheduled, computed, blocks, again, again))
        return decodes, others

    def _row(  # noqa: PLR0917 (called for each request: no keywords)
        self,
        scheduler: Any,
        request_id: str,
        scheduled: dict[str, int],
        computed: int,
        blocks: int,
        resumed: bool,
        admitted: bool,
    ) -> list[Any]:
        request, tokens = scheduler.requests[request_id], scheduled[request_id]
        if request.is_prefill_chunk:
            self._prefilling.add(request_id)
        else:
            self._prefilling.discard(request_id)
        had = self._had.get(request_id, 0)
        recomputed = max(0, min(had, computed + tokens) - computed)
        if had and computed + tokens >= had:
            del self._had[request_id]
        cached = computed if admitted else 0
        if admitted and blocks:  # on admission vLLM lists all blocks of the request, those of the prefix too
            groups = len(scheduler.kv_cache_config.kv_cache_groups)
            blocks = max(0, blocks - groups * (computed // scheduler.block_size))
        left = max(0, request.num_prompt_tokens - computed - tokens)
        number = self._numbers.give(request_id)
        return [number, tokens, computed, cached, blocks, recomputed, resumed, left]

    def _deferred(self, scheduler: Any, tokens: int, throttled: bool, capacity: bool) -> list[list[Any]]:
        """Return (number, reason) of the first requests that wait.

        vLLM does not say why. Its loop over the waiting stops for want of a token budget or of room in the batch,
        which can be read off; where neither is used up it stopped because a prompt got no blocks.
        """
        general = _general(scheduler, tokens, throttled, capacity)
        skipped = getattr(scheduler, "deferred_waiting", ())
        queues = (getattr(scheduler, "kv_holding_waiting", ()), scheduler.waiting)
        # A priority queue's own iterator sorts a copy.
        first = islice(chain.from_iterable(getattr(q, "_heap", q) for q in queues), _MAX_DEFERRED)
        rows: list[list[Any]] = []
        of, blocked = self._numbers.of, self._blocked
        for request in first:
            status = request.status
            reason = blocked.get(status)
            if reason is None and status not in blocked:
                reason = blocked[status] = _BLOCKED.get(getattr(status, "name", ""))
            if reason is None:
                reason = general
                if skipped and request in skipped:
                    reason = _skipped(scheduler, request)
            if reason:
                rows.append([of.get(request.request_id) or self._numbers.give(request.request_id), reason])
        return rows


def _skipped(scheduler: Any, request: Any) -> str:
    """Why vLLM passed over a request that is ready, and went on to the next."""
    if request.lora_request and getattr(scheduler, "lora_config", None):
        return "adapter"  # as many as fit are in the batch
    if getattr(scheduler, "connector", None) or getattr(scheduler, "ec_connector", None):
        return "remote_kv"
    # Its encoder has no budget; or it was preempted and output of it is still to come.
    return "budget" if getattr(request, "has_encoder_inputs", False) else "throttled"


def _general(scheduler: Any, tokens: int, throttled: bool, capacity: bool) -> str:
    if capacity:
        return "capacity"
    pause = getattr(scheduler, "pause_state", None)
    if throttled or getattr(pause, "name", "UNPAUSED") != "UNPAUSED" or _between_prefills(scheduler):
        return "throttled"
    most = getattr(scheduler, "max_num_active_reqs", None) or scheduler.max_num_running_reqs
    in_batch = len(scheduler.running) + getattr(scheduler, "num_waiting_for_streaming_input", 0)
    left = scheduler.max_num_scheduled_tokens - tokens
    if in_batch >= most or left <= 0:
        return "budget"
    if not scheduler.scheduler_config.enable_chunked_prefill and scheduler.waiting:
        head = scheduler.waiting.peek_request()
        if head.num_tokens - head.num_computed_tokens > left:
            return "budget"
    return "capacity"


def _between_prefills(scheduler: Any) -> bool:
    """vLLM 0.33 spaces prefills out by ``prefill_schedule_interval`` steps of its own accord."""
    interval = getattr(scheduler, "local_prefill_interval", 1)
    if interval <= 1 or getattr(scheduler, "prefill_capacity_bound", False):
        return False
    return bool(scheduler.num_executed_steps - scheduler.last_prefill_step < interval)


def _send(body: dict[str, Any], decodes: list[int], others: list[list[Any]], lost: list[list[int]]) -> None:
    """Send a step, in several marks if it does not fit into one."""
    if not (others or lost) and len(decodes) * _DECODE <= _ROOM:  # nearly always
        if decodes:
            body["decodes"] = decodes
        emit.emit(STEP, body)
        return
    while True:
        room = _ROOM
        for name, entries, size in (
            ("preempted", lost, _PREEMPTED),
            ("others", others, _OTHER),
            ("decodes", decodes, _DECODE),
        ):
            count = max(0, room // size)
            if entries and count:
                body[name] = entries[:count]
                room -= size * min(count, len(entries))
                del entries[:count]
        emit.emit(STEP, body)
        if not (decodes or others or lost):
            return
        body = {"step": body["step"], "begin_ns": body["begin_ns"], "end_ns": body["end_ns"], "more": True}
