"""transformers: ``generate``, its forward passes, caches, and continuous batching (checked with 5.19).

Nothing inside a compiled region is touched, and no tensor is read that could lie on a device. A method that is
missing, or has other parameters, is named in ``Hello`` and the rest goes on.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

from whyspan_inproc import emit, kinds
from whyspan_inproc import transformers_hook_batch as batch
from whyspan_inproc import transformers_hook_cache as cache
from whyspan_inproc import transformers_hook_generate as generate
from whyspan_inproc.hooks import Hook

if TYPE_CHECKING:
    from collections.abc import Callable

GENERATE, BATCHING = "generate", "batching"
_GENERATION = "transformers.generation.utils"
_CB = "transformers.generation.continuous_batching."


class Ending(Hook):
    """A hook whose ``after`` also runs when the call raised, with None as the result: it has hooks to take away."""

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        before, after = self.before, self.after
        assert before is not None and after is not None

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not emit.watched() or self.state == "off":
                return original(*args, **kwargs)
            token = result = None
            try:
                token = before(self, args, kwargs)
            except Exception:
                self.failed()
            try:
                result = original(*args, **kwargs)
            finally:
                try:
                    after(self, token, result, args, kwargs)
                except Exception:
                    self.failed()
            return result

        return wrapper


HOOKS: list[Hook] = [
    Ending(
        *(GENERATE, _GENERATION, "GenerationMixin.generate", "inputs"),
        before=generate.before,
        after=generate.after,
    ),
    Hook(
        *(GENERATE, "transformers.modeling_utils", "PreTrainedModel.get_compiled_call", ""),
        after=generate.after_compiled,
        replace=True,
    ),
    Hook(
        *(GENERATE, "transformers.cache_utils", "Cache.crop", ""),
        before=cache.before,
        after=cache.after_crop,
    ),
    Hook(
        *(GENERATE, "transformers.cache_utils", "Cache.reset", ""),
        before=cache.before,
        after=cache.after_reset,
    ),
    Hook(
        *(BATCHING, _CB + "continuous_api", "ContinuousBatchingManager.add_request", "max_new_tokens"),
        after=batch.after_add,
    ),
    Ending(
        *(BATCHING, _CB + "continuous_api", "ContinuousBatchProcessor._generation_step", "model"),
        before=batch.before_step,
        after=batch.after_step,
    ),
    Hook(
        *(BATCHING, _CB + "continuous_api", "ContinuousBatchProcessor.update_batch", ""),
        after=batch.after_update,
    ),
    Hook(
        *(BATCHING, _CB + "continuous_api", "OutputRouter.deliver", "output"),
        before=batch.before_deliver,
    ),
    Hook(
        *(BATCHING, _CB + "continuous_api", "OutputRouter.deliver_batch", "outputs"),
        before=batch.before_deliver,
    ),
    Hook(
        *(BATCHING, _CB + "input_outputs", "ContinuousBatchingIOs.prepare_batch_tensors"),
        "requests_in_batch",
        before=batch.before_prepare,
    ),
    Hook(
        *(BATCHING, _CB + "cache", "PagedAttentionCache.can_store_request_tokens", "state request_len"),
        after=batch.after_store,
    ),
    Hook(
        *(BATCHING, _CB + "cache", "PagedAttentionCache.evict_cached_blocks", ""),
        before=batch.before_evict,
        after=batch.after_evict,
    ),
    Hook(
        *(BATCHING, _CB + "offloading_manager", "OffloadingManager._offload_to_cpu", "victims"),
        before=batch.before_offload,
        after=batch.after_offload,
    ),
    Hook(
        *(BATCHING, _CB + "offloading_manager", "OffloadingManager.restore_scheduled_requests"),
        "requests_in_batch",
        before=batch.before_restore,
    ),
]

#: Models of which a Hello was sent since the last ``_again``.
_told: weakref.WeakSet[Any] = weakref.WeakSet()
#: Continuous batching's settings of a model.
_settings: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
_registered = False


def register() -> None:
    """Wrap what is imported already, and the rest when it is. May be called again."""
    global _registered
    if _registered:
        return
    _registered = True
    generate.on_model = tell
    batch.on_model = tell
    emit.on_watch(_again)
    for hook in HOOKS:
        hook.wait()


def _again() -> None:
    """Each model is told of again when it is next used."""
    _told.clear()
    batch.again()


def tell(model: Any, settings: dict[str, str] | None = None) -> None:
    """Send Hello of a model that is used, once for each watcher; ``settings`` are remembered."""
    if settings and _settings.get(model) != settings:
        _settings[model] = settings
        _told.discard(model)
    if model not in _told:
        _told.add(model)
        emit.emit(kinds.HELLO, hello(model))


def hello(model: Any) -> dict[str, Any]:
    """Return the body of Hello."""
    gone = {"missing", "off"}
    if _GENERATION in sys.modules:  # which imports all the others
        gone.add("waiting")
    lost = [hook.target for hook in HOOKS if hook.state in gone]
    body: dict[str, Any] = {
        "engine": "transformers",
        "version": str(getattr(sys.modules.get("transformers"), "__version__", "")),
        "role": "server",
        "model": describe(model),
    }
    if lost:
        body["state"], body["missing"] = "degraded", lost[:64]
    if model in _settings:
        body["config"] = _settings[model]
    return body


def describe(model: Any) -> dict[str, str]:
    """Return what a model's times depend on, as text; of a path only its last part."""
    config = getattr(model, "config", None)
    quantization = getattr(getattr(config, "quantization_config", None), "quant_method", None)
    found = {
        "name": str(getattr(config, "name_or_path", "") or "").rstrip("/").rpartition("/")[2],
        "architecture": type(model).__name__,
        "dtype": str(getattr(model, "dtype", "")).removeprefix("torch."),
        "quantization": str(getattr(quantization, "value", quantization) or ""),
        "attention": str(getattr(config, "_attn_implementation", "") or ""),
        "revision": str(getattr(config, "_commit_hash", "") or ""),
    }
    return {key: value[:128] for key, value in found.items() if value}
