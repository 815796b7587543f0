"""vLLM's front end: a request arrives, is tokenised, goes to the engine, its output comes back; or it is aborted."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

from whyspan_inproc import asgi, emit
from whyspan_inproc.hooks import Hook
from whyspan_inproc.kinds import ABORTED, ARRIVED, ENQUEUED, OUTPUT, TOKENISED
from whyspan_inproc.vllm_plugin import roles
from whyspan_inproc.vllm_plugin.numbers import Numbers

_ROLE = "frontend"
_MAX_ID = 128
#: Numbers in one mark: eight bytes each, two lists.
_MAX_NUMBERS = 450
_GRAMMARS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

numbers = Numbers()
_session = 0
#: When the prompt of the request in progress began to be rendered, 0 if it was not seen.
_rendering: ContextVar[int] = ContextVar("whyspan_rendering", default=0)

_Args = "tuple[Any, ...]"


def _made(_hook: Hook, _token: Any, _result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    roles.play(_ROLE, getattr(args[0], "vllm_config", None))


def _render(_hook: Hook, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    _rendering.set(emit.now_ns())


def _arrive(hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    params = hook.argument(args, kwargs, "params")
    incoming = asgi.current.get()
    trace_id, span_id = incoming.trace_id, incoming.span_id
    headers = hook.argument(args, kwargs, "trace_headers")
    if headers and "traceparent" in headers:
        trace_id, span_id = asgi.traceparent(str(headers["traceparent"]))
    body: dict[str, Any] = {"request": str(hook.argument(args, kwargs, "request_id"))[:_MAX_ID]}
    own_trace, own_span = _own_span()
    if not trace_id:
        trace_id = own_trace
    adapter = hook.argument(args, kwargs, "lora_request")
    fields = {
        "trace_id": trace_id,
        "span_id": span_id,
        "own_span_id": own_span,
        "request_id": incoming.request_id,
        "client_port": incoming.client_port,
        "server_port": incoming.server_port,
        "max_tokens": getattr(params, "max_tokens", None) or 0,
        "logprobs": _logprobs(args[0], getattr(params, "logprobs", None)),
        "prompt_logprobs": _logprobs(args[0], getattr(params, "prompt_logprobs", None)),
        "grammar": _grammar(getattr(params, "structured_outputs", None)),
        "priority": hook.argument(args, kwargs, "priority", 0) or 0,
        "adapter": str(getattr(adapter, "lora_name", "") or "")[:_MAX_ID],
        "template": incoming.template,
    }
    body.update((name, value) for name, value in fields.items() if value)
    completions = getattr(params, "n", 1) or 1
    if completions != 1:
        body["n"] = completions
    emit.emit(ARRIVED, body)


def _own_span() -> tuple[str, str]:
    """Return trace id and span id of the OpenTelemetry span that runs here, if there is one."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return "", ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return "", ""
    return format(context.trace_id, "032x"), format(context.span_id, "016x")


def _logprobs(engine: Any, asked: int | None) -> int:
    if asked is None:
        return 0
    if asked >= 0:
        return asked
    return int(engine.model_config.get_vocab_size())  # -1 asks for all


def _grammar(asked: Any) -> str:
    return next((name for name in _GRAMMARS if getattr(asked, name, None)), "") if asked is not None else ""


def _tokenise(_hook: Hook, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    began = _rendering.get()
    if not began:
        return emit.now_ns()
    _rendering.set(0)
    return began


def _tokenised(hook: Hook, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tokens = result.prompt_token_ids
    if tokens is None:
        tokens = result.prompt_embeds if result.prompt_embeds is not None else ()
    request = str(hook.argument(args, kwargs, "request_id"))[:_MAX_ID]
    emit.emit(TOKENISED, {"request": request, "begin_ns": token, "prompt_tokens": len(tokens)})


def _enqueue(_hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _session
    processor, request = args[0], args[1] if len(args) > 1 else kwargs["request"]
    if _session != emit.session:
        _session = emit.session
        numbers.keep(processor.request_states)
    engine_id = request.request_id
    if engine_id in numbers.of:
        return  # the next part of a streamed prompt
    known_as = request.external_req_id or engine_id
    body = {
        "request": str(known_as)[:_MAX_ID],
        "engine_id": engine_id[:_MAX_ID],
        "number": numbers.give(engine_id),
    }
    emit.emit(ENQUEUED, body)


def _process(_hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, list[str], list[int]]:
    began = emit.now_ns()
    outputs = args[1] if len(args) > 1 else kwargs["engine_core_outputs"]
    of = numbers.of
    ids = [o.request_id for o in outputs if o.request_id in of]
    return began, ids, [of[i] for i in ids]


def _processed(_hook: Hook, token: Any, _result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    began, ids, given = token
    if not ids:
        return
    states = args[0].request_states
    finished = [n for i, n in zip(ids, given) if i not in states]  # noqa: B905 (Python 3.9)
    for at in range(0, len(given), _MAX_NUMBERS):
        part = given[at : at + _MAX_NUMBERS]
        body: dict[str, Any] = {"begin_ns": began, "requests": part}
        if finished:
            body["finished"] = finished if len(given) <= _MAX_NUMBERS else sorted({*part} & {*finished})
        emit.emit(OUTPUT, body)
    if finished:
        for i in ids:
            if i not in states:
                numbers.drop(i)


def _aborted(_hook: Hook, _token: Any, result: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    gone = [n for n in map(numbers.drop, result) if n is not None]
    for at in range(0, len(gone), _MAX_NUMBERS):
        emit.emit(ABORTED, {"side": "frontend", "numbers": gone[at : at + _MAX_NUMBERS]})


_ASYNC = "vllm.v1.engine.async_llm"
_SYNC = "vllm.v1.engine.llm_engine"
_OUTPUT = "vllm.v1.engine.output_processor"
_RENDER = "vllm.renderers.base"
_ADD = "self request_id params trace_headers lora_request priority"

HOOKS = [
    Hook(_ROLE, _ASYNC, "AsyncLLM.__init__", "self vllm_config", after=_made, always=True),
    Hook(_ROLE, _SYNC, "LLMEngine.__init__", "self vllm_config", after=_made, always=True),
    Hook(_ROLE, _ASYNC, "AsyncLLM.add_request", _ADD, before=_arrive),
    Hook(_ROLE, _SYNC, "LLMEngine.add_request", _ADD, before=_arrive),
    Hook(_ROLE, _RENDER, "BaseRenderer.render_cmpl", "self", before=_render),
    Hook(_ROLE, _RENDER, "BaseRenderer.render_cmpl_async", "self", before=_render),
    Hook(_ROLE, _RENDER, "BaseRenderer.render_chat", "self", before=_render),
    Hook(_ROLE, _RENDER, "BaseRenderer.render_chat_async", "self", before=_render),
    Hook(
        _ROLE,
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        "self request_id",
        before=_tokenise,
        after=_tokenised,
    ),
    Hook(_ROLE, _OUTPUT, "OutputProcessor.add_request", "self request", before=_enqueue),
    Hook(
        _ROLE,
        _OUTPUT,
        "OutputProcessor.process_outputs",
        "self engine_core_outputs",
        before=_process,
        after=_processed,
    ),
    Hook(_ROLE, _OUTPUT, "OutputProcessor.abort_requests", "self request_ids", after=_aborted),
]
