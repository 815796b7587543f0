"""The processor in a real OpenTelemetry SDK, each time in a process of its own: a provider is set only once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from whyspan import marks
from whyspan_inproc import span_processor

from tests.unit.inproc.conftest import PACKAGE, Caught

BEFORE = """
import asyncio, json, sys
from whyspan_inproc import auto, emit
sent = []
emit._mark = lambda kind, payload: sent.append([kind, payload.decode()])
emit._watchers = lambda: 1
"""
PROVIDER = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
provider = TracerProvider()
trace.set_tracer_provider(provider)
"""
WORK = """
tracer = trace.get_tracer("test")
true = []

def note(span, parent=None):
    c = span.get_span_context()
    true.append([format(c.trace_id, "032x"), format(c.span_id, "016x")])

with tracer.start_as_current_span("outer " + "x" * 300) as outer:
    note(outer)

async def one(i):
    with tracer.start_as_current_span(f"task {i}") as span:
        note(span)
        await asyncio.sleep(0)
        with tracer.start_as_current_span(f"inner {i}"):
            pass

async def both():
    await asyncio.gather(one(1), one(2))

asyncio.run(both())
print(json.dumps({"sent": sent, "true": true, "failed": auto.failed}))
"""


def run(script: str, **env: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(PACKAGE), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    "script",
    [
        BEFORE + "auto.load()" + PROVIDER + WORK,
        BEFORE + PROVIDER + "auto.load()" + WORK,
        BEFORE + "auto.load(); auto.load()" + PROVIDER + "auto.load()" + WORK,
    ],
    ids=["loaded first", "provider first", "loaded thrice"],
)
def test_every_span_is_told_once_at_both_ends(script: str) -> None:
    result = run(script)
    assert result["failed"] == {}
    spans = [
        m.body
        for kind, payload in result["sent"]
        for m in [marks.decode(kind, payload.encode(), ts_ns=1 << 61, tid=1, tgid=1)]
        if isinstance(m.body, marks.SpanOn)
    ]
    assert len(spans) == 10  # five, both ends
    starts = {s.span_id: s for s in spans if not s.end}
    ends = {s.span_id: s for s in spans if s.end}
    assert starts.keys() == ends.keys() and len(starts) == 5
    assert {(t, s) for t, s in result["true"]} <= {(s.trace_id, s.span_id) for s in spans}
    by_name = {s.name: s for s in starts.values()}
    assert by_name["outer " + "x" * 122].task == 0
    tasks = [by_name[f"task {i}"].task for i in (1, 2)]
    assert tasks[0] and tasks[1] and tasks[0] != tasks[1]
    for i in (1, 2):
        assert by_name[f"inner {i}"].parent_id == by_name[f"task {i}"].span_id
        assert by_name[f"inner {i}"].task == by_name[f"task {i}"].task


def test_off_adds_no_processor() -> None:
    result = run(BEFORE + "auto.load()" + PROVIDER + WORK, WHYSPAN_INPROC="0")
    assert result["sent"] == []


def test_strange_span_does_not_raise(caught: Caught) -> None:
    processor = span_processor.MarkingSpanProcessor()
    processor.on_start(object())
    processor.on_end(None)
    assert not caught.sent
    assert processor.force_flush() is True
    processor.shutdown()  # type: ignore[no-untyped-call, unused-ignore]


def test_task_number_outside_a_loop() -> None:
    assert span_processor.task_number() == 0
