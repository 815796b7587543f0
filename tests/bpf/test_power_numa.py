"""power and numa: they load and count what a virtual machine has of it; what real machines say is made up elsewhere."""

from __future__ import annotations

import pytest

from tests.bpf.conftest import Spawn, Watch

pytestmark = pytest.mark.bpf


def test_a_thread_woken_on_an_idle_cpu_names_the_state_that_it_left(watch: Watch, spawn: Spawn) -> None:
    # Every idle state counts here: a virtual machine has no deep one.
    w, child = watch("power", config={"power": {"deep_state": 0}}), spawn("sleeps", 37, 5)
    w.watch(child.tgid)
    child.run()
    rows = w.rows("power_woken")
    assert len(rows) > 0
    assert set(rows["tid"].tolist()) == {child.tgid}
    assert (rows["idle_ns"] > 0).all()
    assert (rows["idle_ns"] + rows["left_ns"] < rows["ts_ns"]).all()


def test_light_states_and_other_threads_are_nothing(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("power", "numa"), spawn("sleeps", 37, 5)
    other = spawn("sleeps", 11, 5)
    w.watch(child.tgid)
    other.run()
    child.run()
    assert w.count("power_woken", tgid=other.tgid) == 0
    assert w.count("power_frequency") == 0
    assert w.count("numa_migrated") == w.count("numa_moved") == 0
