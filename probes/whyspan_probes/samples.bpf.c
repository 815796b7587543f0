// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * samples: what the watched threads execute, so many times per second and CPU: stacks of the kernel, of the
 * program and of Python.
 *
 * A software event of the perf subsystem (cpu-clock) on every CPU; no function of anybody's is hooked, and
 * nothing is paused. A thread of no watched process costs one look-up. Frames of programs are found by frame
 * pointers: code without them ends the walk early, and user space drops what cannot be true. Pages that are
 * not in memory are not waited for.
 *
 * Cost (tests/bench/samples.py, a busy virtual machine of two CPUs): 0.5 us for others; 7 to 10 us for a
 * thread of a program in C; 14 us with ten frames of Python, 60 to 75 us with 128.
 */
#include "python.bpf.h"

WHYSPAN_KINDS(samples, KIND_cpu_sample);

struct samples_cfg {
	__u32 python; /* 1 = walk the frames of Python; default 1 */
	__u32 user;   /* 1 = walk the frames of the program; default 1 */
};
const volatile struct samples_cfg cfg = { .python = 1, .user = 1 };

struct cpu_sample {
	struct whyspan_head
		head; /* aux = flags: 1 has the GIL, 2, 4, 8, 16 as python.bpf.h; 32 in the kernel */
	__u64 stack;
	__u64 ip;
	__u64 _pad[2];
};
WHYSPAN_EVENT(cpu_sample);

#define SAMPLE_IN_KERNEL 32

/* The sampler's timer does not interrupt itself. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct whyspan_scratch);
} samples_scratch SEC(".maps");

SEC("perf_event")
int samples_tick(struct bpf_perf_event_data *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
	__u32 tgid = id >> 32, tid = (__u32)id, zero = 0, words = 0;
	struct task_struct *task;
	struct whyspan_scratch *s;
	struct whyspan_python *found, py;
	struct cpu_sample *e;
	bool lost = false;
	__u64 stack;
	long bytes;

	if (!whyspan_is_watched(tgid))
		return 0;
	s = bpf_map_lookup_elem(&samples_scratch, &zero);
	if (!s)
		return 0;
	s->stack.tgid = tgid;
	s->stack.flags = 0;
	s->stack.kernel_frames = s->stack.user_frames = s->stack.python_frames = 0;
	bytes = bpf_get_stack(ctx, s->stack.words, WHYSPAN_KERNEL_FRAMES * 8, 0);
	if (bytes > 0 && bytes <= WHYSPAN_KERNEL_FRAMES * 8) {
		words = bytes / 8;
		s->stack.kernel_frames = words;
	}
	if (cfg.user && words <= WHYSPAN_KERNEL_FRAMES) {
		bytes = bpf_get_stack(ctx, &s->stack.words[words], WHYSPAN_USER_FRAMES * 8, BPF_F_USER_STACK);
		if (bytes > 0 && bytes <= WHYSPAN_USER_FRAMES * 8) {
			s->stack.user_frames = bytes / 8;
			words += bytes / 8;
			if (s->stack.user_frames == WHYSPAN_USER_FRAMES)
				s->stack.flags |= STACK_USER_DEEPER;
		}
	}
	found = cfg.python ? bpf_map_lookup_elem(&whyspan_pythons, &tgid) : NULL;
	if (found) {
		task = (struct task_struct *)bpf_get_current_task();
		py = *found;
		whyspan_walk_python(NULL, &py, whyspan_own_tid(task), words, s);
	}
	stack = whyspan_send_stack(s, &lost);
	if (lost)
		whyspan_drop(KIND_cpu_sample);
	e = whyspan_reserve(KIND_cpu_sample, now, tid, tgid,
			    s->stack.flags | (s->stack.kernel_frames ? SAMPLE_IN_KERNEL : 0));
	if (!e)
		return 0;
	e->stack = lost ? 0 : stack;
	e->ip = s->stack.user_frames ? s->stack.words[s->stack.kernel_frames & 31] : 0;
	e->_pad[0] = e->_pad[1] = 0;
	whyspan_submit(e);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
