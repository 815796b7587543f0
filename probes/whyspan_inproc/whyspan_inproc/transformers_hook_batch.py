"""Continuous batching of transformers: requests, each step's batch, the paged cache's blocks, what it lacks.

Blocks are whole-model blocks as ``PagedAttentionCache.num_blocks`` counts them. Unreferenced blocks that still hold
a prefix are free, as they are taken when needed; ``cached_blocks`` says how many.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from whyspan_inproc import asgi, emit, kinds, torch_layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from whyspan_inproc.hooks import Hook

#: Requests named in one mark, as many as ``whyspan.marks.Generated`` takes.
MAX_REQUESTS = 64
#: Requests of one batch that are told to have got no blocks.
MAX_DENIED = 8
#: Characters of a request's id.
MAX_ID = 128

#: Set by ``transformers_hook``: sends Hello of a model.
on_model: Callable[[Any, dict[str, str] | None], None] | None = None

_here = threading.local()
#: The state last told of each paged cache.
_states: weakref.WeakKeyDictionary[Any, tuple[int, int, int]] = weakref.WeakKeyDictionary()


def again() -> None:
    """Each cache's state is told again."""
    _states.clear()


class Batch:
    """A batch that was made up: the requests' ids, tokens to process, tokens in the cache before."""

    def __init__(self, scheduled: list[Any]) -> None:
        self.requests = [name(f.state) for f in scheduled]
        self.tokens = sum(f.query_length for f in scheduled)
        self.cached = sum(f.state.position_offset for f in scheduled)
        self.prefill = any(
            f.query_length > 1 or not f.has_new_token or f.state.position_offset == 0 for f in scheduled
        )


class Running:
    """A step in progress."""

    def __init__(self, batch: Batch | None, sample: torch_layers.Sample | None, begin_ns: int) -> None:
        self.batch, self.sample, self.begin_ns = batch, sample, begin_ns


def name(state: Any) -> str:
    """Return a request's id."""
    return str(state.request_id)[:MAX_ID]


