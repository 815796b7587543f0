"""Steps of engines that name no requests: llama.cpp by uprobes, ``generate`` of transformers, SGLang's forward passes.

They tell when a step ran, on which thread, and how many tokens were in it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from whyspan_probes.schema import Events, Schema

from whyspan import marks as m
from whyspan.engines.records import Counts, StepRun
from whyspan.lru import Lru
from whyspan.marks import Mark

LLAMA, TRANSFORMERS, SGLANG = "llama.cpp", "transformers", "sglang"
#: So many tokens of a sequence in a step are a prompt; fewer, after others of it, may be drafted tokens.
PROMPT_TOKENS: Final = 16
#: Result of ``llama_decode`` that found no place for the batch. Source: llama.h
NO_SLOT: Final = 1
_END_INFERRED: Final = 0x80000000  # aux of llama_step
_MAX_THREADS: Final = 256  # of a process, remembered


class Seen(NamedTuple):
    """One thing seen of a step: that it began (``begin_ns`` is 0), or that it ended."""

    ts_ns: int
    tid: int
    tgid: int
    engine: str
    begin_ns: int
    counts: Counts
    prompt: bool | None = None  # whether it computes a prompt; None: the tokens tell
    lane: int = 0  # what runs one step at a time beside the thread: a rank
    waiting: int = 0
    call_ends: bool = False  # a whole call has ended


def of_events(events: Events, schema: Schema) -> list[Seen]:
    """Return what the uprobes on llama.cpp saw, by time."""
    out = []
    for name in ("llama_step_start", "llama_step"):
        rows = schema.select(events, name)
        fields = rows.dtype.names or ()
        for values in rows.tolist():
            row = dict(zip(fields, values, strict=True))
            ended = name == "llama_step"
            result = row["aux"] if ended else 0
            counts = Counts(
                row["tokens"],
                max(row["sequences"], 1),
                position=row["position"],
                context=row["context"],
                shared=row["sequences"] > 1,
                inferred=result == _END_INFERRED,
                result=0 if result == _END_INFERRED else result - (1 << 32) * (result >> 31),
            )
            begin_ns = row["begin_ns"] if ended else 0
            out.append(Seen(row["ts_ns"], row["tid"], row["tgid"], LLAMA, begin_ns, counts))
    out.sort(key=lambda s: s.ts_ns)
    return out


def of_generated(mark: Mark, body: m.Generated) -> Seen | None:
    """Return what transformers told of a pass or of a call; None where it is neither (a whole request of a batch)."""
    if body.whole and body.requests:
        return None
    counts = Counts(
        body.tokens, max(body.batch, 1), position=body.cached, shared=bool(body.requests), whole=body.whole
    )
    return Seen(
        *(mark.ts_ns, mark.tid, mark.tgid, TRANSFORMERS, body.begin_ns, counts),
        prompt=body.prefill,
        call_ends=body.whole,
    )


def of_pass(mark: Mark, body: m.Pass) -> Seen | None:
    """Return what SGLang's feed told of a forward pass; None of a heartbeat."""
    sequences = body.prefill_requests + body.decode_requests
    if body.idle or not sequences:
        return None
    tokens = body.prefill_tokens + body.decode_requests
    counts = Counts(tokens, sequences, body.prefill_tokens, shared=True)
    begin_ns = max(mark.ts_ns - body.wall_ns, 0)
    return Seen(
        *(mark.ts_ns, 0, mark.tgid, SGLANG, begin_ns, counts, body.prefill_tokens > 0),
        lane=body.rank,
        waiting=body.queued_requests,
    )


