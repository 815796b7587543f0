// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * waits: where threads of the watched processes are when they have been blocked for long: stacks of the kernel, of the
 * program and of Python, taken once for each such block, while it lasts.
 *
 * A sleepable iterator over the threads of one process, started by user space every so often; nothing is hooked, and no
 * switch costs more. A thread whose count of context switches has not changed since an earlier look has been in one
 * block all the time. Its memory is read as it stands, by bpf_copy_from_user_task (5.18), which waits for pages and
 * takes the process's mmap lock for reading, as reading /proc/PID/mem does.
 *
 * Cost: some 0.3 us for each thread looked at, 20 to 60 us for each stack.
 */
#include "python.bpf.h"

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

struct unwinding {
	struct task_struct *task;
	struct whyspan_scratch *s;
	__u64 frame;
	__u32 words;
	__u32 frames;
};

static long unwind_on(__u64 i, struct unwinding *u)
{
	__u64 pair[2] = {};
	__u32 words = u->words;

	if (!u->frame || u->frames >= WHYSPAN_USER_FRAMES || words >= WHYSPAN_STACK_WORDS)
		return 1;
	if (bpf_copy_from_user_task(pair, sizeof(pair), (const void *)u->frame, u->task, 0) || !pair[1])
		return 1;
	u->s->stack.words[words] = pair[1];
	u->words = words + 1;
	u->frames++;
	/* Stacks grow down: a frame that does not lie higher is none. */
	u->frame = pair[0] > u->frame ? pair[0] : 0;
	return 0;
}

SEC("iter.s/task")
int waits_look(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	__u64 now = bpf_ktime_get_ns(), switches, stack;
	struct whyspan_python *found, py;
	struct whyspan_scratch *s;
	struct look *known, fresh = {};
	struct unwinding u = {};
	struct wait_stack *e;
	struct pt_regs *regs;
	__u32 zero = 0, tid, tgid, words = 0;
	bool lost = false;
	long bytes;

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
	s->stack.tgid = tgid;
	s->stack.flags = 0;
	s->stack.kernel_frames = s->stack.user_frames = s->stack.python_frames = 0;
	bytes = bpf_get_task_stack(task, s->stack.words, WHYSPAN_KERNEL_FRAMES * 8, 0);
	if (bytes > 0 && bytes <= WHYSPAN_KERNEL_FRAMES * 8) {
		words = bytes / 8;
		s->stack.kernel_frames = words;
	}
	regs = (struct pt_regs *)bpf_task_pt_regs(task);
	u.task = task;
	u.s = s;
	u.words = words;
	u.frame = PT_REGS_FP(regs);
	if (words < WHYSPAN_KERNEL_FRAMES + 1) {
		s->stack.words[words] = PT_REGS_IP(regs);
		u.words++;
		u.frames = 1;
	}
	bpf_loop(WHYSPAN_USER_FRAMES, unwind_on, &u, 0);
	s->stack.user_frames = u.frames;
	found = bpf_map_lookup_elem(&whyspan_pythons, &tgid);
	if (found) {
		py = *found;
		whyspan_walk_python(task, &py, tid, whyspan_own_tid(task), u.words, s);
	}
	stack = whyspan_send_stack(s, &lost);
	if (lost)
		whyspan_drop(KIND_wait_stack);
	e = whyspan_reserve(KIND_wait_stack, now, tid, tgid, s->stack.flags);
	if (!e)
		return 0;
	e->stack = lost ? 0 : stack;
	e->since_ns = known->since_ns;
	e->ip = PT_REGS_IP(regs);
	e->_pad = 0;
	whyspan_submit(e);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
