"""Which alternative is attached, what is reported of the others, and what a broken pair says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from whyspan_probes.errors import ProbeError
from whyspan_probes.loader import Session
from whyspan_probes.probe import Hook, Probe
from whyspan_probes.registry import Found, discover

from tests.bpf.conftest import Spawn
from tests.bpf.toolchain import build
from tests.bpf.watcher import Watcher

pytestmark = pytest.mark.bpf

SOURCE = """
#include "whyspan.bpf.h"

WHYSPAN_KINDS(policy, KIND_policy_call);

struct policy_cfg {
	__u64 stamp;
};
const volatile struct policy_cfg cfg = { .stamp = 5 };

struct policy_call {
	struct whyspan_head head;
	__u64 stamp;
	__u64 by;
	__u64 _pad[2];
};
WHYSPAN_EVENT(policy_call);

static __always_inline int emit(__u64 by)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct policy_call *e;

	if (!whyspan_is_watched(id >> 32))
		return 0;
	e = whyspan_reserve(KIND_policy_call, bpf_ktime_get_ns(), id, id >> 32, 0);
	if (!e)
		return 0;
	e->stamp = cfg.stamp;
	e->by = by;
	e->_pad[0] = e->_pad[1] = 0;
	whyspan_submit(e);
	return 0;
}

SEC("tp_btf/whyspan_no_such_tracepoint")
int policy_missing(void *ctx)
{
	return emit(1);
}

SEC("tracepoint/syscalls/sys_enter_pwrite64")
int policy_refused(void *ctx)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32;
	__u32 *service = bpf_map_lookup_elem(&whyspan_watched, &tgid);

	return emit(*service); /* may be null: the verifier refuses */
}

SEC("uprobe")
int policy_unattachable(void *ctx)
{
	return emit(3);
}

SEC("tracepoint/syscalls/sys_enter_pwrite64")
int policy_good(void *ctx)
{
	return emit(4);
}

