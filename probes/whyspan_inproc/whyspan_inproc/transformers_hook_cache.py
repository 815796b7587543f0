"""The caches of ``generate``: their length without waiting for a device, what crop, reset and windows remove.

A static cache counts in a tensor. Where that lies on a device its value is not read: the length is what the passes
and resets that were seen make it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from whyspan_inproc import emit, kinds

if TYPE_CHECKING:
    from whyspan_inproc.hooks import Hook

#: Lengths of caches that count on a device, as far as passes were seen.
_counted: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


_session = 0


def _counts() -> weakref.WeakKeyDictionary[Any, int]:
    """Return what was counted since watching began: before, passes went by unseen."""
    global _session
    if _session != emit.session:
        _session = emit.session
        _counted.clear()
    return _counted


def length(cache: Any) -> int | None:
    """Return the positions in a cache; None where only the device knows."""
    try:
        found = cache.get_seq_length()
    except (ValueError, AttributeError, NotImplementedError):  # such as linear attention: has no positions
        return 0
    if isinstance(found, int):
        return found
    device = getattr(getattr(found, "device", None), "type", "")
    return int(found) if device == "cpu" else None


def sequences(cache: Any) -> int:
    """Return the sequences in a cache; 1 where it is empty."""
    for layer in _layers(cache):
        keys = getattr(layer, "keys", None)
        if keys is not None and len(getattr(keys, "shape", ())) == 4:
            return int(keys.shape[0])
    return 1


def _layers(cache: Any) -> Any:
    return getattr(getattr(cache, "self_attention_cache", cache), "layers", ())


def _window(cache: Any) -> tuple[Any, int] | None:
    """Return the first layer with a sliding window and the positions it keeps."""
    for layer in _layers(cache):
        if getattr(layer, "is_sliding", False) is True:
            if hasattr(layer, "cumulative_length_int"):  # static: keeps a whole window
                return layer, int(layer.max_cache_len)
            # dynamic: keeps one position less, for the next one is added before attention
            return layer, int(layer.sliding_window) - 1
    return None


class Watched:
    """The caches of one call of ``generate``."""

    def __init__(self) -> None:
        self._cache: Any = None
        self._keeps: int | None = None
        self._offloading = False

    def length(self, cache: Any) -> int:
        """Return the positions in the cache of a pass before it; 0 without one."""
        if cache is None:
            return 0
        found = length(cache)
        return _counts().get(cache, 0) if found is None else found

    def passed(self, cache: Any, before: int, positions: int, batch: int) -> None:
        """A pass has added ``positions`` to a cache that had ``before``, of each of ``batch`` sequences."""
        if cache is None:
            return
        if cache is not self._cache:
            self._cache, window = cache, _window(cache)
            self._keeps = None if window is None else window[1]
            if getattr(cache, "offloading", False) is True:
                emit.emit(kinds.CACHE_CHANGED, {"op": "offloaded", "tokens": batch * (before + positions)})
            if getattr(_first(cache), "is_compileable", False) is True:  # static
                _counts()[cache] = before + positions
        elif cache in _counted:
            _counts()[cache] = before + positions
        keeps = self._keeps
        if keeps is not None and before + positions > keeps:
            removed = before + positions - max(before, keeps)
            emit.emit(
                kinds.CACHE_CHANGED, {"op": "evicted", "tokens": batch * keeps, "removed": batch * removed}
            )


def _first(cache: Any) -> Any:
    return next(iter(_layers(cache)), None)


def before(_hook: Hook, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[int, int]:
    """``crop`` or ``reset`` is called: return positions and sequences."""
    cache = args[0]
    found = length(cache)
    return _counts().get(cache, 0) if found is None else found, sequences(cache)


def after_crop(
    _hook: Hook, token: tuple[int, int] | None, _result: Any, args: tuple[Any, ...], _kwargs: Any
) -> None:
    """``crop`` has returned; one that took nothing is not told."""
    left = length(args[0])
    if token is None or left is None or left >= token[0]:
        return
    had, batch = token
    emit.emit(kinds.CACHE_CHANGED, {"op": "cropped", "tokens": batch * left, "removed": batch * (had - left)})


def after_reset(
    _hook: Hook, token: tuple[int, int] | None, _result: Any, args: tuple[Any, ...], _kwargs: Any
) -> None:
    """``reset`` has returned."""
    if args[0] in _counts():
        _counts()[args[0]] = 0
    had, batch = token or (0, 0)
    emit.emit(kinds.CACHE_CHANGED, {"op": "reset", "removed": batch * had})
