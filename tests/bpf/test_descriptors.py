"""descriptors: calls that find no descriptor left, with prime counts."""

from __future__ import annotations

import pytest

from tests.bpf.conftest import Spawn, Watch
from tests.bpf.work_descriptors import LIMIT

pytestmark = pytest.mark.bpf

ACCEPT4, OPENAT, EMFILE = 288, 257, 24
MANY = 23


def test_every_refusal_is_counted_with_the_limit(watch: Watch, spawn: Spawn) -> None:
    w, child = (
        watch("descriptors", config={"descriptors": {"quiet_us": 0}}),
        spawn("out_of_descriptors", MANY),
    )
    w.watch(child.tgid)
    assert child.run()["failed"] == 2 * MANY
    rows = w.rows("descriptor_refused", tgid=child.tgid)
    assert sorted(rows["syscall_nr"].tolist()) == [OPENAT] * MANY + [ACCEPT4] * MANY
    assert (rows["aux"] == EMFILE).all()
    assert (rows["limit"] == LIMIT).all()
    assert (rows["times"] == 1).all()
    assert (rows["tid"] == child.tgid).all()


def test_a_loop_that_tries_on_and_on_is_told_now_and_then(watch: Watch, spawn: Spawn) -> None:
    w = watch("descriptors", config={"descriptors": {"quiet_us": 4_000_000_000}})
    child = spawn("out_of_descriptors", MANY)
    w.watch(child.tgid)
    assert child.run()["failed"] == 2 * MANY
    assert sorted(w.rows("descriptor_refused")["syscall_nr"].tolist()) == [OPENAT, ACCEPT4]


def test_others_are_nobodys_business(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("descriptors"), spawn("out_of_descriptors", MANY)
    assert child.run()["failed"] == 2 * MANY
    assert w.count("descriptor_refused") == 0