def before_prepare(hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``prepare_batch_tensors`` is called: the batch is known, and its requests not yet moved on."""
    _here.batch = Batch(hook.argument(args, kwargs, "requests_in_batch"))
    _here.denied = 0


def before_step(hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Running:
    """A step's forward pass and sampling begin."""
    batch: Batch | None = getattr(_here, "batch", None)
    _here.batch = None
    model = hook.argument(args, kwargs, "model")
    if on_model is not None:
        on_model(model, settings(args[0]))
    _here.steps = step = getattr(_here, "steps", 0) + 1
    begin_ns = time.monotonic_ns()
    return Running(batch, torch_layers.begin(model, step, reason=_opaque(args[0])), begin_ns)


def _opaque(processor: Any) -> str:
    runner = processor.model_runner
    if runner._compiled_varlen is not None or runner._compiled_decode is not None:
        return "compiled"
    if runner.use_cuda_graph_varlen or runner.use_cuda_graph_decode:
        return "captured in a graph"
    return ""


def settings(processor: Any) -> dict[str, str]:
    """Return what a step's time depends on, as text."""
    config, cache = processor.cb_config, processor.cache
    found = {
        "max_num_seqs": getattr(config, "max_requests_per_batch", None),
        "max_num_batched_tokens": getattr(cache, "max_batch_tokens", None),
        "block_size": getattr(config, "page_size", None),
        "num_blocks": getattr(cache, "num_blocks", None),
        "scheduler": getattr(config, "scheduler_type", None),
        "async": getattr(processor, "use_async_batching", None),
    }
    return {key: str(value)[:128] for key, value in found.items() if value is not None}


def after_step(
    _hook: Hook, running: Running | None, _result: Any, args: tuple[Any, ...], _kwargs: Any
) -> None:
    """The step has been run, or in asynchronous batching sent off; or it failed."""
    if running is None:
        return
    if running.sample is not None:
        torch_layers.end(running.sample)
    batch = running.batch
    if batch is not None:
        body: dict[str, Any] = {
            "begin_ns": running.begin_ns,
            "tokens": batch.tokens,
            "cached": batch.cached,
            "batch": len(batch.requests),
            "requests": batch.requests[:MAX_REQUESTS],
        }
        if batch.prefill:
            body["prefill"] = True
        emit.emit(kinds.GENERATED, body)
    tell(args[0].cache)


def after_update(_hook: Hook, _token: Any, _result: Any, args: tuple[Any, ...], _kwargs: Any) -> None:
    """A step's tokens were taken in; requests that are done gave their blocks back."""
    tell(args[0].cache)


def blocks(cache: Any) -> tuple[int, int, int]:
    """Return the blocks of a paged cache: used, free, and of the free ones those that hold a prefix."""
    total = int(cache.num_blocks)
    unused = round(cache.compute_free_capacity() * total)
    capacity = cache.num_sectors * cache.bytes_per_sector
    kept = sum(len(a.ledger.cached_blocks) * a.bytes_per_block for a in cache.cache_allocators.values())
    cached = round(kept / capacity * total)
    return total - unused - cached, unused + cached, cached


def tell(cache: Any) -> None:
    """Send the state of a paged cache if it is another than before."""
    state = blocks(cache)
    if _states.get(cache) != state:
        _states[cache] = state
        emit.emit(kinds.CACHE_CHANGED, {"op": "state", **_fields(state)})


def _fields(state: tuple[int, int, int]) -> dict[str, int]:
    return {"used_blocks": state[0], "free_blocks": state[1], "cached_blocks": state[2]}


def after_store(hook: Hook, _token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A request was given blocks for its next tokens, or there were too few."""
    if result is not False or hook.argument(args, kwargs, "dry_run", False):
        return
    _here.denied = denied = getattr(_here, "denied", 0) + 1
    if denied <= MAX_DENIED:
        state = hook.argument(args, kwargs, "state")
        body = {"op": "denied", "tokens": hook.argument(args, kwargs, "request_len"), "request": name(state)}
        emit.emit(kinds.CACHE_CHANGED, body | _fields(blocks(args[0])))


def before_evict(_hook: Hook, args: tuple[Any, ...], _kwargs: Any) -> int:
    """Prefixes that no request refers to are given up: return their tokens."""
    return sum(len(a.ledger.cached_blocks) * a.tokens_per_page for a in args[0].cache_allocators.values())


def after_evict(_hook: Hook, had: int | None, _result: Any, args: tuple[Any, ...], _kwargs: Any) -> None:
    """They are given up."""
    if had:
        emit.emit(kinds.CACHE_CHANGED, {"op": "evicted", "removed": had, **_fields(blocks(args[0]))})


def before_offload(hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, int]]:
    """Requests lost their blocks to others: return their ids and tokens in the cache."""
    return [(name(s), int(s.position_offset)) for s in hook.argument(args, kwargs, "victims")[:MAX_REQUESTS]]


def after_offload(
    _hook: Hook, victims: list[tuple[str, int]] | None, result: Any, args: tuple[Any, ...], _kwargs: Any
) -> None:
    """Those in ``result`` were copied to the host, the others' tokens must be computed again."""
    state = _fields(blocks(args[0].cache))
    for request, tokens in victims or ():
        op = "offloaded" if request in result else "evicted"
        emit.emit(kinds.CACHE_CHANGED, {"op": op, "removed": tokens, "request": request, **state})


def before_restore(hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The batch is made up; those of its requests that lie on the host come back."""
    for future in hook.argument(args, kwargs, "requests_in_batch")[:MAX_REQUESTS]:
        if future.state.is_cpu_offloaded:
            emit.emit(
                kinds.CACHE_CHANGED,
                {
                    "op": "restored",
                    "tokens": int(future.state.position_offset),
                    "request": name(future.state),
                },
            )


def after_add(hook: Hook, _token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The manager took a request, on the thread that asks for it; None: it refused."""
    if result is None:
        return
    body: dict[str, Any] = {"request": str(result)[:MAX_ID], "n": int(args[0].num_return_sequences)}
    body |= {key: value for key, value in asgi.current.get()._asdict().items() if value}
    asked = hook.argument(args, kwargs, "max_new_tokens")
    if asked is None:
        asked = getattr(args[0].generation_config, "max_new_tokens", None)
    if asked:
        body["max_tokens"] = int(asked)
    emit.emit(kinds.ARRIVED, body)


def before_deliver(hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Results go to who waits for them; requests that are done are told as a whole.

    Their times are ``perf_counter``'s, which is CLOCK_MONOTONIC on Linux, as is ``begin_ns``.
    """
    outputs = hook.argument(args, kwargs, "outputs")
    if outputs is None:
        outputs = [hook.argument(args, kwargs, "output")]
    for output in outputs:
        if output.is_finished():
            made = len(output.generated_tokens)
            emit.emit(
                kinds.GENERATED,
                {
                    "begin_ns": max(0, round(output.created_time * 1e9)),
                    "tokens": len(output.prompt_ids) + max(0, made - 1),  # the last one is not fed back
                    "whole": True,
                    "requests": [name(output)],
                },
            )