class Runs:
    """The steps of one process, put together from what was seen. ``kv`` is (used, free, cached) blocks at the last."""

    def __init__(self) -> None:
        self._number = 0
        self._open: dict[int, StepRun] = {}  # by thread
        self._last: Lru[tuple[int, int], StepRun] = Lru(_MAX_THREADS)  # by thread and lane
        self._first: Lru[int, StepRun] = Lru(_MAX_THREADS)  # of the call that a thread is at
        self._over: Lru[int, int] = Lru(_MAX_THREADS)  # threads whose last call has ended
        self.kv = (0, 0, 0)

    def take(self, seen: Seen) -> tuple[StepRun | None, list[StepRun]]:
        """Take in what was seen; return the step that is new by it, and the steps that ended by it."""
        ended = self._close(seen)
        begin_ns = seen.begin_ns or seen.ts_ns
        same = self._open.pop(seen.tid, None)  # of another beginning it would be closed by now
        if same is not None:
            self._end(same, seen.ts_ns, seen.counts)
            return None, [*ended, same]
        last = self._last.get((seen.tid, seen.lane))
        if seen.call_ends:
            self._over.put(seen.tid, 1)
            if last is not None and last.begin_ns >= begin_ns:  # its passes were seen
                first = self._first.get(seen.tid)
                # The last one too: the first may have been forgotten when somebody asks whether the call is over.
                for step in (first, last):
                    if step is not None and step.counts is not None and step.begin_ns >= begin_ns:
                        step.counts = step.counts._replace(called_ns=begin_ns)
                return None, ended
        self._number += 1
        step = StepRun(
            seen.tgid,
            seen.tid,
            self._number,
            begin_ns,
            begin_ns,
            from_ns=max(begin_ns, last.done_ns if last is not None else 0),
            running=seen.counts.sequences,
            waiting=seen.waiting,
            kv_used=self.kv[0],
            kv_free=self.kv[1],
            kv_cached=self.kv[2],
            counts=self._told(seen, last),
        )
        self._last.put((seen.tid, seen.lane), step)
        if step.counts is not None and step.counts.first:
            self._first.put(seen.tid, step)
        if not seen.call_ends:
            self._over.pop(seen.tid)
        if seen.begin_ns:
            self._end(step, seen.ts_ns, seen.counts)
            return step, [*ended, step]
        self._open[seen.tid] = step
        return step, ended

    def _close(self, seen: Seen) -> list[StepRun]:
        """End the steps whose end was lost: their thread, or what they ran on, is at another one."""
        out = []
        for tid, step in list(self._open.items()):
            if seen.begin_ns == step.begin_ns and tid == seen.tid:
                continue
            on = step.counts.context if step.counts is not None else 0
            if tid == seen.tid or (on and on == seen.counts.context):
                counts = seen.counts._replace(inferred=True, result=0)
                self._end(step, max(seen.begin_ns or seen.ts_ns, step.begin_ns), counts)
                del self._open[tid]
                out.append(step)
        return out

    @staticmethod
    def _end(step: StepRun, ts_ns: int, told: Counts) -> None:
        assert step.counts is not None
        step.counts = step.counts._replace(inferred=told.inferred, result=told.result)
        step.done_ns = step.sent_ns = step.got_ns = max(ts_ns, step.from_ns)

    def _told(self, seen: Seen, last: StepRun | None) -> Counts:
        """Return the counts, with which of the tokens are a prompt's, and whether a call begins."""
        now = seen.counts
        if seen.lane or seen.tid == 0 or now.whole:
            return now._replace(first=now.whole)
        before = None if self._over.get(seen.tid) is not None or last is None else last.counts
        if seen.prompt is not None:
            first = before is None or (seen.prompt and not before.prefill_tokens)
            return now._replace(first=first, prefill_tokens=now.tokens if seen.prompt else 0)
        if now.shared:  # those that decode, one token each, and one or more prompts
            more = now.tokens - now.sequences
            return now._replace(prefill_tokens=more if more >= PROMPT_TOKENS else 0)
        first = before is None or not _goes_on(before, now)
        in_prompt = before is not None and before.prefill_tokens > 0 and now.tokens > 1
        prompt = first or in_prompt or now.tokens >= PROMPT_TOKENS
        return now._replace(first=first, prefill_tokens=now.tokens if prompt else 0)


def _goes_on(before: Counts, now: Counts) -> bool:
    """Whether a step computes what follows in the sequence of the step before it on its thread."""
    if before.context != now.context or before.shared:
        return False
    if now.tokens >= PROMPT_TOKENS and not before.prefill_tokens:
        return False
    if now.position < 0 or before.position < 0:
        return True
    behind = before.position + before.tokens
    if now.position == behind:
        return True
    # Drafted tokens that were refused are computed over.
    drafts = now.tokens < PROMPT_TOKENS and not before.prefill_tokens
    return drafts and before.position < now.position < behind
