// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * sched: who runs, who waits, and who woke whom, for every thread of the watched processes.
 *
 * Hooks sched_switch, sched_waking, fork, exec and exit through BTF-typed tracepoints, and the entry and exit
 * of interrupts to know in which context a wake-up was made. Kernels without BTF get the same functions as
 * raw tracepoints, which read each field by a probe read, at one and a half to two times the cost. Reads
 * kernel memory only. A switch of two unwatched threads leaves after two hash look-ups. Cost measured on a
 * loaded server: about 0.3 us per recorded event.
 *
 * A thread's system call is read from its saved registers, which are stale or foreign for kernel threads,
 * io workers, stopped tasks and 32-bit callers: those report -2.
 */
#include "whyspan.bpf.h"
#include "sched_events.bpf.h"

#define FLAG_PREEMPTED 1u
#define FLAG_THROTTLED 2u
#define FLAG_CALL_VALID 4u
#define FLAG_YIELDED 8u

#define STOLEN_VECTORS 0x7cu /* NET_TX, NET_RX, BLOCK, IRQ_POLL, TASKLET. include/linux/interrupt.h */

#define TICK_NS 4000000ULL /* CONFIG_HZ=250, until it is measured */
#define ENOUGH_TICKS 100

#define BLOCKED_STATES 0x3u /* TASK_INTERRUPTIBLE | TASK_UNINTERRUPTIBLE */
#define STOPPED_STATES 0xcu /* __TASK_STOPPED | __TASK_TRACED */

struct sched_cfg {
	__u32 names; /* 1 = name the foreign threads that ran or woke beside ours; default 1 */
	__u32 _pad;
};
const volatile struct sched_cfg cfg = { .names = 1 };

/* Fields younger than the oldest kernel we support. */
struct task_struct___throttled {
	bool throttled; /* "sched/fair: Switch to task based throttle model" (6.18) */
} __attribute__((preserve_access_index));

struct cfs_rq___self_time {
	__u64 throttled_clock_self_time; /* "sched: Add throttled_clock_self" (6.6) */
} __attribute__((preserve_access_index));

enum waker_context { CONTEXT_TASK, CONTEXT_HRTIMER, CONTEXT_SOFTIRQ, CONTEXT_HARDIRQ };

struct irq_state {
	__u8 hrtimer;
	__u8 hardirq;
	__u8 softirq; /* vector + 1 */
	__u8 _pad;
	__u32 _pad2;
	__u64 jiffies;	     /* when the soft interrupt began */
	__u64 first_ns;	     /* of two readings of both clocks: */
	__u64 first_jiffies; /* how long a tick is */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct irq_state);
} sched_irq SEC(".maps");

