"""Time per decoder layer and per attention/MLP block of one forward pass in N, in eager mode.

``WHYSPAN_LAYERS_EVERY=N`` (read once, default 0: off) samples the first pass watched and every N-th after it. Hooks
are put on the layers for the sampled pass only, so that an ordinary pass costs a counter. On CUDA the hooks record
events, which are read when the next pass is sampled: the device is never waited for. Where layers do not run as
Python calls (compiled, captured in a graph) a mark says so once; nothing is done to such a module.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from whyspan_inproc import emit, kinds
from whyspan_inproc.torch_layers_find import Part, compiled, find

#: Rows of one mark: with 10-digit times and 3-digit layers a row is at most 29 bytes, a body at most 8192.
MAX_ROWS: Final = 256
#: Models of one process that are remembered, in case that some cannot be weakly referenced.
MAX_MODELS: Final = 64
#: Samples in a row without a call of any layer, after which the layers are taken to run otherwise.
EMPTY: Final = 3


def every() -> int:
    """Return N of ``WHYSPAN_LAYERS_EVERY``; 0 where it is absent, negative or no number."""
    try:
        return max(0, int(os.environ.get("WHYSPAN_LAYERS_EVERY", "0")))
    except ValueError:
        return 0


EVERY: Final = every()

_models: weakref.WeakKeyDictionary[Any, _Sampler] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Sample:
    """One sampled pass: hooks are in place from its making to ``end``."""

    def __init__(self, sampler: _Sampler, module: Any, parts: list[Part], step: int) -> None:
        self._sampler = sampler
        self.thread = threading.get_ident()
        self._clock = _clock(module)
        self._handles: list[Any] = []
        self.step = step
        self.failed = False
        self.taken: list[tuple[int, str, Any, Any]] = []
        self.begin_ns = time.monotonic_ns()
        try:
            for part in parts:
                self._put(part)
        except BaseException:
            self.remove()
            raise

    def _put(self, part: Part) -> None:
        begun: list[Any] = []  # a module may be called twice in a pass, not within itself
        compiling = sys.modules[
            "torch"
        ].compiler.is_compiling  # a constant to Dynamo: it traces nothing of a hook

        def before(_module: Any, _args: Any) -> None:
            if compiling():
                return
            try:
                if threading.get_ident() == self.thread:
                    begun[:] = [self._clock()]
            except Exception:
                self.failed = True

        def after(_module: Any, _args: Any, _output: Any) -> None:
            if compiling():
                return
            try:
                if begun and threading.get_ident() == self.thread:
                    self.taken.append((part.layer, part.kind, begun.pop(), self._clock()))
            except Exception:
                self.failed = True

        self._handles.append(part.module.register_forward_pre_hook(before))
        self._handles.append(part.module.register_forward_hook(after))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end(self) -> None:
        """Take the hooks away and hand over what was measured."""
        try:
            self.remove()
        finally:
            self._sampler.done(self)

    def rows(self) -> list[tuple[int, str, int]] | None:
        """Return layer, kind and ns in order of layers; None while the device has not got that far."""
        if self.failed or not self.taken:
            return []
        if self._clock is time.perf_counter_ns:
            rows = [(layer, kind, end - begin) for layer, kind, begin, end in self.taken]
        else:
            if not self.taken[-1][3].query():
                return None
            # elapsed_time is in milliseconds
            rows = [(i, kind, round(b.elapsed_time(e) * 1e6)) for i, kind, b, e in self.taken]
        return sorted(rows, key=lambda row: (row[0], row[1] != "layer"))


class _Sampler:
    """Which passes of a model are sampled; the sample that waits for its device."""

    def __init__(self) -> None:
        self.count = 0
        self.running: Sample | None = None
        self.waiting: Sample | None = None
        self.told = ""
        self.empty = 0
        self.parts: list[Part] = []  # found once: a model is searched for milliseconds

    def begin(self, module: Any, step: int, reason: str) -> Sample | None:
        """Hook the layers for the pass that begins; None, and told why, where they cannot be seen or another
        thread's pass is being sampled.
        """
        with _lock:
            left = self.running
            if left is not None and left.thread != threading.get_ident():
                return None  # another thread's
            self.running = None
        try:
            if left is not None:  # its pass was left by an exception
                left.remove()
            self._read()
            why = reason or compiled(module) or _capturing()
            if not why and not self.parts:
                self.parts = find(module)
                why = "" if self.parts else "no decoder layers found"
            if not why:
                self.running = Sample(self, module, self.parts, step)
                return self.running
            self.tell(why)
        except Exception as e:
            self.tell(f"hooks: {type(e).__name__}")
        return None

    def done(self, sample: Sample) -> None:
        """Take over a sample whose pass is over."""
        if self.running is sample:
            self.running = None
        self.waiting = sample
        if sample.taken and sample.rows() is None:
            return  # a device's; read when the next pass is sampled
        self._read()

    def _read(self) -> None:
        sample, self.waiting = self.waiting, None
        if sample is None:
            return
        rows = sample.rows()
        if rows:
            self.empty = 0
            tell_rows(sample.begin_ns, sample.step, rows)
        elif rows is not None:
            self.empty += 1  # once may be a step without a forward pass
            self.parts = []  # or its layers were replaced
            if sample.failed or self.empty >= EMPTY:
                self.tell("captured in a graph" if _has_cuda() else "layers not called")

    def tell(self, reason: str) -> None:
        """Say once that there is nothing to be had."""
        if reason != self.told:
            self.told = reason
            emit.emit(kinds.LAYERS, {"available": False, "reason": reason})


def tell_rows(begin_ns: int, step: int, rows: list[tuple[int, str, int]]) -> None:
    """Send a pass's rows, in marks of at most ``MAX_ROWS`` with the same ``begin_ns`` and ``step``."""
    for i in range(0, len(rows), MAX_ROWS):
        emit.emit(kinds.LAYERS, {"begin_ns": begin_ns, "step": step, "rows": rows[i : i + MAX_ROWS]})


