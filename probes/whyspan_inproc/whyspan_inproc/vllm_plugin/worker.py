"""vLLM's worker: its part of each step, and in which form it ran (CUDA graph, padding)."""

from __future__ import annotations

from typing import Any

from whyspan_inproc import emit, torch_layers, torch_layers_vllm
from whyspan_inproc.hooks import Hook
from whyspan_inproc.kinds import EXECUTED
from whyspan_inproc.vllm_plugin import roles

_ROLE = "worker"
#: Set on the SchedulerOutput by the core; equals ``core.STEP``.
_STEP = "_whyspan_step"

_graph: tuple[str, int] = ("", 0)  # mode and padded tokens of the step in progress
_last: tuple[int, int, int] = (0, 0, 0)  # step, tokens and requests of the step last executed
_layers: torch_layers.Sample | None = None  # of the step in progress, if it is sampled


def _made(_hook: Hook, _token: Any, _result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    roles.play(_ROLE, args[0].vllm_config, int(args[0].rank or 0))


def _cached(_hook: Hook, _token: Any, _result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    groups = args[0].model_runner.attn_groups
    names = {group.backend.get_name() for of_cache in groups for group in of_cache}
    roles.attention[_ROLE] = ",".join(sorted(names))
    emit.changed()


def _execute(hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    global _graph, _layers
    _graph = ("", 0)
    began = emit.now_ns()
    output = hook.argument(args, kwargs, "scheduler_output")
    _layers = torch_layers_vllm.begin(args[0], output, getattr(output, _STEP, 0))
    return began


def _executed(_hook: Hook, token: Any, _result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _last
    torch_layers_vllm.end(_layers)
    output = args[1] if len(args) > 1 else kwargs["scheduler_output"]
    tokens = output.total_num_scheduled_tokens
    step = getattr(output, _STEP, 0)
    if not tokens or not step:
        _last = (0, 0, 0)
        return  # nothing ran, or it was scheduled before watching began
    _last = (step, tokens, len(output.num_scheduled_tokens))
    body: dict[str, Any] = {"step": step, "begin_ns": token, "tokens": tokens, "requests": _last[2]}
    graph, padded = _graph
    if graph:
        body["graph"] = graph
    if padded:
        body["padded"] = padded
    emit.emit(EXECUTED, body)


def _sample(_hook: Hook, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return emit.now_ns()


def _sampled(_hook: Hook, token: Any, _result: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    step, tokens, requests = _last
    if step:
        emit.emit(
            EXECUTED,
            {"step": step, "begin_ns": token, "part": "sample", "tokens": tokens, "requests": requests},
        )


def _dispatched(
    _hook: Hook, _token: Any, result: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> None:
    """The first model runner: (mode, descriptor, ...)."""
    _note(result[0], result[1].num_tokens)


def _dispatched_2(
    _hook: Hook, _token: Any, result: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> None:
    """The second model runner: (descriptor, ...)."""
    _note(result[0].cg_mode, result[0].num_tokens)


def _note(mode: Any, padded: int) -> None:
    global _graph
    _graph = (str(mode.name).lower(), int(padded))


_WORKER = "vllm.v1.worker.gpu_worker"

HOOKS = [
    Hook(_ROLE, _WORKER, "Worker.__init__", "self vllm_config", after=_made, always=True),
    Hook(_ROLE, _WORKER, "Worker.initialize_from_config", "self", after=_cached, always=True, optional=True),
    Hook(_ROLE, _WORKER, "Worker.execute_model", "self scheduler_output", before=_execute, after=_executed),
    Hook(_ROLE, _WORKER, "Worker.sample_tokens", "self", before=_sample, after=_sampled),
    Hook(
        _ROLE,
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._determine_batch_execution_and_padding",
        "self num_tokens",
        after=_dispatched,
        optional=True,
    ),
    Hook(
        _ROLE,
        "vllm.v1.worker.gpu.model_runner",
        "dispatch_cg_and_sync_dp",
        "num_reqs num_tokens",
        after=_dispatched_2,
        optional=True,
    ),
]
