"""Stages of vLLM's cold start, and what changes it at run time: adapters, weights, sleep, compilation."""

from __future__ import annotations

import threading
from typing import Any

from whyspan_inproc import emit
from whyspan_inproc.hooks import After, Before, Hook
from whyspan_inproc.kinds import STAGE
from whyspan_inproc.vllm_plugin import roles

_MAX_TEXT = 256
_compiling = threading.local()


def tell(name: str, begin_ns: int, what: str = "") -> None:
    """Send a stage that ends now."""
    body: dict[str, Any] = {"name": name, "begin_ns": begin_ns}
    if what:
        body["what"] = what[:_MAX_TEXT]
    emit.emit(STAGE, body)


def _began(_hook: Hook, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    return emit.now_ns()


def _ended(name: str) -> After:
    def after(_hook: Hook, token: Any, _result: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        tell(name, token)

    return after


def _adapter(_hook: Hook, token: Any, _result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    asked = args[1] if len(args) > 1 else None
    tell("adapter", token, str(getattr(asked, "lora_name", "")))


def _imported(_hook: Hook, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    tell("import", roles.started_ns())


def _ready(_hook: Hook, _token: Any, _result: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    tell("ready", roles.started_ns())


def follow_compilation(module: Any) -> None:
    """Have Dynamo say when it compiles; ``module`` is torch._dynamo.callback."""
    handler = module.callback_handler

    def start(_args: Any = None) -> None:
        if emit.watched():
            _compiling.begin_ns = emit.now_ns()

    def end(args: Any = None) -> None:
        begin_ns = getattr(_compiling, "begin_ns", 0)
        if begin_ns:
            _compiling.begin_ns = 0
            tell("compile", begin_ns, str(getattr(args, "compile_id", "")))

    handler.register_start_callback(start)
    handler.register_end_callback(end)


_WORKER = "vllm.v1.worker.gpu_worker"
_CPU = "vllm.v1.worker.cpu_worker"
_ASYNC = "vllm.v1.engine.async_llm"
_SYNC = "vllm.v1.engine.llm_engine"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_RUNNER_2 = "vllm.v1.worker.gpu.model_runner"
_CORE = "vllm.v1.engine.core"
_SCHEDULER = "vllm.v1.core.sched.scheduler"


def _stage(role: str, module: str, target: str, name: str, *, optional: bool = False) -> Hook:
    return Hook(role, module, target, "self", before=_began, after=_ended(name), optional=optional)


def _point(role: str, module: str, target: str, *, before: Before, after: After | None = None) -> Hook:
    # Always: watching may begin while the method runs, half a minute for a front end.
    return Hook(role, module, target, "self", before=before, after=after, always=True)


HOOKS = [
    _stage("worker", _WORKER, "Worker.init_device", "device"),
    _stage("worker", _CPU, "CPUWorker.init_device", "device", optional=True),
    _stage("worker", _WORKER, "Worker.load_model", "load_model"),
    _stage(
        "worker",
        "vllm.model_executor.model_loader.default_loader",
        "DefaultModelLoader.load_weights",
        "weights",
    ),
    _stage(
        "worker", "vllm.model_executor.model_loader.dummy_loader", "DummyModelLoader.load_weights", "weights"
    ),
    _stage("worker", _WORKER, "Worker.determine_available_memory", "warmup"),
    _stage("worker", _CPU, "CPUWorker.determine_available_memory", "warmup", optional=True),
    _stage("worker", _WORKER, "Worker.initialize_from_config", "kv_cache"),
    _stage("worker", _WORKER, "Worker.compile_or_warm_up_model", "warmup"),
    _stage("worker", _CPU, "CPUWorker.compile_or_warm_up_model", "warmup", optional=True),
    _stage("worker", _RUNNER, "GPUModelRunner.capture_model", "capture"),
    _stage("worker", _RUNNER_2, "GPUModelRunner.capture_model", "capture"),
    _stage("worker", _WORKER, "Worker.reload_weights", "reload"),
    _stage("worker", _WORKER, "Worker.update_weights", "reload", optional=True),
    _stage("worker", _WORKER, "Worker.sleep", "sleep"),
    _stage("worker", _WORKER, "Worker.wake_up", "wake"),
    Hook("worker", _WORKER, "Worker.add_lora", "self lora_request", before=_began, after=_adapter),
    _stage("core", _CORE, "EngineCore._initialize_kv_caches", "kv_cache"),
    _point("core", _SCHEDULER, "Scheduler.__init__", before=_imported),
    _point("frontend", _ASYNC, "AsyncLLM.__init__", before=_imported, after=_ready),
    _point("frontend", _SYNC, "LLMEngine.__init__", before=_imported, after=_ready),
]