def begin(module: Any, step: int = 0, *, reason: str = "") -> Sample | None:
    """Begin a forward pass of ``module`` on the calling thread; None where it is not sampled, which is the rule.

    The caller calls ``end`` of what it gets when the pass is over or has failed. Never raises.

    Args:
        module: The model, a ``torch.nn.Module``.
        step: Number of the pass, for the mark.
        reason: Why the caller knows that layers cannot be had (``compiled``); empty where it does not know.
    """
    if not EVERY:
        return None
    try:
        sampler = _models.get(module)
        if sampler is None:
            sampler = install(module)
            if sampler is None:
                return None
        count = sampler.count
        if count % EVERY:
            sampler.count = count + 1
            return None
        if not emit.watched():
            return None  # the first pass that is watched is sampled
        sampler.count = count + 1
        return sampler.begin(module, step, reason)
    except Exception:
        return None


def install(module: Any) -> _Sampler | None:
    """Prepare a model for sampling; nothing is put on it. None where sampling is off."""
    if not EVERY:
        return None
    with _lock:
        sampler = _models.get(module)
        if sampler is None and len(_models) < MAX_MODELS:
            sampler = _models[module] = _Sampler()
        return sampler


@contextmanager
def around(module: Any, step: int = 0) -> Iterator[None]:
    """Hold a forward pass of ``module``; the same as ``begin`` and ``end``."""
    sample = begin(module, step)
    try:
        yield
    finally:
        if sample is not None:
            end(sample)


def end(sample: Sample) -> None:
    """End a sampled pass. Never raises."""
    try:
        sample.end()
    except Exception:
        pass


def _again() -> None:
    """A new watcher is told again why there is nothing."""
    for sampler in list(_models.values()):
        sampler.told = ""


def _clock(module: Any) -> Any:
    """Return what a hook calls to take the time: the host's clock, or an event of the module's CUDA device."""
    parameter = next(iter(module.parameters()), None)
    if parameter is None or parameter.device.type != "cuda":
        return time.perf_counter_ns
    cuda: Any = sys.modules["torch"].cuda

    def record() -> Any:
        if cuda.is_current_stream_capturing():  # an event would become part of the graph
            raise RuntimeError("captured in a graph")
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    return record


def _capturing() -> str:
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "captured in a graph"
    return ""


def _has_cuda() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def register() -> None:
    """Nothing is hooked here: ``begin`` is called by whoever runs passes. May be called again."""
    global _registered
    if EVERY and not _registered:
        _registered = True
        emit.on_watch(_again)


_registered = False