SEC("tracepoint/syscalls/sys_enter_pwrite64")
int policy_better(void *ctx)
{
	return emit(5);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
"""

DECLARATION = """
from whyspan_probes.probe import Cost, Hook, Probe

PROBE = Probe(
    name="policy",
    title="positioned writes",
    hooks=(Hook("write", (("policy_good",),)),),
    events={"policy_call": {"stamp": "from the configuration", "by": "which program"}},
    cost=Cost.BURST,
    joins="thread",
    needs="syscall tracepoints",
    config={"stamp": "a number"},
)
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("policy")
    build(folder, "policy", SOURCE, DECLARATION)
    (found,) = discover([folder])
    return found


def changed(found: Found, **changes: Any) -> Found:
    return Found(dataclasses.replace(found.probe, **changes), found.object_path)


def hooked(found: Found, *alternatives: str, extra: tuple[Hook, ...] = ()) -> Found:
    return changed(found, hooks=(Hook("write", tuple((a,) for a in alternatives)), *extra))


def stamps(watcher: Watcher, spawn: Spawn, folder: Path) -> set[tuple[int, int]]:
    """Let a child make 7 calls; return (program, stamp) of what they emitted."""
    child = spawn("odd_and_even_writes", folder / "out", 7)
    watcher.watch(child.tgid)
    child.run()
    rows = watcher.rows("policy_call", tid=child.tgid)
    assert len(rows) == 7
    return {(int(r["by"]), int(r["stamp"])) for r in rows}


def test_the_first_that_works_is_used_and_the_others_are_explained(
    policy: Found, spawn: Spawn, tmp_path: Path
) -> None:
    w = Watcher(
        [
            hooked(
                policy,
                "policy_missing",
                "policy_refused",
                "policy_unattachable",
                "policy_good",
                "policy_better",
            )
        ]
    )
    try:
        hook = w.states["policy"].hooks["write"]
        assert hook.used == ["tracepoint/syscalls/sys_enter_pwrite64"]
        missing, refused, unattachable = hook.refused
        assert (
            missing
            == "tp_btf/whyspan_no_such_tracepoint: this kernel has no tracepoint whyspan_no_such_tracepoint"
        )
        assert refused.startswith("policy_refused: refused at load: ")
        assert "map_value_or_null" in refused
        assert unattachable.startswith("uprobe: cannot attach: ")
        assert stamps(w, spawn, tmp_path) == {(4, 5)}
    finally:
        w.close()


def test_declared_order_is_kept(policy: Found, spawn: Spawn, tmp_path: Path) -> None:
    w = Watcher([hooked(policy, "policy_better", "policy_good")])
    try:
        assert w.states["policy"].hooks["write"].refused == []
        assert stamps(w, spawn, tmp_path) == {(5, 5)}
    finally:
        w.close()


def test_when_all_fail_the_probe_fails_and_the_others_attach(
    policy: Found, probes: dict[str, Found], spawn: Spawn
) -> None:
    bad = hooked(policy, "policy_missing", "policy_refused")
    w = Watcher([bad, probes["sched"]], may_fail=True)
    try:
        state = w.states["policy"]
        assert state.state == "failed"
        assert state.reason.startswith("hook write: tp_btf/whyspan_no_such_tracepoint: this kernel has no")
        assert "policy_refused: refused at load" in state.reason
        assert state.hooks["write"].used == []
        assert len(state.hooks["write"].refused) == 2
        assert w.states["sched"].state == "attached"
        child = spawn("sleeps", 7)
        w.watch(child.tgid)
        child.run()
        assert w.count("sched_switch_out", tid=child.tgid, syscall_nr=230) == 7
    finally:
        w.close()


def test_a_missing_optional_hook_is_told(policy: Found, spawn: Spawn, tmp_path: Path) -> None:
    extra = Hook("extra", (("policy_missing",), ("policy_refused",)), required=False)
    w = Watcher([hooked(policy, "policy_good", extra=(extra,))], may_fail=True)
    try:
        state = w.states["policy"]
        assert (state.state, bool(state.reason)) == ("partial", True)
        assert state.hooks["extra"].used == []
        assert len(state.hooks["extra"].refused) == 2
        assert stamps(w, spawn, tmp_path) == {(4, 5)}
    finally:
        w.close()


def test_configuration_reaches_the_program(policy: Found, spawn: Spawn, tmp_path: Path) -> None:
    w = Watcher([policy], config={"policy": {"stamp": 2**64 - 59}})
    try:
        assert stamps(w, spawn, tmp_path) == {(4, 2**64 - 59)}
    finally:
        w.close()


def failing(found: Found, config: dict[str, int] | None = None) -> str:
    """Attach it alone; it must raise ProbeError by itself, and be a reported state in a session."""
    session = Session([found], 1 << 16)
    try:
        (loaded,) = session.probes
        with pytest.raises(ProbeError) as raised:
            loaded.attach(config or {})
        loaded.close()
        session.attach({found.probe.name: config or {}})
        assert loaded.state.state == "failed"
        assert loaded.state.reason == str(raised.value)
        assert "\n" not in loaded.state.reason
        assert not loaded.attached
    finally:
        session.close()
    return str(raised.value)


@pytest.mark.parametrize("field", ["stmp", "_pad", ""])
def test_an_unknown_configuration_field(policy: Found, field: str) -> None:
    assert failing(policy, {field: 1}) == f"probe policy: unknown configuration field {field!r}"


BROKEN: dict[str, dict[str, Any]] = {
    "declares ['policy_call', 'policy_other']": {
        "events": {"policy_call": {"stamp": "", "by": ""}, "policy_other": {}}
    },
    "event policy_call: declares": {"events": {"policy_call": {"stamp": ""}}},
    "['stamp', 'by']": {"events": {"policy_call": {"stamp": "", "by": "", "more": ""}}},
    "no program ['policy_absent']": {"hooks": (Hook("write", (("policy_absent",),)),)},
}


@pytest.mark.parametrize("message", list(BROKEN))
def test_object_and_declaration_disagree(policy: Found, message: str) -> None:
    assert message in failing(changed(policy, **BROKEN[message]))


def test_an_object_that_is_none(policy: Found, tmp_path: Path) -> None:
    path = tmp_path / "policy.bpf.o"
    path.write_bytes(b"\x7fELF" + bytes(100))
    assert "cannot open policy.bpf.o" in failing(Found(policy.probe, path))


def test_an_object_that_is_not_built(policy: Found, tmp_path: Path) -> None:
    w = Watcher([Found(policy.probe, tmp_path / "policy.bpf.o")], may_fail=True)
    w.close()
    assert (w.states["policy"].state, w.states["policy"].reason) == ("failed", "policy.bpf.o is not built")


def test_pairs_that_are_none_are_refused(policy: Found, tmp_path: Path) -> None:
    (tmp_path / "alone.bpf.c").write_text(SOURCE)
    with pytest.raises(ProbeError, match=r"alone.py is missing"):
        discover([tmp_path])
    (tmp_path / "alone.py").write_text("PROBE = 1\n")
    with pytest.raises(ProbeError, match=r"alone.py has no PROBE"):
        discover([tmp_path])
    (tmp_path / "alone.py").write_text(DECLARATION)
    with pytest.raises(ProbeError, match=r"alone.py declares 'policy'"):
        discover([tmp_path])
    assert isinstance(policy.probe, Probe)
    with pytest.raises(ProbeError, match="declared in"):
        discover([policy.object_path.parent, policy.object_path.parent])
