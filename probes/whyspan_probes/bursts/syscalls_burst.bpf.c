// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * syscalls_burst: how long the system calls of one process take, added up in the kernel by thread and call: a
 * histogram by powers of two, the time asleep in them, the kernel's stack of the longest sleep and the
 * program's stack of the slowest call.
 *
 * Hooks the functions of all system calls (kprobe.multi, 5.18, on kernels with kprobes), else the raw
 * tracepoints of entry and exit. Either runs for every process of the host and turns away all but one. Raw
 * tracepoints also send every system call of the host the slow way: getppid takes 100 -> 168 ns. For seconds
 * only.
 *
 * A row belongs to one thread, so that no two CPUs add to it at a time. What a call was given is not looked
 * at.
 */
#include "burst.bpf.h"

#define ROWS 4096

enum syscall_buckets {
	BUCKETS = 40, /* bucket n: less than 2^n ns, and at least half of that; the last: all above */
};
enum syscall_buckets *unused_syscall_buckets __attribute__((unused));

struct syscall_key {
	__u32 tid;
	__s32 nr;
};

struct syscall_sum {
	__u64 calls;
	__u64 errors; /* results of -4095 to -1 */
	__u64 total_ns;
	__u64 blocked_ns;  /* asleep within the call */
	__u64 runnable_ns; /* ready to run within the call, and not running */
	__u64 max_ns;
	__u64 longest_ns;     /* of one sleep */
	__s32 longest_kernel; /* the kernel's stack at that */
	__s32 slowest;	      /* the program's stack at the slowest call */
	char comm[16];
};

struct syscall_row {
	struct syscall_sum sum;
	__u64 buckets[BUCKETS];
};

struct syscall_call {
	__u64 begin_ns; /* 0: in none */
	__s32 nr;
	__u32 _pad;
	struct burst_off off;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, BURST_THREADS);
	__type(key, __u32);
	__type(value, struct syscall_call);
} syscall_calls SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, ROWS);
	__type(key, struct syscall_key);
	__type(value, struct syscall_row);
} syscall_rows SEC(".maps");

/* A new row: too large for the stack. */
static const struct syscall_row empty_row;

static __always_inline __u32 bucket_of(__u64 ns)
{
	__u32 bits = 0;

	if (ns >> 32) {
		bits += 32;
		ns >>= 32;
	}
	if (ns >> 16) {
		bits += 16;
		ns >>= 16;
	}
	if (ns >> 8) {
		bits += 8;
		ns >>= 8;
	}
	if (ns >> 4) {
		bits += 4;
		ns >>= 4;
	}
	if (ns >> 2) {
		bits += 2;
		ns >>= 2;
	}
	bits += ns >> 1 ? 2 : ns;
	return bits < BUCKETS ? bits : BUCKETS - 1;
}

static __always_inline int on_enter(__s32 nr)
{
	__u64 id = bpf_get_current_pid_tgid(), now;
	struct syscall_call *call, fresh = {};
	__u32 tid = id;

	if (id >> 32 != burst_run.tgid)
		return 0;
	now = bpf_ktime_get_ns();
	if (burst_is_over(now))
		return 0;
	call = bpf_map_lookup_elem(&syscall_calls, &tid);
	if (!call) {
		bpf_map_update_elem(&syscall_calls, &tid, &fresh, BPF_NOEXIST);
		call = bpf_map_lookup_elem(&syscall_calls, &tid);
	}
	if (!call) {
		burst_count(MISSED_threads_full);
		return 0;
	}
	if (call->begin_ns)
		burst_count(MISSED_begins); /* rt_sigreturn, exit and execve end otherwise */
	call->begin_ns = 0;
	barrier();
	call->nr = nr;
	call->off = fresh.off;
	call->off.kernel = call->off.longest_kernel = BURST_NO_STACK;
	barrier();
	call->begin_ns = now;
	return 0;
}

static __always_inline struct syscall_row *row_of(const struct syscall_key *key)
{
	struct syscall_row *row = bpf_map_lookup_elem(&syscall_rows, key);

	if (row)
		return row;
	bpf_map_update_elem(&syscall_rows, key, &empty_row, BPF_NOEXIST);
	row = bpf_map_lookup_elem(&syscall_rows, key);
	if (!row) {
		burst_count(MISSED_rows_full);
		return NULL;
	}
	bpf_get_current_comm(row->sum.comm, sizeof(row->sum.comm));
	row->sum.longest_kernel = row->sum.slowest = BURST_NO_STACK;
	return row;
}

