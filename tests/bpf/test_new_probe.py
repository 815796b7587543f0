"""A new probe is a pair of files and nothing else: here one that sees positioned writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from whyspan_probes.registry import HERE, discover

from tests.bpf.conftest import Spawn
from tests.bpf.toolchain import build
from tests.bpf.watcher import Watcher

pytestmark = pytest.mark.bpf

SOURCE = """
#include "whyspan.bpf.h"

WHYSPAN_KINDS(newcomer, KIND_newcomer_early, KIND_newcomer_call);

struct newcomer_cfg {
	__u32 only_odd;
	__u32 _pad;
};
const volatile struct newcomer_cfg cfg = { .only_odd = 0 };

struct newcomer_early {
	struct whyspan_head head;
	__u64 a;
	__u64 b;
	__u64 _pad[2];
};
WHYSPAN_EVENT(newcomer_early);

struct newcomer_call {
	struct whyspan_head head;
	__s64 bytes;
	__u32 fd;
	__s16 small;
	__u16 _pad;
	char comm[16];
};
WHYSPAN_EVENT(newcomer_call);

SEC("tracepoint/syscalls/sys_enter_pwrite64")
int newcomer_pwrite(struct trace_event_raw_sys_enter *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 bytes = ctx->args[2];
	struct newcomer_call *e;

	if (!whyspan_is_watched(id >> 32) || (cfg.only_odd && !(bytes & 1)))
		return 0;
	e = whyspan_reserve(KIND_newcomer_call, bpf_ktime_get_ns(), id, id >> 32, 42);
	if (!e)
		return 0;
	e->bytes = -(__s64)bytes;
	e->fd = ctx->args[0];
	e->small = -3;
	e->_pad = 0;
	bpf_get_current_comm(e->comm, sizeof(e->comm));
	whyspan_submit(e);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
"""

DECLARATION = """
from whyspan_probes.probe import Cost, Hook, Probe

PROBE = Probe(
    name="newcomer",
    title="positioned writes",
    hooks=(Hook("write", (("newcomer_pwrite",),)),),
    events={
        "newcomer_early": {"a": "never sent", "b": "never sent"},
        "newcomer_call": {"aux": "42", "bytes": "minus the size", "fd": "descriptor", "small": "-3", "comm": "name"},
    },
    cost=Cost.BURST,
    joins="thread",
    needs="syscall tracepoints",
    config={"only_odd": "1 = odd sizes only"},
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probes")
    build(path, "newcomer", SOURCE, DECLARATION)
    return path


def test_it_is_discovered_beside_the_others(folder: Path) -> None:
    found = {f.probe.name: f for f in discover([HERE, folder])}
    assert set(found) == {"newcomer"} | {f.probe.name for f in discover()}
    assert found["newcomer"].object_path == folder / "newcomer.bpf.o"
    assert list(found) == sorted(found)


@pytest.mark.parametrize(("only_odd", "expected"), [(0, 37), (1, 18)])
def test_it_loads_attaches_and_decodes(folder: Path, spawn: Spawn, only_odd: int, expected: int) -> None:
    child = spawn("odd_and_even_writes", folder / "written", 37)
    w = Watcher(discover([HERE, folder]), config={"newcomer": {"only_odd": only_odd}})
    try:
        w.watch(child.tgid)
        child.run()
        rows = w.rows("newcomer_call", tid=child.tgid)
        assert w.states["newcomer"].hooks["write"].used == ["tracepoint/syscalls/sys_enter_pwrite64"]
        assert rows["bytes"].tolist() == [-n for n in range(37) if n & 1 or not only_odd]
        assert len(rows) == expected
        assert set(rows["fd"].tolist()) == {child.facts["fd"]}
        assert set(rows["aux"].tolist()) == {42}
        assert set(rows["small"].tolist()) == {-3}
        assert all(c.startswith(b"python") for c in rows["comm"].tolist())
        assert w.count("newcomer_early") == 0
        assert w.count("sched_exit") == 0  # the others run beside it, under their own kinds
        assert w.count("sched_switch_out", tid=child.tgid) > 0
    finally:
        w.close()
