"""A server in a container's file system: an overlay of another Debian release, with another C library and Python."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from whyspan_probes.libraries import Library, State, build_id, executable, find

from tests import roots
from tests.bpf.box import Box, Group
from tests.bpf.boxed import REQUESTS, Observed, observe, trace_id
from tests.conftest import required_tiers

pytestmark = pytest.mark.bpf  # needs root; a root folder is made here, no inference server is needed

SUITE, PYTHON, GLIBC = "trixie", [3, 13], "glibc 2.41"
ID, UID = "e7" * 32, "2c48913c-b29f-11e7-9350-020968147796"
POD = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice"


@pytest.fixture(scope="module")
def root() -> Path:
    """The root folder; made now if it is not cached."""
    try:
        return roots.root(SUITE)
    except roots.RootsError as e:
        if "engine" in required_tiers(os.environ.get("WHYSPAN_REQUIRE")):
            pytest.fail(str(e), pytrace=False)
        pytest.skip(str(e))


class Seen(Observed):
    """Observed, with what was looked up while it lived."""

    box: Box
    libc: Library
    program: Library


@pytest.fixture(scope="module")
def seen(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("box")
    group = Group(f"{POD}/cri-containerd-{ID}.scope")
    box: Box | None = None
    try:
        box = Box(folder, group, root=root, python="/usr/bin/python3")
        (libc,) = find(box.tgid, re.compile(r"/libc[.-]"))
        program = executable(box.tgid)
        observed = Seen(*observe(folder, box))
        observed.box, observed.libc, observed.program = box, libc, program
        yield observed
    finally:
        if box:
            box.kill()
        group.remove()


def test_it_really_is_another_system(seen: Seen) -> None:
    assert (seen.box.said["python"], seen.box.said["libc"], seen.box.said["pid"]) == (PYTHON, GLIBC, 1)


def test_every_request_is_found_under_its_trace_id(seen: Seen) -> None:
    assert set(seen.answered) == {trace_id(n) for n in range(REQUESTS)}
    for finding in seen.answered.values():
        assert (finding.request.status, finding.request.tgid) == (200, seen.box.tgid)
        assert sum(s.end_ns - s.start_ns for s in finding.segments) == finding.wall_ns
    served = {s.thread for f in seen.answered.values() for s in f.segments if s.tgid == seen.box.tgid}
    assert "box-worker" in served
    assert "box-worker" in seen.threads.values()


def test_who_served_it(seen: Seen) -> None:
    p = seen.process
    assert (p.tgid, p.vpid, p.comm, p.exe) == (seen.box.tgid, 1, "box-main", "python3.13")
    assert (p.container_id, p.pod_uid) == (ID, UID)
    assert p.cgroup == f"{POD}/cri-containerd-{ID}.scope"
    header = f"container {ID[:12]}, pod {UID}, process box-main {p.tgid} (1 inside)"
    assert header in seen.explained.splitlines()


def test_its_own_c_library_is_found_not_ours(seen: Seen, root: Path) -> None:
    with (root / "usr/lib/x86_64-linux-gnu/libc.so.6").resolve().open("rb") as f:
        expected = build_id(f)
    assert (seen.libc.state, seen.libc.deleted) == (State.OK, False)
    assert seen.libc.path == "/usr/lib/x86_64-linux-gnu/libc.so.6"
    assert seen.libc.build_id == expected != ""
    ours = Path(seen.libc.path)
    if ours.exists():
        with ours.open("rb") as f:
            assert build_id(f) != expected
    assert (seen.program.state, seen.program.path) == (State.OK, "/usr/bin/python3.13")


def test_doctor_lists_it(seen: Seen) -> None:
    (server,) = (s for s in json.loads(seen.doctor)["engines"] if s["tgid"] == seen.box.tgid)
    assert (server["vpid"], server["container_id"], server["pod_uid"]) == (1, ID, UID)
    found = {lib["path"]: (lib["build_id"], lib["state"]) for lib in server["libraries"]}
    assert found[seen.libc.path] == (seen.libc.build_id, "")
    assert found["/usr/bin/python3.13"] == (seen.program.build_id, "")


def test_a_file_on_the_overlay_has_its_path(seen: Seen) -> None:
    assert seen.box.log in {f.path for f in seen.files}


def test_the_end_of_the_container_ends_its_requests(seen: Seen) -> None:
    (finding,) = seen.killed.values()
    assert finding.request.trace_id == trace_id(REQUESTS)
    assert finding.process == seen.process
