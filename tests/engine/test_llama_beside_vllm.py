"""Two engines at once: vLLM with its marks, and llama.cpp in PID and mount namespaces of its own, by uprobes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from whyspan.config import Target, Targets
from whyspan.discovery import Discovery
from whyspan.marks import Hello, Mark, Step
from whyspan.pipeline.source import LiveSource
from whyspan_probes.registry import discover
from whyspan_probes.schema import EVENT, Events
from whyspan_probes.state import FileState

from tests.bench.ports import free_port
from tests.bpf.waiting import until
from tests.engine import inproc, llama, llama_install, vllm
from tests.engine.conftest import OTHER_CPU, WORKER_CPU

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

REQUESTS, TOKENS = 11, 7


class Seen(NamedTuple):
    """Both engines, and what was seen of them while both served."""

    vllm: vllm.Server
    llama: llama.Server
    source: LiveSource
    marks: list[Mark]
    events: Events
    lost: dict[str, int]
    truth: list[llama.Truth]
    files: list[FileState]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    if not llama_install.installed():
        pytest.skip("llama.cpp is not installed: `python -m tests.engine.llama_install` does it")
    folder = tmp_path_factory.mktemp("two")
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "vllm.log").open("wb"))
        one = vllm.start(free_port(), env=inproc.environment(), stdout=log, stderr=log)
        stack.callback(one.stop)
        one.wait_ready()
        one.pin({WORKER_CPU}, {OTHER_CPU})
        other = llama.Server(folder, free_port(), boxed=True, cpus={OTHER_CPU})
        stack.callback(other.stop)
        targets = Targets(auto=False, match=(Target(pid=one.pid), Target(pid=other.tgid)))
        probes = [f for f in discover() if f.probe.name in ("marker", "llama", "sched")]
        source = LiveSource(probes, Discovery(targets), ring_bytes=8 << 20, header_allow=[])
        stack.callback(source.close)
        already, marks, events, lost = len(other.truth()), [], [np.empty(0, EVENT)], {}

        def take() -> None:
            batch = source.drain()
            marks.extend(batch.marks)
            events.append(batch.events)
            lost.update(batch.lost)

        with ThreadPoolExecutor(2) as pool:
            work: list[Any] = [
                pool.submit(lambda: [one.complete(40 + n, TOKENS) for n in range(REQUESTS)]),
                pool.submit(lambda: [other.complete(chr(65 + n) * 50, TOKENS) for n in range(REQUESTS)]),
            ]
            while not all(w.done() for w in work):
                source.wait(0.1)
                take()
            assert work[0].result() == [200] * REQUESTS
            # A few more where the last byte begins a character: llama.cpp's server completes it.
            assert all(a.completion_tokens >= TOKENS for a in work[1].result())
        take()
        files = [f for p in source.session.probes for f in p.state.files]
        yield Seen(one, other, source, marks, np.concatenate(events), lost, other.truth()[already:], files)


def test_each_file_is_hooked_where_its_process_has_it(seen: Seen) -> None:
    (marker,) = (f for f in seen.files if f.hook == "mark")
    assert (marker.state, marker.reason) == ("attached", "")
    assert {seen.vllm.pid, seen.vllm.engine_core, seen.vllm.worker} <= set(marker.processes)
    assert seen.llama.tgid not in marker.processes
    libraries = {Path(f.path) for f in seen.files if f.hook != "mark"}
    assert {p.name.split(".")[0] for p in libraries} == {"libllama", "libggml-base", "libggml-cpu"}
    for path in libraries:  # a path that means nothing to us
        assert path.is_relative_to(llama.INSIDE)
        assert not path.exists()
    assert {f.state for f in seen.files} == {"attached"}
    assert all(f.processes == [seen.llama.tgid] for f in seen.files if f.hook != "mark")


def test_it_really_is_in_namespaces_of_its_own(seen: Seen) -> None:
    for name in ("pid", "mnt"):
        assert (
            Path(f"/proc/{seen.llama.tgid}/ns/{name}").readlink() != Path(f"/proc/self/ns/{name}").readlink()
        )
    status = Path(f"/proc/{seen.llama.tgid}/status").read_text()
    assert f"NSpid:\t{seen.llama.tgid}\t1\n" in status


def test_both_are_heard_and_neither_is_taken_for_the_other(seen: Seen) -> None:
    steps = seen.source.schema.select(seen.events, "llama_step")
    calls = [t for t in seen.truth if t.call == "llama_decode"]
    assert len(steps) == len(calls) > REQUESTS * (TOKENS - 1)
    assert steps["tokens"].tolist() == [c.tokens for c in calls]
    assert set(steps["tgid"].tolist()) == {seen.llama.tgid}
    assert all(c.begin_ns < s["begin_ns"] < s["ts_ns"] < c.end_ns for s, c in zip(steps, calls, strict=True))
    roles = {m.tgid: m.body.role for m in seen.marks if isinstance(m.body, Hello)}
    assert roles[seen.vllm.pid] == "frontend"
    assert roles[seen.vllm.engine_core] == "core"
    made = [m for m in seen.marks if isinstance(m.body, Step)]
    assert {m.tgid for m in made} == {seen.vllm.engine_core}
    bodies = [m.body for m in made if isinstance(m.body, Step)]
    assert len([b for b in bodies if b.decodes or b.others]) >= REQUESTS * TOKENS
    assert seen.lost.keys() & {"mark", "bad_mark", "llama_step", "llama_step_start"} == set()


def test_the_end_of_one_leaves_the_other_hooked(seen: Seen) -> None:
    psutil.Process(seen.llama.tgid).send_signal(signal.SIGKILL)

    def files() -> set[str]:
        seen.source.drain()
        return {f.hook for p in seen.source.session.probes for f in p.state.files}

    until(lambda: files() == {"mark"}, "llama.cpp's hooks are gone", every_s=0.1)
    states = {p.state.name: p.state.state for p in seen.source.session.probes}
    assert (states["llama"], states["marker"]) == ("waiting", "attached")
    assert seen.vllm.complete(40, TOKENS) == 200
    assert [m for m in seen.source.drain().marks if isinstance(m.body, Step)]
