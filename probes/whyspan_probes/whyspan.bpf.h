/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What every probe shares: the record's head, the sharded rings, the set of watched processes and the
 * drop counters. The maps below are created once by the loader and reused by every object.
 */
#pragma once

#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include "arch.bpf.h"
#include "programs.bpf.h"

#ifndef barrier_var /* younger than the oldest libbpf headers */
#define barrier_var(var) asm volatile("" : "+r"(var))
#endif

#define WHYSPAN_MAX_SHARDS 64
#define WHYSPAN_MAX_KINDS 1024
#define WHYSPAN_MAX_WATCHED 2048 /* its buckets stay within 32 KiB, which the kernel keeps in huge pages */

/* Task flags, include/linux/sched.h; not in BTF because they are macros. */
#define PF_IO_WORKER 0x00000010
#define PF_USER_WORKER 0x00004000
#define PF_KTHREAD 0x00200000

/* First in every event struct; 24 bytes. Units are in the names; tid and tgid are kernel-global. */
struct whyspan_head {
	__u64 ts_ns; /* CLOCK_MONOTONIC */
	__u32 tid;
	__u32 tgid;
	__u16 kind; /* whyspan_run.kind_base + index of the event within its probe */
	__u16 cpu;
	__u32 aux; /* meaning by kind */
};

/* Set by the loader before load. */
const volatile struct {
	__u64 key_secret; /* kernel addresses leave the kernel only XORed with this */
	__u32 shard_mask; /* number of rings - 1, a power of two minus one */
	__u32 wake_every; /* wake the reader once per so many records of a CPU; 0 = never */
	__u16 kind_base;
	__u16 no_btf; /* 1 = the kernel has no BTF of its own: no helper that needs it may be called */
	__u16 _pad[2];
} whyspan_run;

/* Copy a task's name into a field of a record, in either of these ways. */
#define WHYSPAN_COMM(raw, to, task)                                                                          \
	do {                                                                                                 \
		if (raw)                                                                                     \
			bpf_core_read(to, sizeof(to), &(task)->comm);                                        \
		else                                                                                         \
			__builtin_memcpy(to, (task)->comm, sizeof(to));                                      \
	} while (0)

struct whyspan_ring {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, WHYSPAN_MAX_SHARDS);
	__type(key, __u32);
	__array(values, struct whyspan_ring);
} whyspan_rings SEC(".maps");

/* Records that could not be reserved, by kind and CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, WHYSPAN_MAX_KINDS);
	__type(key, __u32);
	__type(value, __u64);
} whyspan_drops SEC(".maps");

/* Records of this object submitted on a CPU since the reader was last woken for them. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} whyspan_unread SEC(".maps");

/* Watched processes by tgid; the value is the loader's number of the service. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, WHYSPAN_MAX_WATCHED);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u32);
} whyspan_watched SEC(".maps");

static __always_inline bool whyspan_is_watched(__u32 tgid)
{
	/* The value, not the pointer: clang merges two look-ups tested for null into ptr |= ptr. */
	__u32 *service = tgid ? bpf_map_lookup_elem(&whyspan_watched, &tgid) : NULL;

	return service != NULL;
}

/*
 * The current task and its system call, for programs that are no tp_btf. The verifier knows the flag's value
 * and drops the other branch before it looks at it.
 */
static __always_inline struct task_struct *whyspan_current(void)
{
	if (whyspan_run.no_btf)
		return (struct task_struct *)bpf_get_current_task();
	return bpf_get_current_task_btf();
}

static __always_inline void whyspan_current_call(struct whyspan_call *call)
{
	if (whyspan_run.no_btf)
		whyspan_find_call((struct task_struct *)bpf_get_current_task(), call);
	else
		whyspan_read_call(bpf_get_current_task_btf(), call);
}

static __always_inline void whyspan_drop(__u32 index)
{
	__u32 kind = whyspan_run.kind_base + index;
	__u64 *count = bpf_map_lookup_elem(&whyspan_drops, &kind);

	if (count)
		(*count)++;
}

/* Opaque name for a kernel object: equal objects, equal keys; the address cannot be recovered. */
static __always_inline __u64 whyspan_key(const void *object)
{
	__u64 address = 0;

	/* The verifier allows no arithmetic on a trusted pointer: read it as a number. */
	bpf_probe_read_kernel(&address, sizeof(address), &object);
	return address ? address ^ whyspan_run.key_secret : 0;
}

/*
 * Reserve one 56-byte record of kind `index` and fill its head. The payload is the caller's: every byte of it
 * must be written. Returns NULL, counted, when the ring is full.
 */