/* Foreign threads already named: tid -> start time and name mixed, so that a reused or renamed one is named
 * again. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u64);
} sched_named SEC(".maps");

/*
 * Processes just gone: tgid -> start time. Threads that die together pass the tracepoint in any order, so
 * that some come after the one that ended the process.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, __u64);
} sched_dead SEC(".maps");

static __always_inline void name_once(const bool raw, struct task_struct *task, __u64 now)
{
	__u32 tid = WHYSPAN_FIELD(raw, task, pid);
	__u64 start = WHYSPAN_FIELD(raw, task, start_time), text[2], *seen;
	struct sched_name *e;

	if (!cfg.names || !tid)
		return;
	bpf_probe_read_kernel(text, sizeof(text), task->comm);
	start ^= text[0] ^ text[1] << 1;
	seen = bpf_map_lookup_elem(&sched_named, &tid);
	if (seen && *seen == start)
		return;
	bpf_map_update_elem(&sched_named, &tid, &start, BPF_ANY);
	e = whyspan_reserve(KIND_sched_name, now, tid, WHYSPAN_FIELD(raw, task, tgid), 0);
	if (!e)
		return;
	WHYSPAN_COMM(raw, e->comm, task);
	e->cgroup_id = BPF_CORE_READ(task, cgroups, dfl_cgrp, kn, id);
	e->flags = WHYSPAN_FIELD(raw, task, flags);
	e->ppid = BPF_CORE_READ(task, real_parent, tgid);
	whyspan_submit(e);
}

static __always_inline __u64 throttled_time(const bool raw, struct task_struct *task)
{
	struct cfs_rq___self_time *rq = (void *)WHYSPAN_FIELD(raw, task, se.cfs_rq);

	if (!bpf_core_field_exists(rq->throttled_clock_self_time))
		return 0;
	return WHYSPAN_FIELD(raw, rq, throttled_clock_self_time);
}

static __always_inline bool is_throttled(const bool raw, struct task_struct *task)
{
	struct task_struct___throttled *t = (void *)task;
	struct cfs_rq *rq;

	if (bpf_core_field_exists(t->throttled))
		return WHYSPAN_FIELD(raw, t, throttled);
	rq = WHYSPAN_FIELD(raw, task, se.cfs_rq);
	return WHYSPAN_FIELD(raw, rq, throttle_count) > 0;
}

static __always_inline void read_call(const bool raw, struct task_struct *task, struct whyspan_call *call)
{
	if (raw)
		whyspan_find_call(task, call);
	else
		whyspan_read_call(task, call);
}

static __always_inline int on_switch(const bool raw, bool preempt, struct task_struct *prev,
				     struct task_struct *next, __u32 prev_state)
{
	__u32 prev_tgid = WHYSPAN_FIELD(raw, prev, tgid), next_tgid = WHYSPAN_FIELD(raw, next, tgid);
	/* Kernel threads, the idle task among them, are never watched: no look-up for half of all switches.
	 */
	bool out = !(WHYSPAN_FIELD(raw, prev, flags) & PF_KTHREAD) && whyspan_is_watched(prev_tgid);
	bool in = prev_tgid == next_tgid ?
			  out :
			  !(WHYSPAN_FIELD(raw, next, flags) & PF_KTHREAD) && whyspan_is_watched(next_tgid);
	__u64 now;

	if (!out && !in)
		return 0;
	now = bpf_ktime_get_ns();
	if (out) {
		struct whyspan_call call = { .nr = -2 };
		__u32 flags = preempt ? FLAG_PREEMPTED : 0;
		struct sched_switch_out *e;

		if (!prev_state && is_throttled(raw, prev))
			flags |= FLAG_THROTTLED;
		if (!(prev_state & STOPPED_STATES) &&
		    !(WHYSPAN_FIELD(raw, prev, flags) & (PF_KTHREAD | PF_IO_WORKER | PF_USER_WORKER))) {
			read_call(raw, prev, &call);
			if (prev_state & BLOCKED_STATES) {
				flags |= call.nr != -2 ? FLAG_CALL_VALID : 0;
			} else {
				/* Who yields spins: it waits for something that no wake-up will announce. */
				flags |= call.nr == NR_SCHED_YIELD && !prev_state ? FLAG_YIELDED : 0;
				call.nr = -2;
			}
		}
		e = whyspan_reserve(KIND_sched_switch_out, now, WHYSPAN_FIELD(raw, prev, pid), prev_tgid,
				    prev_state);
		if (e) {
			e->next_tid = WHYSPAN_FIELD(raw, next, pid);
			e->next_tgid = next_tgid;
			e->syscall_nr = call.nr;
			e->flags = flags;
			e->throttled_ns = throttled_time(raw, prev);
			e->arg0 = call.nr >= 0 ? call.arg[0] : 0;
			whyspan_submit(e);
		}
		if (!in && !prev_state)
			name_once(raw, next, now);
	}
	if (in) {
		struct sched_switch_in *e = whyspan_reserve(KIND_sched_switch_in, now,
							    WHYSPAN_FIELD(raw, next, pid), next_tgid, 0);

		if (e) {
			e->prev_tid = WHYSPAN_FIELD(raw, prev, pid);
			e->prev_tgid = prev_tgid;
			e->throttled_ns = throttled_time(raw, next);
			e->prev_state = prev_state;
			e->prev_flags = WHYSPAN_FIELD(raw, prev, flags);
			e->_pad = 0;
			whyspan_submit(e);
		}
		if (!out)
			name_once(raw, prev, now);
	}
	return 0;
}

