// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * power: from which idle state of its CPU a watched thread was woken, and CPUs below their base frequency.
 *
 * Hooks cpu_idle, which notes the state in a word of this CPU (nothing is displaced: the CPU was idle), and
 * sched_switch, which leaves at once unless the CPU comes out of idleness to run a watched thread. Only
 * states from cfg.deep_state on are a record; on x86 the deeper ones cost 50 us and more to leave.
 * cpu_frequency is a record when a CPU falls below, or comes back to, cfg.base_khz; 0, the default, keeps
 * silent. Reads kernel memory only.
 *
 * Virtual machines have neither deep states nor frequencies: there it is loaded and has nothing to say. What
 * it says of real ones is tested on made-up events only.
 */
#include "whyspan.bpf.h"

WHYSPAN_KINDS(power, KIND_power_woken, KIND_power_frequency);

#define NOT_IDLE 0xffffffffu /* PWR_EVENT_EXIT, include/linux/cpuidle.h and trace/events/power.h */

struct power_cfg {
	__u32 deep_state; /* the first idle state that counts; default 2 */
	__u32 base_khz;	  /* frequencies below are reported; 0 = none */
};
const volatile struct power_cfg cfg = { .deep_state = 2 };

struct power_woken {
	struct whyspan_head
		head;  /* subject: the thread that got the CPU; aux = idle state that the CPU left */
	__u64 idle_ns; /* how long the CPU was in it */
	__u64 left_ns; /* since it left it */
	__u64 _pad[2];
};
WHYSPAN_EVENT(power_woken);

struct power_frequency {
	struct whyspan_head head; /* no subject; aux = CPU */
	__u32 khz;
	__u32 before_khz;
	__u64 _pad[3];
};
WHYSPAN_EVENT(power_frequency);

struct power_state {
	__u32 state; /* left last, or is in */
	__u32 _pad;
	__u64 entered_ns;
	__u64 left_ns; /* 0: its exit has been looked at */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct power_state);
} power_cpu SEC(".maps");

/* By CPU; the frequency of one may be set by another. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u32);
} power_khz SEC(".maps");

static __always_inline int on_idle(__u32 state)
{
	__u32 zero = 0;
	struct power_state *s = bpf_map_lookup_elem(&power_cpu, &zero);

	if (!s)
		return 0;
	if (state != NOT_IDLE) {
		s->state = state;
		if (state >= cfg.deep_state)
			s->entered_ns = bpf_ktime_get_ns();
	} else if (s->state >= cfg.deep_state) {
		s->left_ns = bpf_ktime_get_ns();
	}
	return 0;
}

SEC("tp_btf/cpu_idle")
int BPF_PROG(power_idle_tp, unsigned int state, unsigned int cpu)
{
	return on_idle(state);
}

SEC("raw_tp/cpu_idle")
int BPF_PROG(power_idle_raw, unsigned int state, unsigned int cpu)
{
	return on_idle(state);
}

static __always_inline int on_switch(const bool raw, struct task_struct *prev, struct task_struct *next)
{
	__u32 zero = 0, tgid;
	struct power_state *s;
	struct power_woken *e;

	if (WHYSPAN_FIELD(raw, prev, pid))
		return 0;
	s = bpf_map_lookup_elem(&power_cpu, &zero);
	if (!s || !s->left_ns)
		return 0;
	tgid = WHYSPAN_FIELD(raw, next, tgid);
	if (whyspan_is_watched(tgid)) {
		__u64 now = bpf_ktime_get_ns();

		e = whyspan_reserve(KIND_power_woken, now, WHYSPAN_FIELD(raw, next, pid), tgid, s->state);
		if (e) {
			e->idle_ns = s->left_ns - s->entered_ns;
			e->left_ns = now - s->left_ns;
			e->_pad[0] = e->_pad[1] = 0;
			whyspan_submit(e);
		}
	}
	s->left_ns = 0;
	return 0;
}

SEC("tp_btf/sched_switch")
int BPF_PROG(power_switch_tp, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	return on_switch(false, prev, next);
}

SEC("raw_tp/sched_switch")
int BPF_PROG(power_switch_raw, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	return on_switch(true, prev, next);
}

static __always_inline int on_frequency(__u32 khz, __u32 cpu)
{
	__u32 *last = cfg.base_khz ? bpf_map_lookup_elem(&power_khz, &cpu) : NULL, before;
	struct power_frequency *e;

	if (!last)
		return 0;
	before = *last;
	*last = khz;
	if ((khz < cfg.base_khz) == (before && before < cfg.base_khz))
		return 0;
	e = whyspan_reserve(KIND_power_frequency, bpf_ktime_get_ns(), 0, 0, cpu);
	if (!e)
		return 0;
	e->khz = khz;
	e->before_khz = before;
	e->_pad[0] = e->_pad[1] = e->_pad[2] = 0;
	whyspan_submit(e);
	return 0;
}

SEC("tp_btf/cpu_frequency")
int BPF_PROG(power_frequency_tp, unsigned int khz, unsigned int cpu)
{
	return on_frequency(khz, cpu);
}

SEC("raw_tp/cpu_frequency")
int BPF_PROG(power_frequency_raw, unsigned int khz, unsigned int cpu)
{
	return on_frequency(khz, cpu);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
