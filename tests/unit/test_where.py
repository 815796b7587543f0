"""In which container a culprit, and the server itself, are said to be."""

from __future__ import annotations

import msgspec
import pytest
from whyspan.cli import explain
from whyspan.errors import ConfigError
from whyspan.model import ProcessFact
from whyspan.pipeline import source
from whyspan_exporters.reader import Stored

from tests.unit.conftest import MakeFinding
from tests.unit.timeline import HOG, LOOP, MS, SERVER, EventBuilder, ns, request

OURS, THEIRS = "5d" * 32, "a7" * 32
UID = "2c48913c-b29f-11e7-9350-020968147796"

PLACES = {
    "in another container": (
        ProcessFact(HOG, "hog", cgroup="/docker/x", container_id=THEIRS),
        f"in container {THEIRS[:12]}",
    ),
    "in a container with a name": (
        ProcessFact(HOG, "hog", cgroup="/lxc/web", container_id="web"),
        "in container web",
    ),
    "in ours": (ProcessFact(HOG, "hog", cgroup="/docker/y", container_id=OURS), "in the same container"),
    "on the host": (
        ProcessFact(HOG, "hog", cgroup="/system.slice/backup.service"),
        "cgroup /system.slice/backup.service",
    ),
    "in the root": (ProcessFact(HOG, "hog", cgroup="/"), ""),
    "not known": (ProcessFact(HOG, "hog"), ""),
}


@pytest.mark.parametrize("case", list(PLACES))
def test_a_rival_for_the_cpu_is_placed(case: str) -> None:
    fact, where = PLACES[case]
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, 0, next_tid=HOG).into(60, LOOP, HOG).out(110, LOOP)
    b.known(ProcessFact(SERVER, "server", service="svc", cpus_allowed=2, container_id=OURS), fact)
    found, _ = b.classify(request(0, 100))
    culprit = found.culprits["cpu.runqueue"]
    assert (culprit.name, culprit.tgid, culprit.detail) == ("hog", HOG, where)


def test_a_neighbour_on_the_disk_is_placed() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, 2, nr=74).wake(60, LOOP, context=2, vec=4)
    b.add("block_done", 40, 555, issue_ns=ns(5), latency_ns=35 * MS, dev=8 << 20, bytes=1 << 20)
    b.known(ProcessFact(555, "dd", cgroup="/docker/x", container_id=THEIRS))
    found, _ = b.into(60, LOOP).out(80, LOOP).classify(request(0, 70))
    detail = found.culprits["io.disk_contention"].detail
    assert detail.startswith(f"in container {THEIRS[:12]}; 1.0 of 1.0 MB on device 8:0; 1 requests")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"container_id": OURS, "pod_uid": UID, "vpid": 7},
            f"container {OURS[:12]}, pod {UID}, process srv 100 (7 inside)",
        ),
        ({"container_id": "web\x1b[2J"}, "container web\\x1b[2J, process srv 100"),
        ({"pod_uid": UID}, f"pod {UID}, process srv 100"),
        ({"cgroup": "/system.slice/a.service", "vpid": 3}, None),
    ],
)
def test_explain_says_where_it_was_served(
    fields: dict[str, object], line: str | None, make_finding: MakeFinding
) -> None:
    fact = msgspec.structs.replace(ProcessFact(100, "srv"), **fields)
    finding = msgspec.structs.replace(make_finding(), process=fact)
    stored = Stored("id", 0, finding)
    assert (line in explain.report(stored)) if line else not explain._process(stored)
    assert explain._document(stored)["process"]["tgid"] == 100
    assert explain._document(Stored("id", 0, make_finding()))["process"] is None


def test_other_process_ids_than_the_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "in_host_pid_namespace", lambda: False)
    with pytest.raises(
        ConfigError, match=r"^not in the host's PID namespace: .*--pid=host \(hostPID: true\)$"
    ):
        source.LiveSource([], None, ring_bytes=1 << 16, header_allow=[])  # type: ignore[arg-type]
