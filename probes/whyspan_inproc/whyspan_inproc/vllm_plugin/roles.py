"""Who speaks: the ``Hello`` of each role that this process plays."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from whyspan_inproc import emit
from whyspan_inproc.hooks import Hook
from whyspan_inproc.kinds import HELLO

_MAX_NAME = 128
_MAX_TEXT = 256
_MAX_MISSING = 64

#: Every hook of the plugin, by role.
HOOKS: list[Hook] = []
_playing: dict[str, tuple[int, Any]] = {}  # role: rank, configuration
#: Attention backends really in use, by role; known once the cache is set up.
attention: dict[str, str] = {}


def start() -> None:
    """Introduce this process to whoever watches, now and later."""
    emit.on_watch(say_hello)
    os.register_at_fork(after_in_child=_playing.clear)


def play(role: str, config: Any, rank: int = 0) -> None:
    """This process plays ``role`` from now on, as configured by vLLM's ``config``."""
    _playing[role] = (rank, config)
    emit.changed()
    emit.watched()


def say_hello() -> None:
    """Send a ``Hello`` for each role."""
    for role, (rank, config) in tuple(_playing.items()):
        missing = [
            hook.target
            for hook in HOOKS
            if hook.role == role and hook.state in ("missing", "off") and not hook.optional
        ]
        body: dict[str, Any] = {"engine": "vllm", "version": _version(), "role": role}
        if rank:
            body["rank"] = rank
        if missing:
            body["state"] = "degraded"
            body["missing"] = [name[:_MAX_NAME] for name in missing[:_MAX_MISSING]]
        body["config"] = settings(config)
        body["model"] = model(config, attention.get(role, ""))
        emit.emit(HELLO, body)


def _version() -> str:
    module = sys.modules.get("vllm")
    return str(getattr(module, "__version__", ""))[:_MAX_NAME]


#: Name in ``Hello.config``: where vLLM's configuration has it.
_SETTINGS = {
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "async_scheduling": "scheduler_config.async_scheduling",
    "policy": "scheduler_config.policy",
    "long_prefill_token_threshold": "scheduler_config.long_prefill_token_threshold",
    "prefill_schedule_interval": "scheduler_config.prefill_schedule_interval",
    "watermark": "scheduler_config.watermark",
    "block_size": "cache_config.block_size",
    "num_blocks": "cache_config.num_gpu_blocks",
    "kv_cache_dtype": "cache_config.cache_dtype",
    "prefix_caching": "cache_config.enable_prefix_caching",
    "max_model_len": "model_config.max_model_len",
    "vocab_size": "model_config.hf_text_config.vocab_size",
    "enforce_eager": "model_config.enforce_eager",
    "cudagraph_mode": "compilation_config.cudagraph_mode",
    "compilation_mode": "compilation_config.mode",
    "tensor_parallel": "parallel_config.tensor_parallel_size",
    "pipeline_parallel": "parallel_config.pipeline_parallel_size",
    "data_parallel": "parallel_config.data_parallel_size",
    "speculative_tokens": "speculative_config.num_speculative_tokens",
    "batch_queue": "max_concurrent_batches",
    "v2_model_runner": "use_v2_model_runner",
    "device": "device_config.device_type",
}


def settings(config: Any) -> dict[str, str]:
    """Return the plain settings worth knowing, as text; those that are not there or not set are left out."""
    found = {name: _text(config, path) for name, path in _SETTINGS.items()}
    return {name: text for name, text in found.items() if text}


def model(config: Any, backend: str = "") -> dict[str, str]:
    """Return what a baseline depends on: the model and how it is computed, as text."""
    found = {
        "name": _text(config, "model_config.served_model_name") or _text(config, "model_config.model"),
        "path": _text(config, "model_config.model"),
        "revision": _text(config, "model_config.revision"),
        "dtype": _text(config, "model_config.dtype"),
        "quantization": _text(config, "model_config.quantization"),
        "attention": backend or _text(config, "attention_config.backend"),
    }
    return {name: text for name, text in found.items() if text}


def _text(config: Any, path: str) -> str:
    value = config
    try:
        for part in path.split("."):
            value = getattr(value, part)
    except Exception:  # a property of theirs may raise anything
        return ""
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        value = value[0] if value else ""
    return str(getattr(value, "name", value))[:_MAX_TEXT]


def started_ns() -> int:
    """Return when this process began, in ns of the monotonic clock; 0 when not known.

    proc(5): starttime is in ticks since boot.
    """
    try:
        with open("/proc/self/stat", "rb") as stat:
            ticks = int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
    since_boot = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    asleep = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    return max(0, since_boot - asleep)
