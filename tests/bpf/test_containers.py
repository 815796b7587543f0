"""A server in namespaces and a control group of its own, as container runtimes make them; see also tests/engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from whyspan.listening import listens
from whyspan_probes.libraries import State, executable, find

from tests.bpf.box import Box, Group
from tests.bpf.boxed import REQUESTS, Observed, observe, trace_id
from tests.bpf.child import Child
from tests.bpf.conftest import Spawn
from tests.bpf.daemon import Daemon
from tests.bpf.waiting import until
from tests.demo.cgroups import CpuGroup

pytestmark = pytest.mark.bpf

ID, HOGS = "5d" * 32, "a7" * 32


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Box, Observed]]:
    folder = tmp_path_factory.mktemp("box")
    group = Group(f"/docker/{ID}")
    box: Box | None = None
    try:
        box = Box(folder, group)
        yield box, observe(folder, box)
    finally:
        if box:
            box.kill()
        group.remove()


def test_every_request_is_found_under_its_trace_id(seen: tuple[Box, Observed]) -> None:
    box, observed = seen
    assert set(observed.answered) == {trace_id(n) for n in range(REQUESTS)}
    for finding in observed.answered.values():
        r = finding.request
        assert (r.trace_id_source, r.status, r.tgid) == ("traceparent", 200, box.tgid)
        assert sum(s.end_ns - s.start_ns for s in finding.segments) == finding.wall_ns


def test_who_served_it_is_known_inside_and_outside(seen: tuple[Box, Observed]) -> None:
    box, observed = seen
    assert box.said["pid"] == 1
    p = observed.process
    assert (p.tgid, p.vpid, p.comm, p.service) == (box.tgid, 1, "box-main", "box-main")
    assert p.exe == Path(os.path.realpath(sys.executable)).name
    assert (p.cgroup, p.container_id, p.pod_uid) == (f"/docker/{ID}", ID, "")
    assert all(f.process == p for f in observed.answered.values())
    assert "box-worker" in observed.threads.values()
    served = {s.thread for f in observed.answered.values() for s in f.segments if s.tgid == box.tgid}
    assert "box-worker" in served


def test_explain_says_where(seen: tuple[Box, Observed]) -> None:
    box, observed = seen
    assert f"container {ID[:12]}, process box-main {box.tgid} (1 inside)" in observed.explained.splitlines()


def test_doctor_says_where_and_what_is_mapped(seen: tuple[Box, Observed]) -> None:
    box, observed = seen
    (server,) = (s for s in json.loads(observed.doctor)["engines"] if s["tgid"] == box.tgid)
    assert (server["vpid"], server["container_id"], server["maps"]) == (1, ID, "")
    names = [lib["path"].rpartition("/")[2] for lib in server["libraries"] if lib["state"] == ""]
    assert names[0] == Path(os.path.realpath(sys.executable)).name
    assert "libc.so.6" in names


def test_the_log_that_it_waited_for_has_its_path(seen: tuple[Box, Observed]) -> None:
    box, observed = seen
    assert box.log in {f.path for f in observed.files}


def test_the_end_of_the_box_ends_its_requests(seen: tuple[Box, Observed]) -> None:
    _, observed = seen
    (finding,) = observed.killed.values()
    assert finding.request.trace_id == trace_id(REQUESTS)
    assert finding.request.status == 0
    assert finding.process == observed.process


def test_a_culprit_in_another_container_is_placed(tmp_path: Path) -> None:
    ours, theirs = Group(f"/docker/{ID}"), Group(f"/kubepods/besteffort/pod{'c4' * 16}/{HOGS}")
    box: Box | None = None
    hog: Child | None = None
    daemon: Daemon | None = None
    try:
        box = Box(tmp_path, ours, cpu=1)
        hog = Child("burn", 600, 1, "hog-under-test", cpu=1, before=theirs.join)
        daemon = Daemon(tmp_path, box.tgid)
        daemon.wait_ready()
        hog.say()
        client = box.connect()
        for _ in range(7):
            box.get("/spin/0.05", {}, client)
        until(lambda: len(daemon.findings()) == 7, "all requests are stored", every_s=0.3)
        verdicts = [f["verdict"] for f in daemon.findings()]
        named = [v["culprit"] for v in verdicts if v["cause"] == "cpu.runqueue"]
        assert len(named) >= 6, verdicts
        for culprit in named:
            assert (culprit["name"], culprit["tgid"]) == ("hog-under-test", hog.tgid)
            assert culprit["detail"] == f"in container {HOGS[:12]}"
        shown = daemon.output("explain", daemon.findings()[0]["trace_id"])
        assert f"process hog-under-test ({hog.tgid}), in container {HOGS[:12]}." in shown
    finally:
        if daemon:
            daemon.kill()
        if hog:
            hog.kill()
        if box:
            box.kill()
        theirs.remove()
        ours.remove()


def test_what_it_listens_on_and_maps_is_seen_from_outside(tmp_path: Path) -> None:
    group = Group(f"/docker/{ID}")
    box: Box | None = None
    try:
        box = Box(tmp_path, group)
        assert listens(box.tgid)  # its loopback is not ours
        program = executable(box.tgid)
        assert os.path.samefile(program.open_path, os.path.realpath(sys.executable))
        (libc,) = find(box.tgid, re.compile(r"/libc[.-]"))
        assert libc.state is State.OK
    finally:
        if box:
            box.kill()
        group.remove()


#: What an agent in a container sees of its neighbour, whose number it is given; "join" has it do as the daemon does.
LOOK = """
import json, os, sys
from whyspan import cgroups, hostfacts
joined = cgroups.join_host_namespace() if sys.argv[2] == "join" else None
fact = hostfacts.process_fact(int(sys.argv[1]), "svc")
quotas = hostfacts.cgroup_facts(fact.cgroup, cgroups.mounts())
own = hostfacts.process_fact(os.getpid(), "me")
print(json.dumps([joined, fact.cgroup, fact.container_id, own.cgroup, [[q.path, q.quota_us] for q in quotas]]))
"""


@pytest.mark.parametrize("how", ["join", "stay"])
def test_an_agent_in_a_cgroup_namespace_knows_its_neighbours(how: str, spawn: Spawn) -> None:
    agents, theirs = CpuGroup(HOGS), CpuGroup(ID)
    try:
        theirs.set_quota(0.5)
        child = spawn("sleeps", 1, before=theirs.join)
        done = subprocess.run(
            ["unshare", "--cgroup", sys.executable, "-c", LOOK, str(child.tgid), how],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=agents.join,
        )
        assert done.returncode == 0, done.stderr
        joined, path, container, own, quotas = json.loads(done.stdout)
        assert container == ID
        if how == "join":
            assert (joined, path, own) == (True, theirs.path, agents.path)
            assert [theirs.path, 50_000] in quotas
        else:
            assert (path, own) == (f"/../{ID}", "/")
            assert all(quota == 0 for _, quota in quotas)  # not known, and none made up
        child.kill()
    finally:
        theirs.remove()
        agents.remove()