static __always_inline int on_exit(void *ctx, long result)
{
	__u64 id = bpf_get_current_pid_tgid(), now, took;
	struct syscall_call *call;
	struct syscall_row *row;
	struct syscall_key key;
	__u32 tid = id, bucket;

	if (id >> 32 != burst_run.tgid)
		return 0;
	now = bpf_ktime_get_ns();
	if (burst_is_over(now))
		return 0;
	call = bpf_map_lookup_elem(&syscall_calls, &tid);
	if (!call) /* it began before the burst */
		return 0;
	if (!call->begin_ns) {
		burst_count(MISSED_ends);
		return 0;
	}
	took = now - call->begin_ns;
	call->begin_ns = 0;
	barrier();
	key.tid = tid;
	key.nr = call->nr;
	row = row_of(&key);
	if (!row)
		return 0;
	row->sum.calls++;
	row->sum.errors += result < 0 && result >= -4095;
	row->sum.total_ns += took;
	row->sum.blocked_ns += call->off.blocked_ns;
	row->sum.runnable_ns += call->off.runnable_ns;
	if (call->off.longest_ns > row->sum.longest_ns) {
		row->sum.longest_ns = call->off.longest_ns;
		row->sum.longest_kernel = call->off.longest_kernel;
	}
	if (took > row->sum.max_ns) {
		row->sum.max_ns = took;
		row->sum.slowest = burst_user_stack(ctx);
	}
	bucket = bucket_of(took);
	if (bucket < BUCKETS)
		row->buckets[bucket]++;
	return 0;
}

/* The number of the call of which this is the function: its argument is the program's registers. */
static __always_inline __s32 number_of(struct pt_regs *ctx)
{
	const struct pt_regs *program = (const struct pt_regs *)PT_REGS_PARM1(ctx);

#if defined(__TARGET_ARCH_x86)
	return BPF_CORE_READ(program, orig_ax);
#else
	return BPF_CORE_READ(program, syscallno);
#endif
}

static __always_inline int on_sample(void)
{
	__u64 id = bpf_get_current_pid_tgid();

	if (!burst_is_over(bpf_ktime_get_ns()))
		burst_sampled(id >> 32 == burst_run.tgid ? id : 0, 0);
	return 0;
}

static __always_inline int on_switch(const bool raw, void *ctx, bool preempt, struct task_struct *prev,
				     struct task_struct *next, __u32 prev_state)
{
	struct syscall_call *call;
	__u32 tid;

	if (WHYSPAN_FIELD(raw, prev, tgid) == burst_run.tgid) {
		tid = WHYSPAN_FIELD(raw, prev, pid);
		call = bpf_map_lookup_elem(&syscall_calls, &tid);
		if (call && call->begin_ns) {
			burst_leaves(raw, &call->off, prev, preempt ? 0 : prev_state, bpf_ktime_get_ns());
			if (call->off.asleep)
				call->off.kernel = bpf_get_stackid(ctx, &burst_stacks, 0);
		}
	}
	if (WHYSPAN_FIELD(raw, next, tgid) == burst_run.tgid) {
		tid = WHYSPAN_FIELD(raw, next, pid);
		call = bpf_map_lookup_elem(&syscall_calls, &tid);
		if (call && call->begin_ns)
			burst_returns(&call->off, bpf_ktime_get_ns());
	}
	return 0;
}

#if defined(__TARGET_ARCH_x86)
#define FUNCTIONS "__x64_sys_*"
#else
#define FUNCTIONS "__arm64_sys_*"
#endif

SEC("kprobe.multi/" FUNCTIONS)
int syscalls_enter_kprobe(struct pt_regs *ctx)
{
	return on_enter(number_of(ctx));
}

SEC("kretprobe.multi/" FUNCTIONS)
int syscalls_exit_kprobe(struct pt_regs *ctx)
{
	return on_exit(ctx, PT_REGS_RC(ctx));
}

SEC("kprobe.multi/" FUNCTIONS)
int syscalls_sample_kprobe(struct pt_regs *ctx)
{
	return on_sample();
}

SEC("raw_tp/sys_enter")
int BPF_PROG(syscalls_enter_raw, struct pt_regs *regs, long nr)
{
	return on_enter(nr);
}

SEC("raw_tp/sys_exit")
int BPF_PROG(syscalls_exit_raw, struct pt_regs *regs, long result)
{
	return on_exit(ctx, result);
}

SEC("raw_tp/sys_enter")
int BPF_PROG(syscalls_sample_raw, struct pt_regs *regs, long nr)
{
	return on_sample();
}

BURST_SWITCH(on_switch)

char LICENSE[] SEC("license") = "Dual BSD/GPL";