static __always_inline void *whyspan_reserve(__u32 index, __u64 ts_ns, __u32 tid, __u32 tgid, __u32 aux)
{
	__u32 cpu = bpf_get_smp_processor_id();
	__u32 shard = cpu & whyspan_run.shard_mask;
	void *ring = bpf_map_lookup_elem(&whyspan_rings, &shard);
	struct whyspan_head *head;

	if (!ring)
		return NULL;
	head = bpf_ringbuf_reserve(ring, 56, 0);
	if (!head) {
		whyspan_drop(index);
		return NULL;
	}
	head->ts_ns = ts_ns;
	head->tid = tid;
	head->tgid = tgid;
	head->kind = whyspan_run.kind_base + index;
	head->cpu = cpu;
	head->aux = aux;
	return head;
}

/*
 * The reader comes by on a timer; a flood must not have to wait for it. Counted, not drawn: a ring must not
 * overflow by bad luck, and waking the reader rarely lets it read lines that have left this CPU's cache, at
 * half the cost.
 */
static __always_inline void whyspan_submit(void *event)
{
	__u32 zero = 0, *count = bpf_map_lookup_elem(&whyspan_unread, &zero);
	__u64 flags = BPF_RB_NO_WAKEUP;

	if (count && ++*count == whyspan_run.wake_every) {
		*count = 0;
		flags = BPF_RB_FORCE_WAKEUP;
	}
	bpf_ringbuf_submit(event, flags);
}

/* One record is 64 bytes in the ring; keep each type in BTF through a global pointer that nobody reads. */
#define WHYSPAN_EVENT(type)                                                                                  \
	_Static_assert(sizeof(struct type) == 56, #type " must be 56 bytes");                                \
	struct type *unused_##type __attribute__((unused))

/*
 * The probe's event kinds, KIND_<event>, counted from 0; user space reads them from BTF, so that the order is
 * written once.
 */
#define WHYSPAN_KINDS(probe, ...)                                                                            \
	enum probe##_kind{ __VA_ARGS__ };                                                                    \
	enum probe##_kind *unused_##probe##_kind __attribute__((unused))

/*
 * The programs of a hook on threads that leave a CPU: on_switch(raw, preempt, prev, prev_state). Before
 * "sched/tracing: Append prev_state to tp args instead" (5.19) there are three arguments.
 */
#define WHYSPAN_ON_LEAVING(probe, on_switch)                                                                 \
	SEC("tp_btf/sched_switch")                                                                           \
	int BPF_PROG(probe##_switch_tp, bool preempt, struct task_struct *prev, struct task_struct *next,    \
		     unsigned int prev_state)                                                                \
	{                                                                                                    \
		return on_switch(false, preempt, prev, prev_state);                                          \
	}                                                                                                    \
	SEC("tp_btf/sched_switch")                                                                           \
	int BPF_PROG(probe##_switch_tp3, bool preempt, struct task_struct *prev, struct task_struct *next)   \
	{                                                                                                    \
		return on_switch(false, preempt, prev, BPF_CORE_READ(prev, __state));                        \
	}                                                                                                    \
	SEC("raw_tp/sched_switch")                                                                           \
	int BPF_PROG(probe##_switch_raw, bool preempt, struct task_struct *prev, struct task_struct *next,   \
		     unsigned int prev_state)                                                                \
	{                                                                                                    \
		return on_switch(true, preempt, prev, prev_state);                                           \
	}                                                                                                    \
	SEC("raw_tp/sched_switch")                                                                           \
	int BPF_PROG(probe##_switch_raw3, bool preempt, struct task_struct *prev, struct task_struct *next)  \
	{                                                                                                    \
		return on_switch(true, preempt, prev, BPF_CORE_READ(prev, __state));                         \
	}

/*
 * Where "net: Add a sk_data_ready tracepoint" (6.3) is missing: the function that it is in, which sockets
 * have for their sk_data_ready unless a user of the kernel's puts another there.
 */
#define WHYSPAN_ON_READY(name, on_ready)                                                                     \
	SEC("fentry/sock_def_readable")                                                                      \
	int BPF_PROG(name##_fentry, struct sock *sk)                                                         \
	{                                                                                                    \
		return on_ready(false, sk);                                                                  \
	}                                                                                                    \
	SEC("kprobe/sock_def_readable")                                                                      \
	int BPF_KPROBE(name##_kprobe, struct sock *sk)                                                       \
	{                                                                                                    \
		return on_ready(true, sk);                                                                   \
	}

/*
 * The function of a system call is named by architecture, and has the program's registers for its argument:
 * the "syscall wrapper", of x86-64 since 4.17, of arm64 since 4.19. libbpf knows it as ksyscall/NAME.
 */
#if defined(__TARGET_ARCH_x86)
#define WHYSPAN_SYSCALL "__x64_sys_"
#define WHYSPAN_ARGUMENT1(regs) ((regs)->di)
#else
#define WHYSPAN_SYSCALL "__arm64_sys_"
#define WHYSPAN_ARGUMENT1(regs) ((regs)->orig_x0) /* regs[0] is the result by the time of the exit */
#endif
#define WHYSPAN_KSYSCALL_ARGUMENT1(ctx) PT_REGS_PARM1_CORE_SYSCALL((struct pt_regs *)PT_REGS_PARM1(ctx))
