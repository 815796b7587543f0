/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The stacks of another task than the current one, for sleepable iterators: of the kernel, of the program, of
 * Python.
 *
 * Memory is read as it stands, by bpf_copy_from_user_task (5.18), which waits for pages and takes the
 * process's mmap lock for reading, as reading /proc/PID/mem does. A task that runs meanwhile is told as far
 * as it can be read.
 */
#pragma once

#include "python.bpf.h"

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

/*
 * Take the stacks of a task into `s`. Returns the number of the stack, 0 when there is none; `ip` gets where
 * in the program it is. The kernel's frames of a task on a CPU cannot be had.
 */
static __always_inline __u64 whyspan_take_task(struct task_struct *task, struct whyspan_scratch *s,
					       bool kernel, __u64 *ip, bool *lost)
{
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(task);
	struct unwinding u = { .task = task, .s = s };
	struct whyspan_python *found, py;
	__u32 tgid = task->tgid, words = 0;
	long bytes = 0;

	s->stack.tgid = tgid;
	s->stack.flags = 0;
	s->stack.kernel_frames = s->stack.user_frames = s->stack.python_frames = 0;
	if (kernel)
		bytes = bpf_get_task_stack(task, s->stack.words, WHYSPAN_KERNEL_FRAMES * 8, 0);
	if (bytes > 0 && bytes <= WHYSPAN_KERNEL_FRAMES * 8) {
		words = bytes / 8;
		s->stack.kernel_frames = words;
	}
	*ip = PT_REGS_IP(regs);
	u.words = words;
	u.frame = PT_REGS_FP(regs);
	if (words < WHYSPAN_KERNEL_FRAMES + 1) {
		s->stack.words[words] = *ip;
		u.words++;
		u.frames = 1;
	}
	bpf_loop(WHYSPAN_USER_FRAMES, unwind_on, &u, 0);
	s->stack.user_frames = u.frames;
	found = bpf_map_lookup_elem(&whyspan_pythons, &tgid);
	if (found) {
		py = *found;
		whyspan_walk_python(task, &py, whyspan_own_tid(task), u.words, s);
	}
	return whyspan_send_stack(s, lost);
}
