// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * waits: where threads of the watched processes are when they have been blocked for long: stacks of the
 * kernel, of the program and of Python, taken once for each such block, while it lasts.
 *
 * A sleepable iterator over the threads of one process, started by user space every so often; nothing is
 * hooked, and no switch costs more. A thread whose count of context switches has not changed since an earlier
 * look has been in one block all the time.
 *
 * Cost: some 0.3 us for each thread looked at, 20 to 60 us for each stack.
 */
#include "tasks.bpf.h"

WHYSPAN_KINDS(waits, KIND_wait_stack);

struct waits_cfg {
	__u64 min_ns; /* how long a thread must have been seen in one block; default 100 ms */
};
const volatile struct waits_cfg cfg = { .min_ns = 100000000 };

struct wait_stack {
	struct whyspan_head head; /* aux = flags, as of cpu_sample */
	__u64 stack;
	__u64 since_ns; /* when it was first looked at in this block */
	__u64 ip;
	__u64 _pad;
};
WHYSPAN_EVENT(wait_stack);

struct look {
	__u64 switches;
	__u64 since_ns;
	__u32 told;
	__u32 _pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, struct look);
} looks SEC(".maps");

/* One reader at a time: user space's poller. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct whyspan_scratch);
} waits_scratch SEC(".maps");

SEC("iter.s/task")
int waits_look(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	__u64 now = bpf_ktime_get_ns(), switches, stack, ip;
	struct whyspan_scratch *s;
	struct look *known, fresh = {};
	struct wait_stack *e;
	__u32 zero = 0, tid, tgid;
	bool lost = false;

	if (!task)
		return 0;
	tid = task->pid;
	tgid = task->tgid;
	if (!whyspan_is_watched(tgid))
		return 0;
	switches = task->nvcsw + task->nivcsw;
	known = bpf_map_lookup_elem(&looks, &tid);
	if (!known || known->switches != switches) {
		fresh.switches = switches;
		fresh.since_ns = now;
		bpf_map_update_elem(&looks, &tid, &fresh, BPF_ANY);
		return 0;
	}
	/* TASK_INTERRUPTIBLE or TASK_UNINTERRUPTIBLE: what runs is the sampler's. */
	if (known->told || now - known->since_ns < cfg.min_ns || !(task->__state & 3))
		return 0;
	known->told = 1;
	s = bpf_map_lookup_elem(&waits_scratch, &zero);
	if (!s)
		return 0;
	stack = whyspan_take_task(task, s, true, &ip, &lost);
	if (lost)
		whyspan_drop(KIND_wait_stack);
	e = whyspan_reserve(KIND_wait_stack, now, tid, tgid, s->stack.flags);
	if (!e)
		return 0;
	e->stack = lost ? 0 : stack;
	e->since_ns = known->since_ns;
	e->ip = ip;
	e->_pad = 0;
	whyspan_submit(e);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
