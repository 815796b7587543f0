"""``generate`` of transformers and each forward pass inside it.

Eager passes are seen by two forward hooks, which are on the model only while a watched ``generate`` runs; Dynamo folds
them away, so they neither recompile nor show in a compiled graph. Passes through ``get_compiled_call`` are timed
around the compiled callable. A model under ``model.compile()`` shows only its whole calls.

Tokens are positions times sequences, padding included; ``cached`` likewise.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from whyspan_inproc import emit, kinds, torch_layers
from whyspan_inproc import transformers_hook_cache as cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from whyspan_inproc.hooks import Hook

#: Set by ``transformers_hook``: sends Hello of a model.
on_model: Callable[[Any, dict[str, str] | None], None] | None = None

_here = threading.local()
_lock = threading.Lock()


class Frame:
    """One call of ``generate`` on its thread, and the pass that is open in it."""

    def __init__(self, model: Any, prompt: int) -> None:
        self.model = model
        self.prompt = prompt  # positions of the prompt, 0 when not known
        self.begin_ns = time.monotonic_ns()
        self.passes = self.tokens = self.cached = 0
        self.batch = 1
        self.hooked = False
        self.caches = cache.Watched()
        self.open: Pass | None = None
        self.sample: torch_layers.Sample | None = None

    def begin(self, kwargs: dict[str, Any], reason: str = "") -> None:
        """A pass begins; one that is open was left by an exception."""
        self.drop()
        sequences, positions = shape(kwargs)
        held = kwargs.get("past_key_values")
        cached = self.caches.length(held)
        prefill = self.passes == 0 or 0 < cached < self.prompt
        if self.passes == 0:
            self.batch, self.cached = sequences, sequences * cached
        self.passes += 1
        self.open = Pass(time.monotonic_ns(), sequences, positions, cached, prefill, held)
        self.sample = torch_layers.begin(self.model, self.passes, reason=reason)

    def end(self) -> None:
        """The open pass is over."""
        now, self.open = self.open, None
        if self.sample is not None:
            torch_layers.end(self.sample)
            self.sample = None
        if now is None:
            return
        tokens = now.sequences * now.positions
        self.tokens += tokens
        body: dict[str, Any] = {
            "begin_ns": now.begin_ns,
            "tokens": tokens,
            "cached": now.sequences * now.cached,
            "batch": now.sequences,
        }
        if now.prefill:
            body["prefill"] = True
        emit.emit(kinds.GENERATED, body)
        self.caches.passed(now.held, now.cached, now.positions, now.sequences)

    def drop(self) -> None:
        """Forget the open pass."""
        self.open = None
        if self.sample is not None:
            torch_layers.end(self.sample)
            self.sample = None


class Pass(NamedTuple):
    """A forward pass in progress: positions of each sequence, and how many of each were cached before."""

    begin_ns: int
    sequences: int
    positions: int
    cached: int
    prefill: bool
    held: Any


def shape(kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return sequences and positions of a forward pass; (1, 0) where its inputs are of no known kind."""
    for name in ("decoder_input_ids", "input_ids", "decoder_inputs_embeds", "inputs_embeds"):
        found = getattr(kwargs.get(name), "shape", None)
        if found is not None and len(found) >= 2:
            return int(found[0]), int(found[1])
    return 1, 0


def before(hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
    """``generate`` is called."""
    model = args[0]
    inputs = hook.argument(args, kwargs, "inputs")
    if inputs is None:
        inputs = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
    found: Any = getattr(inputs, "shape", ())
    decoder_only = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    frame = Frame(model, int(found[1]) if decoder_only and len(found) >= 2 else 0)
    if found:
        frame.batch = int(found[0])
    if on_model is not None:
        on_model(model, None)
    _frames().append(frame)
    try:
        frame.hooked = _hooks.take(model)
    except Exception:
        hook.failed()  # the whole call is told all the same
    return frame


def after(_hook: Hook, frame: Frame | None, _result: Any, _args: Any, _kwargs: Any) -> None:
    """``generate`` has returned or raised."""
    if frame is None:
        return
    frames = _frames()
    if frame in frames:
        del frames[frames.index(frame) :]
    try:
        frame.drop()
    finally:
        unhook(frame)
    emit.emit(
        kinds.GENERATED,
        {
            "begin_ns": frame.begin_ns,
            "tokens": frame.tokens,
            "cached": frame.cached,
            "batch": frame.batch,
            "whole": True,
        },
    )


def unhook(frame: Frame) -> None:
    """Give a frame's hooks back."""
    if frame.hooked:
        frame.hooked = False
        _hooks.give(frame.model)


def after_compiled(_hook: Hook, _token: Any, compiled: Any, args: tuple[Any, ...], _kwargs: Any) -> Any:
    """``get_compiled_call`` returns: hand out its callable with the time taken around it, outside of what is compiled.

    As it is where no ``generate`` of this thread asks, or nothing is compiled: the forward hooks see that.
    """
    frame = _current()
    if frame is None or frame.model is not args[0] or getattr(compiled, "__self__", None) is args[0]:
        return compiled

    @functools.wraps(compiled)
    def timed(*args: Any, **kwargs: Any) -> Any:
        try:
            unhook(frame)  # the eager prefill is over, and what gets compiled shall see no hook
            frame.begin(kwargs, "compiled")
        except Exception:
            pass
        result = compiled(*args, **kwargs)
        try:
            frame.end()
        except Exception:
            pass
        return result

    return timed


def _frames() -> list[Frame]:
    try:
        frames: list[Frame] = _here.frames
    except AttributeError:
        frames = _here.frames = []
    return frames


def _current() -> Frame | None:
    frames = _frames()
    return frames[-1] if frames else None


class _Hooks:
    """Forward hooks on models, counted: several threads may generate with one model."""

    def __init__(self) -> None:
        self._on: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def take(self, model: Any) -> bool:
        """Hook a model, or count one more that uses its hooks."""
        with _lock:
            held = self._on.get(model)
            if held is not None:
                held[0] += 1
                return True
            compiling = sys.modules["torch"].compiler.is_compiling  # Dynamo takes it for a constant

            def begins(module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
                if compiling():
                    return
                try:
                    frame = _current()
                    if frame is not None and frame.model is module and frame.hooked:
                        frame.begin(kwargs)
                except Exception:
                    pass

            def ends(module: Any, _args: Any, _output: Any) -> None:
                if compiling():
                    return
                try:
                    frame = _current()
                    if frame is not None and frame.model is module and frame.hooked:
                        frame.end()
                except Exception:
                    pass

            first = model.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
            try:
                last = model.register_forward_hook(ends)
            except BaseException:
                first.remove()
                raise
            self._on[model] = [1, first, last]
            return True

    def give(self, model: Any) -> None:
        """Count one less; take the hooks away with the last."""
        with _lock:
            held = self._on.get(model)
            if held is None:
                return
            held[0] -= 1
            if held[0] <= 0:
                del self._on[model]
                held[1].remove()
                held[2].remove()


_hooks = _Hooks()