SEC("tp_btf/sched_switch")
int BPF_PROG(sched_switch_tp, bool preempt, struct task_struct *prev, struct task_struct *next,
	     unsigned int prev_state)
{
	return on_switch(false, preempt, prev, next, prev_state);
}

/* Before "sched/tracing: Append prev_state to tp args instead" (5.19) there are three arguments. */
SEC("tp_btf/sched_switch")
int BPF_PROG(sched_switch_tp3, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	return on_switch(false, preempt, prev, next, BPF_CORE_READ(prev, __state));
}

SEC("raw_tp/sched_switch")
int BPF_PROG(sched_switch_raw, bool preempt, struct task_struct *prev, struct task_struct *next,
	     unsigned int prev_state)
{
	return on_switch(true, preempt, prev, next, prev_state);
}

SEC("raw_tp/sched_switch")
int BPF_PROG(sched_switch_raw3, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	return on_switch(true, preempt, prev, next, BPF_CORE_READ(prev, __state));
}

static __always_inline int on_waking(const bool raw, struct task_struct *p)
{
	__u32 tgid = WHYSPAN_FIELD(raw, p, tgid), zero = 0, context = CONTEXT_TASK, vec = 0;
	struct whyspan_call call = { .nr = -2 };
	struct task_struct *waker;
	struct irq_state *irq;
	struct sched_wake *e;
	__u64 now;

	if (!whyspan_is_watched(tgid))
		return 0;
	now = bpf_ktime_get_ns();
	waker = raw ? (struct task_struct *)bpf_get_current_task() : bpf_get_current_task_btf();
	irq = bpf_map_lookup_elem(&sched_irq, &zero);
	if (irq) {
		vec = irq->softirq;
		context = irq->hrtimer ? CONTEXT_HRTIMER :
			  irq->hardirq ? CONTEXT_HARDIRQ :
			  vec	       ? CONTEXT_SOFTIRQ :
					 CONTEXT_TASK;
	}
	if (!(WHYSPAN_FIELD(raw, waker, flags) & (PF_KTHREAD | PF_IO_WORKER | PF_USER_WORKER)))
		read_call(raw, waker, &call);
	e = whyspan_reserve(KIND_sched_wake, now, WHYSPAN_FIELD(raw, p, pid), tgid, context);
	if (!e)
		return 0;
	e->waker_tid = WHYSPAN_FIELD(raw, waker, pid);
	e->waker_tgid = WHYSPAN_FIELD(raw, waker, tgid);
	e->waker_nr = call.nr;
	e->softirq_vec = vec ? vec - 1 : 0;
	e->target_cpu = WHYSPAN_FIELD(raw, p, wake_cpu);
	e->flags = WHYSPAN_FIELD(raw, waker, flags);
	e->_pad = 0;
	whyspan_submit(e);
	if (context == CONTEXT_TASK && WHYSPAN_FIELD(raw, waker, tgid) != tgid &&
	    !whyspan_is_watched(WHYSPAN_FIELD(raw, waker, tgid)))
		name_once(raw, waker, now);
	return 0;
}

SEC("tp_btf/sched_waking")
int BPF_PROG(sched_waking_tp, struct task_struct *p)
{
	return on_waking(false, p);
}

SEC("raw_tp/sched_waking")
int BPF_PROG(sched_waking_raw, struct task_struct *p)
{
	return on_waking(true, p);
}

