// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * snapshots: all threads of a process at one moment, with their stacks and what the scheduler says of them.
 *
 * Two sleepable iterators over the threads of one process, each started by user space; nothing is hooked. The
 * first tells, in what it prints, the threads that have not given up the CPU of their own accord for long:
 * they run, want to, or are in one block. User space knows which of them ought to serve requests, and then
 * has the second take them all.
 *
 * Cost: some 0.3 us for each thread looked at, 20 to 60 us for each taken.
 */
#include "tasks.bpf.h"
#include "arch.bpf.h"

WHYSPAN_KINDS(snapshots, KIND_thread_state);

struct snapshots_cfg {
	__u64 min_ns; /* what has stalled for less is not printed; default 100 ms */
};
const volatile struct snapshots_cfg cfg = { .min_ns = 100000000 };

enum snapshot_state { SNAPSHOT_RUNNING, SNAPSHOT_RUNNABLE, SNAPSHOT_BLOCKED };

struct thread_state {
	struct whyspan_head head; /* aux = flags, as of cpu_sample */
	__u64 stack;
	__u64 snapshot; /* the same for all threads of one */
	__u64 since_ns; /* when it was first looked at since it gave up the CPU last; 0 not known */
	__s32 syscall_nr;
	__u16 last_cpu;
	__u16 state;
};
WHYSPAN_EVENT(thread_state);

/* What the first prints for each thread. */
struct stalled {
	__u64 since_ns;
	__u32 tid;
	__s32 syscall_nr;
	__u32 state;
	__u32 _pad;
};

/* A thread is counted where it blocks, not where it wakes up: what it was in tells the two apart. */
struct go {
	__u64 switches;
	__u64 since_ns;
	__u32 blocked;
	__u32 _pad;
};

static __always_inline bool same_go(const struct go *known, struct task_struct *task, __u32 state)
{
	return known && known->switches == task->nvcsw && known->blocked == (state == SNAPSHOT_BLOCKED);
}

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, struct go);
} goes SEC(".maps");

/* One reader at a time: user space's poller. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct whyspan_scratch);
} snapshots_scratch SEC(".maps");

#define TASK_BLOCKED 3 /* TASK_INTERRUPTIBLE | TASK_UNINTERRUPTIBLE, include/linux/sched.h */

static __always_inline __u32 state_of(struct task_struct *task)
{
	if (task->__state & TASK_BLOCKED)
		return SNAPSHOT_BLOCKED;
	return task->on_cpu ? SNAPSHOT_RUNNING : SNAPSHOT_RUNNABLE;
}

SEC("iter.s/task")
int snapshots_look(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	__u64 now = bpf_ktime_get_ns();
	struct stalled told = {};
	struct go *known, fresh = {};
	struct whyspan_call call = {};
	__u32 tid;

	if (!task || !whyspan_is_watched(task->tgid))
		return 0;
	tid = task->pid;
	told.state = state_of(task);
	known = bpf_map_lookup_elem(&goes, &tid);
	if (!same_go(known, task, told.state)) {
		fresh.switches = task->nvcsw;
		fresh.blocked = told.state == SNAPSHOT_BLOCKED;
		fresh.since_ns = now;
		bpf_map_update_elem(&goes, &tid, &fresh, BPF_ANY);
		return 0;
	}
	if (now - known->since_ns < cfg.min_ns)
		return 0;
	told.syscall_nr = -2;
	if (told.state == SNAPSHOT_BLOCKED) {
		whyspan_read_call(task, &call);
		told.syscall_nr = call.nr;
	}
	told.since_ns = known->since_ns;
	told.tid = tid;
	bpf_seq_write(ctx->meta->seq, &told, sizeof(told));
	return 0;
}

SEC("iter.s/task")
int snapshots_take(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	__u64 now = bpf_ktime_get_ns(), stack, ip;
	struct whyspan_call call = {};
	struct whyspan_scratch *s;
	struct thread_state *e;
	__u32 zero = 0, tid, state;
	struct go *known;
	bool lost = false;

	if (!task || !whyspan_is_watched(task->tgid))
		return 0;
	s = bpf_map_lookup_elem(&snapshots_scratch, &zero);
	if (!s)
		return 0;
	tid = task->pid;
	state = state_of(task);
	stack = whyspan_take_task(task, s, state == SNAPSHOT_BLOCKED, &ip, &lost);
	if (lost)
		whyspan_drop(KIND_thread_state);
	call.nr = -2;
	if (state == SNAPSHOT_BLOCKED)
		whyspan_read_call(task, &call);
	known = bpf_map_lookup_elem(&goes, &tid);
	e = whyspan_reserve(KIND_thread_state, now, tid, task->tgid, s->stack.flags);
	if (!e)
		return 0;
	e->stack = lost ? 0 : stack;
	e->snapshot = ctx->meta->session_id;
	e->since_ns = same_go(known, task, state) ? known->since_ns : 0;
	e->syscall_nr = call.nr;
	e->last_cpu = task->wake_cpu;
	e->state = state;
	whyspan_submit(e);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
