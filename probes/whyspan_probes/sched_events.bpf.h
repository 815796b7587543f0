/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The records of the probe `sched`. */
#pragma once

WHYSPAN_KINDS(sched, KIND_sched_switch_out, KIND_sched_switch_in, KIND_sched_wake, KIND_sched_fork,
	      KIND_sched_exec, KIND_sched_exit, KIND_sched_name, KIND_sched_stolen);

struct sched_switch_out {
	struct whyspan_head head; /* aux = prev_state */
	__u32 next_tid;
	__u32 next_tgid;
	__s32 syscall_nr;
	__u32 flags;
	__u64 throttled_ns;
	__u64 arg0;
};
WHYSPAN_EVENT(sched_switch_out);

struct sched_switch_in {
	struct whyspan_head head;
	__u32 prev_tid;
	__u32 prev_tgid;
	__u64 throttled_ns;
	__u32 prev_state;
	__u32 prev_flags;
	__u64 _pad;
};
WHYSPAN_EVENT(sched_switch_in);

struct sched_wake {
	struct whyspan_head head; /* subject: the wakee; aux = context of the waker */
	__u32 waker_tid;
	__u32 waker_tgid;
	__s32 waker_nr;
	__u32 softirq_vec;
	__u32 target_cpu;
	__u32 flags;
	__u64 _pad;
};
WHYSPAN_EVENT(sched_wake);

struct sched_fork {
	struct whyspan_head head;
	__u32 child_tid;
	__u32 child_tgid;
	char comm[16];
	__u64 _pad;
};
WHYSPAN_EVENT(sched_fork);

struct sched_exec {
	struct whyspan_head head;
	char comm[16];
	__u64 _pad[2];
};
WHYSPAN_EVENT(sched_exec);

struct sched_exit {
	struct whyspan_head head; /* aux = 1 when the whole process is gone */
	__u32 exit_code;
	__u32 _pad;
	char comm[16];
	__u64 _pad2;
};
WHYSPAN_EVENT(sched_exit);

struct sched_name {
	struct whyspan_head head;
	char comm[16];
	__u64 cgroup_id;
	__u32 flags;
	__u32 ppid;
};
WHYSPAN_EVENT(sched_name);

struct sched_stolen {
	struct whyspan_head head; /* subject: the thread that had the CPU; ts_ns = end; aux = vector */
	__u64 stolen_ns;
	__s32 syscall_nr;
	__u32 _pad;
	__u64 _pad2[2];
};
WHYSPAN_EVENT(sched_stolen);