static __always_inline int on_fork(const bool raw, struct task_struct *parent, struct task_struct *child)
{
	__u32 tgid = WHYSPAN_FIELD(raw, parent, tgid), child_tgid = WHYSPAN_FIELD(raw, child, tgid), *service;
	struct sched_fork *e;

	service = bpf_map_lookup_elem(&whyspan_watched, &tgid);
	if (!service)
		return 0;
	if (child_tgid != tgid && bpf_map_update_elem(&whyspan_watched, &child_tgid, service, BPF_ANY))
		whyspan_drop(
			KIND_sched_fork); /* the set is full: the child goes unseen, and that is counted */
	e = whyspan_reserve(KIND_sched_fork, bpf_ktime_get_ns(), WHYSPAN_FIELD(raw, parent, pid), tgid, 0);
	if (!e)
		return 0;
	e->child_tid = WHYSPAN_FIELD(raw, child, pid);
	e->child_tgid = child_tgid;
	WHYSPAN_COMM(raw, e->comm, child);
	e->_pad = 0;
	whyspan_submit(e);
	return 0;
}

SEC("tp_btf/sched_process_fork")
int BPF_PROG(sched_fork_tp, struct task_struct *parent, struct task_struct *child)
{
	return on_fork(false, parent, child);
}

SEC("raw_tp/sched_process_fork")
int BPF_PROG(sched_fork_raw, struct task_struct *parent, struct task_struct *child)
{
	return on_fork(true, parent, child);
}

static __always_inline int on_exec(const bool raw, struct task_struct *p)
{
	__u32 tgid = WHYSPAN_FIELD(raw, p, tgid);
	struct sched_exec *e;

	if (!whyspan_is_watched(tgid))
		return 0;
	e = whyspan_reserve(KIND_sched_exec, bpf_ktime_get_ns(), WHYSPAN_FIELD(raw, p, pid), tgid, 0);
	if (!e)
		return 0;
	WHYSPAN_COMM(raw, e->comm, p);
	e->_pad[0] = e->_pad[1] = 0;
	whyspan_submit(e);
	return 0;
}

SEC("tp_btf/sched_process_exec")
int BPF_PROG(sched_exec_tp, struct task_struct *p)
{
	return on_exec(false, p);
}

SEC("raw_tp/sched_process_exec")
int BPF_PROG(sched_exec_raw, struct task_struct *p)
{
	return on_exec(true, p);
}

