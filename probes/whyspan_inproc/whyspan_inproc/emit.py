"""Send a mark: a number and a small JSON object, to whoever watches the marker. Nothing here ever raises.

Not watched, ``watched`` and ``emit`` cost one call into C. Watched, a body is encoded and shown to the marker's
uprobe; what is too long or cannot be encoded is dropped and counted in ``dropped``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Bytes of a body: ``whyspan.marks.MAX_BODY``.
MAX_BODY = 8192
#: ``on_watch`` callables run again this long after they last ran: a watcher may have gone and another come while
#: the process was idle, which the counter of watchers does not tell.
AGAIN_NS = 10_000_000_000

now_ns = time.monotonic_ns
#: Times that watching began: what was kept from before another value is out of date.
session = 0
#: Why bodies were not sent, and how many.
dropped = {"long": 0, "failed": 0}

try:
    from whyspan_inproc import _marker

    available = True
except ImportError:  # no extension for this platform: never watched
    available = False


def _no_mark(_kind: int, _payload: bytes) -> None:
    return None


_mark: Callable[[int, bytes], None] = _marker.mark if available else _no_mark
_watchers: Callable[[], int] = _marker.watchers if available else int


def _encoder() -> Callable[[Any], str]:
    """Return what makes compact JSON: CPython's C encoder, made once where the json module makes it per call."""
    plain = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False)
    try:
        make = json.encoder.c_make_encoder  # type: ignore[attr-defined]
        escape = json.encoder.encode_basestring_ascii
        quick = make(None, plain.default, escape, None, ":", ",", False, False, False)

        def encode(value: Any) -> str:
            return "".join(quick(value, 0))

        if encode({"a": [1, "\u00e9", (2.5, None, True)]}) == '{"a":[1,"\\u00e9",[2.5,null,true]]}':
            return encode
    except Exception:
        pass
    return plain.encode


_encode = _encoder()
_callables: list[Callable[[], None]] = []
_known = 0  # watchers when the callables last ran
_again_ns = 0


def watched() -> bool:
    """Return whether somebody watches now; run the ``on_watch`` callables if that is new."""
    global _known
    count = _watchers()
    if not count:
        _known = 0
        return False
    if count != _known or now_ns() > _again_ns:
        _begin(count)
    return True


def emit(kind: int, body: Mapping[str, Any]) -> None:
    """Send a mark if somebody watches.

    Args:
        kind: One of ``whyspan_inproc.kinds``.
        body: The fields of that kind in ``whyspan.marks``, those at their default left out.
    """
    if not watched():
        return
    try:
        payload = _encode(body).encode("ascii")
        if len(payload) > MAX_BODY:
            dropped["long"] += 1
        else:
            _mark(kind, payload)
    except Exception:
        dropped["failed"] += 1


def on_watch(call: Callable[[], None]) -> None:
    """Have ``call`` run, in the thread that emits, when watching begins and then every ten seconds of activity.

    It introduces the process to each new watcher; what it raises is dropped and counted.
    """
    global _again_ns
    _callables.append(call)
    _again_ns = 0


def changed() -> None:
    """Have the ``on_watch`` callables run at the next opportunity: what they tell has changed."""
    global _again_ns
    _again_ns = 0


def _begin(count: int) -> None:
    global _known, _again_ns, session
    if not _known:
        session += 1
    _known, _again_ns = count, now_ns() + AGAIN_NS  # first: the callables emit
    for call in tuple(_callables):
        try:
            call()
        except Exception:
            dropped["failed"] += 1


def _forked() -> None:
    global _known
    _known = 0


os.register_at_fork(after_in_child=_forked)
