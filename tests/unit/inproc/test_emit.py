"""Marks are sent when watched, never raise, and introduce the process to each new watcher."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from whyspan import marks
from whyspan_inproc import _marker, emit, kinds

from tests.unit.inproc.conftest import PACKAGE, Caught


def test_kinds_are_the_agents() -> None:
    ours = {name: value for name, value in vars(kinds).items() if name.isupper()}
    theirs = {kind: body.__name__ for kind, body in marks.KINDS.items()}
    assert {value: name.title().replace("_", "") for name, value in ours.items()} == theirs


def test_bound_is_the_agents_and_the_markers() -> None:
    assert emit.MAX_BODY == marks.MAX_BODY == _marker.MAX_PAYLOAD


def test_json_is_compact_ascii(caught: Caught) -> None:
    emit.emit(kinds.STAGE, {"name": "adapter", "begin_ns": 1, "what": "b\u00e4r"})
    assert caught.sent == [(11, b'{"name":"adapter","begin_ns":1,"what":"b\\u00e4r"}')]
    (body,) = caught.bodies()
    assert body == marks.Stage(name="adapter", begin_ns=(1 << 61) - marks.MAX_SPAN_NS, what="b\u00e4r")


def test_nothing_is_encoded_unwatched(caught: Caught, monkeypatch: pytest.MonkeyPatch) -> None:
    caught.watchers = 0
    monkeypatch.setattr(emit, "_encode", pytest.fail)
    emit.emit(kinds.STAGE, {"name": "ready", "begin_ns": 1})
    assert not caught.sent and emit.dropped == {"long": 0, "failed": 0}


def test_too_long_is_dropped_and_counted(caught: Caught) -> None:
    around = len(b'{"x":""}')
    emit.emit(1, {"x": "y" * (emit.MAX_BODY - around)})
    emit.emit(1, {"x": "y" * (emit.MAX_BODY - around + 1)})
    assert [len(p) for _, p in caught.sent] == [emit.MAX_BODY]
    assert emit.dropped == {"long": 1, "failed": 0}


class _Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("mine")


def _circle() -> dict[str, Any]:
    circle: dict[str, Any] = {}
    circle["again"] = circle
    return circle


@pytest.mark.parametrize(
    "body",
    [
        {"x": object()},
        {"x": {1, 2}},
        {"x": b"bytes"},
        {"x": _Hostile()},
        {"x": float("nan")},
        {("a", "tuple"): 1},
        _circle(),
    ],
)
def test_what_cannot_be_encoded_is_dropped_and_counted(caught: Caught, body: dict[str, Any]) -> None:
    emit.emit(1, body)
    assert not caught.sent
    assert emit.dropped == {"long": 0, "failed": 1}


def test_lone_surrogate_does_not_fail_the_host(caught: Caught) -> None:
    emit.emit(kinds.STAGE, {"name": "x", "begin_ns": 1, "what": "\ud800"})
    with pytest.raises(marks.BadMarkError):
        caught.bodies()


def test_marker_that_raises_is_counted(caught: Caught, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_kind: int, _payload: bytes) -> None:
        raise OSError("gone")

    monkeypatch.setattr(emit, "_mark", broken)
    emit.emit(1, {})
    assert emit.dropped["failed"] == 1


def test_each_new_watcher_is_greeted(caught: Caught, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_000]
    monkeypatch.setattr(emit, "now_ns", lambda: clock[0])
    emit.on_watch(lambda: emit.emit(kinds.HELLO, {"engine": "test"}))
    sessions = emit.session

    def greeted() -> int:
        emit.emit(kinds.STAGE, {"name": "ready", "begin_ns": 1})
        hellos = [k for k, _ in caught.sent].count(kinds.HELLO)
        assert caught.sent[-1][0] == kinds.STAGE  # the introduction comes first
        caught.sent.clear()
        return hellos

    assert greeted() == 1
    assert greeted() == 0
    caught.watchers = 2  # a second one
    assert greeted() == 1
    clock[0] += emit.AGAIN_NS  # one may have gone and another come, unseen
    assert greeted() == 0
    clock[0] += 1
    assert greeted() == 1
    assert emit.session == sessions + 1
    caught.watchers = 0
    assert not emit.watched()
    caught.watchers = 2
    assert greeted() == 1
    assert emit.session == sessions + 2
    emit.changed()
    assert greeted() == 1


def test_greeting_that_raises_is_counted_and_others_go_on(caught: Caught) -> None:
    def broken() -> None:
        raise RuntimeError("mine")

    emit.on_watch(broken)
    emit.on_watch(lambda: emit.emit(kinds.HELLO, {"engine": "test"}))
    emit.emit(kinds.STAGE, {"name": "ready", "begin_ns": 1})
    assert [k for k, _ in caught.sent] == [kinds.HELLO, kinds.STAGE]
    assert emit.dropped["failed"] == 1


def test_child_greets_anew(caught: Caught) -> None:
    emit.on_watch(lambda: emit.emit(kinds.HELLO, {"engine": "test"}))
    assert emit.watched()
    caught.sent.clear()
    child = os.fork()
    if not child:
        emit.watched()
        os._exit(0 if [k for k, _ in caught.sent] == [kinds.HELLO] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_real_marker_is_wired(tmp_path: Path) -> None:
    # A copy, so that no uprobe of another test changes the counter.
    shutil.copytree(PACKAGE / "whyspan_inproc", tmp_path / "whyspan_inproc")
    script = """
import ctypes
from whyspan_inproc import _marker, emit
counter = ctypes.c_ushort.in_dll(ctypes.CDLL(_marker.__file__), "whyspan_mark_v1_semaphore")
assert emit.available and emit._mark is _marker.mark
assert not emit.watched()
counter.value = 1
assert emit.watched()
emit.emit(11, {"name": "ready", "begin_ns": 1})
counter.value = 0
assert not emit.watched()
assert emit.dropped == {"long": 0, "failed": 0}
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=60)


def test_without_the_extension_nobody_ever_watches(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("*.so")
    shutil.copytree(PACKAGE / "whyspan_inproc", tmp_path / "whyspan_inproc", ignore=ignore)
    script = """
from whyspan_inproc import auto, emit
auto.load()
assert not emit.available and not emit.watched() and auto.failed == {}
emit.emit(11, {"name": "ready", "begin_ns": 1})
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=60)