static __always_inline int on_exit(const bool raw, struct task_struct *p)
{
	struct task_struct *leader = WHYSPAN_FIELD(raw, p, group_leader);
	__u32 tgid = WHYSPAN_FIELD(raw, p, tgid), gone = 0;
	__u64 start = WHYSPAN_FIELD(raw, leader, start_time), *dead;
	struct sched_exit *e;

	if (!whyspan_is_watched(tgid)) {
		dead = bpf_map_lookup_elem(&sched_dead, &tgid);
		if (!dead || *dead != start)
			return 0;
	} else if (BPF_CORE_READ(p, signal, live.counter) <= 0) {
		bpf_map_update_elem(&sched_dead, &tgid, &start, BPF_ANY);
		gone = !bpf_map_delete_elem(&whyspan_watched,
					    &tgid); /* of threads that die together, one says so */
	}
	e = whyspan_reserve(KIND_sched_exit, bpf_ktime_get_ns(), WHYSPAN_FIELD(raw, p, pid), tgid, gone);
	if (e) {
		e->exit_code = WHYSPAN_FIELD(raw, p, exit_code);
		e->_pad = 0;
		WHYSPAN_COMM(raw, e->comm, p);
		e->_pad2 = 0;
		whyspan_submit(e);
	}
	return 0;
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(sched_exit_tp, struct task_struct *p)
{
	return on_exit(false, p);
}

SEC("raw_tp/sched_process_exit")
int BPF_PROG(sched_exit_raw, struct task_struct *p)
{
	return on_exit(true, p);
}

/*
 * A soft interrupt runs on top of whoever has the CPU and takes its time. Two readings of the clock would
 * treble what these hooks cost, so they read the tick's counter: a soft interrupt that a tick falls into
 * took, on average, as many ticks as it saw. Those that ticks themselves raise (timers, scheduler, RCU) are
 * left out.
 */
static __always_inline void stole(const bool raw, struct irq_state *irq, __u32 vec)
{
	__u64 jiffies = bpf_jiffies64(), ticks = jiffies - irq->jiffies, now, tick_ns = TICK_NS;
	struct whyspan_call call = { .nr = -2 };
	struct sched_stolen *e;
	__u64 id;

	if (!ticks || !(STOLEN_VECTORS >> vec & 1))
		return;
	id = bpf_get_current_pid_tgid();
	if (!whyspan_is_watched(id >> 32))
		return;
	now = bpf_ktime_get_ns();
	if (!irq->first_ns) {
		irq->first_ns = now;
		irq->first_jiffies = jiffies;
	} else if (jiffies - irq->first_jiffies >= ENOUGH_TICKS) {
		tick_ns = (now - irq->first_ns) / (jiffies - irq->first_jiffies);
	}
	read_call(raw, raw ? (struct task_struct *)bpf_get_current_task() : bpf_get_current_task_btf(),
		  &call);
	e = whyspan_reserve(KIND_sched_stolen, now, (__u32)id, id >> 32, vec);
	if (!e)
		return;
	e->stolen_ns = ticks * tick_ns;
	e->syscall_nr = call.nr;
	e->_pad = 0;
	e->_pad2[0] = e->_pad2[1] = 0;
	whyspan_submit(e);
}

static __always_inline int on_hrtimer(__u8 on)
{
	__u32 zero = 0;
	struct irq_state *irq = bpf_map_lookup_elem(&sched_irq, &zero);

	if (irq)
		irq->hrtimer = on;
	return 0;
}

static __always_inline int on_hardirq(__u8 on)
{
	__u32 zero = 0;
	struct irq_state *irq = bpf_map_lookup_elem(&sched_irq, &zero);

	if (irq)
		irq->hardirq = on;
	return 0;
}

static __always_inline int on_softirq(const bool raw, bool on, __u32 vec)
{
	__u32 zero = 0;
	struct irq_state *irq = bpf_map_lookup_elem(&sched_irq, &zero);

	if (!irq)
		return 0;
	irq->softirq = on ? vec + 1 : 0;
	if (on)
		irq->jiffies = bpf_jiffies64();
	else if (irq->jiffies)
		stole(raw, irq, vec);
	return 0;
}

#define IRQ_HOOK(attach, name, tracepoint, call)                                                             \
	SEC(attach "/" tracepoint)                                                                           \
	int BPF_PROG(name, unsigned int vec)                                                                 \
	{                                                                                                    \
		return call;                                                                                 \
	}
#define IRQ_HOOKS(name, tracepoint, call)                                                                    \
	IRQ_HOOK("tp_btf", name, tracepoint, call)                                                           \
	IRQ_HOOK("raw_tp", name##_raw, tracepoint, call)

IRQ_HOOKS(sched_hrtimer_enter, "hrtimer_expire_entry", on_hrtimer(1))
IRQ_HOOKS(sched_hrtimer_exit, "hrtimer_expire_exit", on_hrtimer(0))
IRQ_HOOKS(sched_hardirq_enter, "irq_handler_entry", on_hardirq(1))
IRQ_HOOKS(sched_hardirq_exit, "irq_handler_exit", on_hardirq(0))
IRQ_HOOK("tp_btf", sched_softirq_enter, "softirq_entry", on_softirq(false, true, vec))
IRQ_HOOK("tp_btf", sched_softirq_exit, "softirq_exit", on_softirq(false, false, vec))
IRQ_HOOK("raw_tp", sched_softirq_enter_raw, "softirq_entry", on_softirq(true, true, vec))
IRQ_HOOK("raw_tp", sched_softirq_exit_raw, "softirq_exit", on_softirq(true, false, vec))

char LICENSE[] SEC("license") = "Dual BSD/GPL";
