// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * numa: pages that automatic NUMA balancing moved while a thread waited in its fault, and threads it moved.
 *
 * Hooks mm_migrate_pages_start and mm_migrate_pages, which fire once per migration, in the thread that
 * touched the page, and sched_move_numa and sched_swap_numa. Idle-free: without balancing none of them fires
 * but for compaction and other reasons, which are left out. Reads kernel memory only.
 *
 * A host with one node, as every virtual machine that we test on, never fires them: what they say is tested
 * on made-up events only.
 */
#include "whyspan.bpf.h"

WHYSPAN_KINDS(numa, KIND_numa_migrated, KIND_numa_moved);

struct numa_cfg {
	__u64 threads; /* 1 = report the threads that are moved, too; default 1 */
};
const volatile struct numa_cfg cfg = { .threads = 1 };

struct numa_migrated {
	struct whyspan_head head; /* ts_ns = end of the migration */
	__u64 begin_ns;
	__u64 pages;
	__u64 failed;
	__u64 _pad;
};
WHYSPAN_EVENT(numa_migrated);

struct numa_moved {
	struct whyspan_head head; /* subject: the thread moved; aux: 1 swapped with another */
	__s32 from_cpu;
	__s32 to_cpu;
	__u64 _pad[3];
};
WHYSPAN_EVENT(numa_moved);

/* Migrations in progress: thread -> begin. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u64);
} numa_begun SEC(".maps");

static __always_inline bool misplaced(int reason)
{
	/* Numbered anew when a reason is added: asked of the kernel. */
	return bpf_core_enum_value_exists(enum migrate_reason, MR_NUMA_MISPLACED) &&
	       reason == (int)bpf_core_enum_value(enum migrate_reason, MR_NUMA_MISPLACED);
}

static __always_inline int begin(int reason)
{
	__u64 id = bpf_get_current_pid_tgid(), now;
	__u32 tid = id;

	if (!misplaced(reason) || !whyspan_is_watched(id >> 32))
		return 0;
	now = bpf_ktime_get_ns();
	bpf_map_update_elem(&numa_begun, &tid, &now, BPF_ANY);
	return 0;
}

/* "mm/migrate: add trace events for base page and THP migrations" (5.14). */
SEC("tp_btf/mm_migrate_pages_start")
int BPF_PROG(numa_begin_tp, int mode, int reason)
{
	return begin(reason);
}

SEC("raw_tp/mm_migrate_pages_start")
int BPF_PROG(numa_begin_raw, int mode, int reason)
{
	return begin(reason);
}

static __always_inline int end(__u64 pages, __u64 failed)
{
	__u64 id = bpf_get_current_pid_tgid(), *began, begin_ns;
	__u32 tid = id;
	struct numa_migrated *e;

	if (!whyspan_is_watched(id >> 32))
		return 0;
	began = bpf_map_lookup_elem(&numa_begun, &tid);
	if (!began)
		return 0;
	begin_ns = *began;
	bpf_map_delete_elem(&numa_begun, &tid);
	e = whyspan_reserve(KIND_numa_migrated, bpf_ktime_get_ns(), tid, id >> 32, 0);
	if (!e)
		return 0;
	e->begin_ns = begin_ns;
	e->pages = pages;
	e->failed = failed;
	e->_pad = 0;
	whyspan_submit(e);
	return 0;
}

/* What differs between kernels are the arguments after these two. */
SEC("tp_btf/mm_migrate_pages")
int BPF_PROG(numa_end_tp, unsigned long succeeded, unsigned long failed)
{
	return end(succeeded, failed);
}

SEC("raw_tp/mm_migrate_pages")
int BPF_PROG(numa_end_raw, unsigned long succeeded, unsigned long failed)
{
	return end(succeeded, failed);
}

static __always_inline int moved(const bool raw, struct task_struct *task, int from, int to, __u32 swapped)
{
	__u32 tgid = WHYSPAN_FIELD(raw, task, tgid);
	struct numa_moved *e;

	if (!cfg.threads || !whyspan_is_watched(tgid))
		return 0;
	e = whyspan_reserve(KIND_numa_moved, bpf_ktime_get_ns(), WHYSPAN_FIELD(raw, task, pid), tgid,
			    swapped);
	if (!e)
		return 0;
	e->from_cpu = from;
	e->to_cpu = to;
	e->_pad[0] = e->_pad[1] = e->_pad[2] = 0;
	whyspan_submit(e);
	return 0;
}

SEC("tp_btf/sched_move_numa")
int BPF_PROG(numa_move_tp, struct task_struct *task, int from, int to)
{
	return moved(false, task, from, to, 0);
}

SEC("raw_tp/sched_move_numa")
int BPF_PROG(numa_move_raw, struct task_struct *task, int from, int to)
{
	return moved(true, task, from, to, 0);
}

SEC("tp_btf/sched_swap_numa")
int BPF_PROG(numa_swap_tp, struct task_struct *task, int from, struct task_struct *other, int to)
{
	return moved(false, task, from, to, 1);
}

SEC("raw_tp/sched_swap_numa")
int BPF_PROG(numa_swap_raw, struct task_struct *task, int from, struct task_struct *other, int to)
{
	return moved(true, task, from, to, 1);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
