// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * block_io: latency of block requests, with device and issuer.
 *
 * Hooks block_rq_issue and block_rq_complete. A request is recorded when a watched process issued it, or when
 * it took longer than a threshold whoever issued it: a busy neighbour on the same disk must be nameable.
 * Write-back is issued by kworkers and shows as theirs. Cost: about 0.2 us per request of the host.
 */
#include "whyspan.bpf.h"

WHYSPAN_KINDS(block_io, KIND_block_done);

struct block_io_cfg {
	__u64 slow_ns; /* unwatched requests at least this slow are recorded; default 1 ms; 0 = all */
};
const volatile struct block_io_cfg cfg = { .slow_ns = 1000000 };

struct block_done {
	struct whyspan_head
		head; /* subject: the issuer; aux: 1 write, 2 sync, 4 flush, 8 issued by a kernel thread */
	__u64 sector;
	__u64 issue_ns;
	__u64 latency_ns;
	__u32 dev; /* major << 20 | minor */
	__u32 bytes;
};
WHYSPAN_EVENT(block_done);

/* include/linux/blk_types.h; macros, not in BTF */
#define REQ_OP_MASK 0xff
#define REQ_OP_WRITE 1
#define REQ_OP_FLUSH 2
#define REQ_SYNC (1u << 11)

struct issue {
	__u64 ts_ns;
	__u32 tid;
	__u32 tgid;
	__u32 bytes;
	__u16 watched;
	__u16 kthread;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, struct issue);
} block_io_inflight SEC(".maps");

static __always_inline int on_issue(const bool raw, struct request *rq)
{
	__u64 id = bpf_get_current_pid_tgid(), key = whyspan_key(rq);
	struct task_struct *task;
	struct issue issue = {
		.ts_ns = bpf_ktime_get_ns(),
		.tid = id,
		.tgid = id >> 32,
		.bytes = BPF_CORE_READ(rq, __data_len),
	};

	issue.watched = whyspan_is_watched(issue.tgid);
	task = raw ? (struct task_struct *)bpf_get_current_task() : bpf_get_current_task_btf();
	issue.kthread = !!(WHYSPAN_FIELD(raw, task, flags) & PF_KTHREAD);
	bpf_map_update_elem(&block_io_inflight, &key, &issue, BPF_ANY);
	return 0;
}

static __always_inline int on_complete(struct request *rq)
{
	__u64 key = whyspan_key(rq), now, latency;
	struct issue *found, issue;
	struct block_done *e;
	struct gendisk *disk;
	__u32 flags, aux;

	found = bpf_map_lookup_elem(&block_io_inflight, &key);
	if (!found)
		return 0;
	issue = *found;
	bpf_map_delete_elem(&block_io_inflight, &key);
	now = bpf_ktime_get_ns();
	latency = now - issue.ts_ns;
	if (!issue.watched && latency < cfg.slow_ns)
		return 0;
	flags = BPF_CORE_READ(rq, cmd_flags);
	aux = ((flags & REQ_OP_MASK) == REQ_OP_WRITE ? 1 : 0) | (flags & REQ_SYNC ? 2 : 0) |
	      ((flags & REQ_OP_MASK) == REQ_OP_FLUSH ? 4 : 0) | (issue.kthread ? 8 : 0);
	e = whyspan_reserve(KIND_block_done, now, issue.tid, issue.tgid, aux);
	if (!e)
		return 0;
	disk = BPF_CORE_READ(rq, q, disk);
	e->sector = BPF_CORE_READ(rq, __sector);
	e->issue_ns = issue.ts_ns;
	e->latency_ns = latency;
	e->dev = disk ? (__u32)BPF_CORE_READ(disk, major) << 20 | BPF_CORE_READ(disk, first_minor) : 0;
	e->bytes = issue.bytes;
	whyspan_submit(e);
	return 0;
}

SEC("tp_btf/block_rq_issue")
int BPF_PROG(block_io_issue_tp, struct request *rq)
{
	return on_issue(false, rq);
}

SEC("raw_tp/block_rq_issue")
int BPF_PROG(block_io_issue_raw, struct request *rq)
{
	return on_issue(true, rq);
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(block_io_complete_tp, struct request *rq)
{
	return on_complete(rq);
}

SEC("raw_tp/block_rq_complete")
int BPF_PROG(block_io_complete_raw, struct request *rq)
{
	return on_complete(rq);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
