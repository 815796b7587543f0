"""vLLM's engine core: a request is queued, a batch is made up, sent off, waited for, and its result taken in."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

from whyspan_inproc import asgi, emit
from whyspan_inproc.hooks import Hook
from whyspan_inproc.kinds import ABORTED, QUEUED, STEP_DONE
from whyspan_inproc.vllm_plugin import hashes, pool, roles, steps
from whyspan_inproc.vllm_plugin.numbers import Numbers

_ROLE = "core"
_MAX_ID = 128
_MAX_NUMBERS = 256
#: Requests that may be remembered too long before all are looked over.
_MAX_GONE = 1024
#: On a SchedulerOutput: the step's number, which pickling takes along to the workers; and moments of the core.
STEP, SENT, WAIT, GOT = "_whyspan_step", "_whyspan_sent", "_whyspan_wait", "_whyspan_got"

numbers = Numbers()
_maker = steps.Maker(numbers)
_session = 0


def _made(_hook: Hook, _token: Any, _result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    config = args[0].vllm_config
    roles.play(_ROLE, config, int(getattr(config.parallel_config, "data_parallel_index", 0) or 0))


def _hash(_hook: Hook, _token: Any, result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    request = result[0]
    size = getattr(getattr(args[0], "scheduler", None), "hash_block_size", 0)
    request._whyspan_hashes = _hashes(request, size)


def _hashes(request: Any, size: int) -> tuple[str, str]:
    tokens = request.prompt_token_ids
    return hashes.hashed(tokens, size, request.block_hashes) if tokens is not None and size else ("", "")


def _queued(_hook: Hook, _token: Any, _result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    scheduler, request = args[0], args[1] if len(args) > 1 else kwargs["request"]
    engine_id = request.request_id
    _fresh(scheduler)
    if engine_id in numbers.of or scheduler.requests.get(engine_id) is not request:
        return  # the next part of a streamed prompt
    size = getattr(scheduler, "hash_block_size", 0) or scheduler.block_size
    told = getattr(request, "_whyspan_hashes", None)
    chained, blocks = told if told is not None else _hashes(request, size)
    body: dict[str, Any] = {
        "engine_id": engine_id[:_MAX_ID],
        "number": numbers.give(engine_id),
        "prompt_tokens": request.num_prompt_tokens,
        "block_size": size,
    }
    if request.trace_headers and "traceparent" in request.trace_headers:
        body["trace_id"] = asgi.traceparent(str(request.trace_headers["traceparent"]))[0]
    if request.priority:
        body["priority"] = request.priority
    if chained:
        body["chain"], body["blocks"] = chained, blocks
    emit.emit(QUEUED, body)


def _fresh(scheduler: Any) -> None:
    """Forget what ended while nobody watched, or by a way that we do not know."""
    global _session
    if _session != emit.session:
        _session = emit.session
        numbers.keep(scheduler.requests)
        _maker.forget()
        pool.forget()
    elif len(numbers.of) > 2 * len(scheduler.requests) + _MAX_GONE:
        numbers.keep(scheduler.requests)
        _maker.keep(scheduler.requests)


def _schedule(_hook: Hook, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    _fresh(args[0])
    return emit.now_ns()


def _scheduled(hook: Hook, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    throttled = bool(hook.argument(args, kwargs, "throttle_prefills", False))
    step = _maker.step(args[0], result, token, emit.now_ns(), throttled)
    if step:
        setattr(result, STEP, step)


def _preempt(_hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    request = args[1] if len(args) > 1 else kwargs["request"]
    _maker.preempted(request.request_id, request.num_computed_tokens)


def _send(_hook: Hook, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    setattr(args[1], SENT, emit.now_ns())


class _Waiting:
    """vLLM's context manager around the wait for a step's result, and when it was entered and left."""

    __slots__ = ("_inner", "_output")

    def __init__(self, inner: Any, output: Any) -> None:
        self._inner, self._output = inner, output

    def __enter__(self) -> Any:
        entered = self._inner.__enter__()
        self._note(WAIT)
        return entered

    def __exit__(self, *exc: Any) -> Any:
        self._note(GOT)
        return self._inner.__exit__(*exc)

    def _note(self, name: str) -> None:
        try:
            setattr(self._output, name, emit.now_ns())
        except Exception:
            emit.dropped["failed"] += 1


def _wait(_hook: Hook, _token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    output = args[1] if len(args) > 1 else kwargs["scheduler_output"]
    return _Waiting(result, output) if hasattr(output, STEP) else result


def _update(_hook: Hook, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return emit.now_ns()


def _updated(_hook: Hook, token: Any, result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    output = args[1]
    step = getattr(output, STEP, 0)
    tokens = 0
    finished: list[tuple[int, str]] = []
    speculative = output.scheduled_spec_decode_tokens
    drafted = accepted = 0
    for of_client in result.values():
        for one in of_client.outputs:
            count = len(one.new_token_ids)
            tokens += count
            if speculative and one.request_id in speculative:
                drafted += len(speculative[one.request_id])
                accepted += max(0, count - 1)
            if one.finish_reason is not None:
                still = args[0].requests.get(one.request_id)
                if still is not None and not still.is_finished():
                    continue  # the end of one turn of a streamed prompt
                number = numbers.drop(one.request_id)
                _maker.drop(one.request_id)
                if number is not None:
                    finished.append((number, str(one.finish_reason)))
    if not step:
        return
    got = getattr(output, GOT, token)
    body: dict[str, Any] = {
        "step": step,
        "sent_ns": getattr(output, SENT, 0),
        "wait_ns": getattr(output, WAIT, got),
        "got_ns": got,
        "tokens": tokens,
        "finished": finished[:_MAX_NUMBERS],
        "drafted": drafted,
        "accepted": accepted,
    }
    for name in ("finished", "drafted", "accepted"):
        if not body[name]:
            del body[name]
    emit.emit(STEP_DONE, body)
    for at in range(_MAX_NUMBERS, len(finished), _MAX_NUMBERS):
        rest = {"step": step, "sent_ns": body["sent_ns"], "wait_ns": body["wait_ns"], "got_ns": got}
        emit.emit(STEP_DONE, {**rest, "finished": finished[at : at + _MAX_NUMBERS]})


def _finished(hook: Hook, _token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    status = hook.argument(args, kwargs, "finished_status")
    if getattr(status, "name", "") != "FINISHED_ABORTED":
        return  # told as finished by the step that found the error
    gone = []
    for request in result:
        number = numbers.drop(request.request_id)
        _maker.drop(request.request_id)
        if number is not None:
            gone.append(number)
    rest = iter(gone)
    while part := list(islice(rest, _MAX_NUMBERS)):
        emit.emit(ABORTED, {"side": "core", "numbers": part})


_SCHEDULER = "vllm.v1.core.sched.scheduler"
_CORE = "vllm.v1.engine.core"
_MULTI = "vllm.v1.executor.multiproc_executor"
_UNI = "vllm.v1.executor.uniproc_executor"
_RAY = "vllm.v1.executor.ray_executor"
_SEND = "self scheduler_output"
_UPDATE = "self scheduler_output model_runner_output"
_THROTTLE = "self throttle_prefills"

HOOKS = [
    Hook(_ROLE, _SCHEDULER, "Scheduler.__init__", "self vllm_config", after=_made, always=True),
    Hook(_ROLE, _CORE, "EngineCore.preprocess_add_request", "self request", after=_hash),
    Hook(_ROLE, _SCHEDULER, "Scheduler.add_request", "self request", after=_queued),
    Hook(_ROLE, _SCHEDULER, "Scheduler.schedule", _THROTTLE, before=_schedule, after=_scheduled),
    Hook(_ROLE, _SCHEDULER, "Scheduler._preempt_request", "self request", before=_preempt),
    Hook(_ROLE, _SCHEDULER, "Scheduler.update_from_output", _UPDATE, before=_update, after=_updated),
    Hook(_ROLE, _SCHEDULER, "Scheduler.finish_requests", "self request_ids finished_status", after=_finished),
    Hook(_ROLE, _CORE, "EngineCore.capture_iteration_details", _SEND, after=_wait, replace=True),
    # Sending begins with the call: serialising is part of the way to the worker; in one process it is the work.
    Hook(_ROLE, _MULTI, "MultiprocExecutor.execute_model", _SEND, before=_send),
    Hook(_ROLE, _UNI, "UniProcExecutor.execute_model", _SEND, before=_send),
    Hook(_ROLE, _RAY, "RayDistributedExecutor.execute_model", _SEND, before=_send, optional=True),
    *pool.HOOKS,
]

__all__ = ["HOOKS", "chain"]
