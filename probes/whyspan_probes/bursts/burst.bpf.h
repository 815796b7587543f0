/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the bursts share: one process, a deadline, counters of what was missed, and the time that a thread is
 * off the CPU within a call. A burst's object is loaded alone, by whyspan.burst, and has none of the probes'
 * maps.
 */
#pragma once

#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include "arch.bpf.h"
#include "programs.bpf.h"

#if defined(__TARGET_ARCH_x86)
#define NR_FUTEX 202
#define RETURN_BYTES 8 /* `ret` takes the return address off the stack */
#else
#define NR_FUTEX 98
#define RETURN_BYTES 0
#endif
#define NR_FUTEX_WAIT 455 /* the same on all architectures (6.7) */

#define BURST_TASK_STATES 0x3 /* include/linux/sched.h: TASK_INTERRUPTIBLE, TASK_UNINTERRUPTIBLE */
#define BURST_THREADS 4096
#define BURST_STACKS 8192
#define BURST_FRAMES 64
#define BURST_NO_STACK (-1)

/* Set before load. After the deadline a program does nothing, whatever has become of whoever loaded it. */
const volatile struct {
	__u64 deadline_ns; /* CLOCK_MONOTONIC */
	__u32 tgid;
	__u32 _pad;
} burst_run;

/* What could not be told, by reason; names as the report has them. */
enum burst_missed {
	MISSED_rows_full,    /* no room for another combination of thread, place and size */
	MISSED_threads_full, /* no room for another thread */
	MISSED_stacks,	     /* a stack that could not be kept: its row has none */
	MISSED_ends,   /* a call whose end came without its beginning, mostly as it began before the burst */
	MISSED_begins, /* a call that never ended: its thread went elsewhere */
	MISSED_KINDS,
};
enum burst_missed *unused_burst_missed __attribute__((unused));

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MISSED_KINDS);
	__type(key, __u32);
	__type(value, __u64);
} burst_missed SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, BURST_STACKS);
	__type(key, __u32);
	__uint(value_size, BURST_FRAMES * sizeof(__u64));
} burst_stacks SEC(".maps");

/* Calls seen by the short look before the burst, which tells what the burst itself would cost. */
struct burst_place {
	__u32 tid; /* 0: threads of other processes, all together */
	__u32 place;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, BURST_THREADS);
	__type(key, struct burst_place);
	__type(value, __u64);
} burst_sample SEC(".maps");

/* A thread off the CPU within the call that it is in. */
struct burst_off {
	__u64 since_ns; /* 0: on it */
	__u64 blocked_ns;
	__u64 runnable_ns;
	__u64 longest_ns;     /* of one sleep */
	__u64 futex;	      /* slept for last */
	__s32 longest_kernel; /* stack of that sleep */
	__s32 kernel;
	__u32 locks;  /* futexes slept for, each as often as another came between */
	__u32 asleep; /* this time it sleeps, rather than waits for a CPU */
};

static __always_inline void burst_count(__u32 why)
{
	__u64 *count = bpf_map_lookup_elem(&burst_missed, &why);

	if (count)
		(*count)++;
}

static __always_inline bool burst_is_over(__u64 now)
{
	return now >= burst_run.deadline_ns;
}

static __always_inline void burst_sampled(__u32 tid, __u32 place)
{
	struct burst_place key = { .tid = tid, .place = place };
	__u64 one = 1, *count = bpf_map_lookup_elem(&burst_sample, &key);

	if (count)
		__sync_fetch_and_add(count, 1);
	else if (bpf_map_update_elem(&burst_sample, &key, &one, BPF_NOEXIST)) {
		count = bpf_map_lookup_elem(&burst_sample, &key);
		if (count)
			__sync_fetch_and_add(count, 1);
		else
			burst_count(MISSED_threads_full);
	}
}

/* The stack of the program below the present call; the same stack has the same number. */
static __always_inline __s32 burst_user_stack(void *ctx)
{
	long id = bpf_get_stackid(ctx, &burst_stacks, BPF_F_USER_STACK);

	if (id >= 0)
		return id;
	burst_count(MISSED_stacks);
	return BURST_NO_STACK;
}

static __always_inline void burst_leaves(const bool raw, struct burst_off *off, struct task_struct *task,
					 __u32 state, __u64 now)
{
	struct whyspan_call call = { .nr = -2 };

	off->since_ns = now;
	off->asleep = !!(state & BURST_TASK_STATES);
	if (!off->asleep)
		return;
	if (raw)
		whyspan_find_call(task, &call);
	else
		whyspan_read_call(task, &call);
	if (call.nr != NR_FUTEX && call.nr != NR_FUTEX_WAIT)
		return;
	if (call.arg[0] != off->futex)
		off->locks++;
	off->futex = call.arg[0];
}

static __always_inline void burst_returns(struct burst_off *off, __u64 now)
{
	__u64 away = now - off->since_ns;

	if (!off->since_ns)
		return;
	off->since_ns = 0;
	if (!off->asleep) {
		off->runnable_ns += away;
		return;
	}
	off->blocked_ns += away;
	if (away > off->longest_ns) {
		off->longest_ns = away;
		off->longest_kernel = off->kernel;
	}
}

/*
 * A switch, at four programs: typed or not, with the state as an argument or, before "sched/tracing: Append
 * prev_state to tp args instead" (5.19), without.
 */
#define BURST_SWITCH(on_switch)                                                                              \
	SEC("tp_btf/sched_switch")                                                                           \
	int BPF_PROG(burst_switch_tp, bool preempt, struct task_struct *prev, struct task_struct *next,      \
		     unsigned int prev_state)                                                                \
	{                                                                                                    \
		return on_switch(false, ctx, preempt, prev, next, prev_state);                               \
	}                                                                                                    \
	SEC("tp_btf/sched_switch")                                                                           \
	int BPF_PROG(burst_switch_tp3, bool preempt, struct task_struct *prev, struct task_struct *next)     \
	{                                                                                                    \
		return on_switch(false, ctx, preempt, prev, next, BPF_CORE_READ(prev, __state));             \
	}                                                                                                    \
	SEC("raw_tp/sched_switch")                                                                           \
	int BPF_PROG(burst_switch_raw, bool preempt, struct task_struct *prev, struct task_struct *next,     \
		     unsigned int prev_state)                                                                \
	{                                                                                                    \
		return on_switch(true, ctx, preempt, prev, next, prev_state);                                \
	}                                                                                                    \
	SEC("raw_tp/sched_switch")                                                                           \
	int BPF_PROG(burst_switch_raw3, bool preempt, struct task_struct *prev, struct task_struct *next)    \
	{                                                                                                    \
		return on_switch(true, ctx, preempt, prev, next, BPF_CORE_READ(prev, __state));              \
	}
