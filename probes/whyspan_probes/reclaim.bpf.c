// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * reclaim: time in which a watched thread had to free memory before it got some, and whom the OOM killer
 * chose.
 *
 * Hooks the tracepoints around direct reclaim (of the host, of a memory cgroup), around direct compaction,
 * after a throttled wait within them, and mark_victim. None is passed by a thread that gets its memory at
 * once; kswapd and kcompactd are never watched. Reads kernel memory only. A thread's calls that follow each
 * other closely are one record, sent when `least_ns` were spent: so many per second at most, however short
 * the calls are. What a thread spent below that is not told.
 *
 * The tracepoints do not say which memory cgroup was full. It is looked for from the thread's own upwards:
 * the one with the least room below its limit. A limit of memory and swap together (version 1's memsw) is not
 * looked at, nor is the sleep of a thread over memory.high, which comes after its reclaim. Where mark_victim
 * names only a thread (before 6.8), nothing else is known of a victim.
 */
#include "whyspan.bpf.h"

WHYSPAN_KINDS(reclaim, KIND_direct_reclaim, KIND_memcg_reclaim, KIND_compaction, KIND_oom_victim,
	      KIND_oom_name);

#define FLAG_HIGH 0x100u       /* of aux: the limit is memory.high, not memory.max */
#define MAX_LEVELS 8	       /* memory cgroups looked at, from a thread's own upwards */
#define UNLIMITED (1ull << 42) /* pages; PAGE_COUNTER_MAX is 2^47 or more */
#define AT_LIMIT 512	       /* pages: a huge page's charge fails with less room */
#define MAX_U16 0xffffu

struct reclaim_cfg {
	__u64 least_ns; /* time in reclaim that makes a record; default 200 us */
	__u64 gap_ns;	/* calls of a thread farther apart are not one record; default 200 us */
};
const volatile struct reclaim_cfg cfg = { .least_ns = 200000, .gap_ns = 200000 };

/* aux: order of the last allocation; 0x100: the limit is memory.high. Ends at ts_ns. */
#define STRETCH                                                                                              \
	struct whyspan_head head;                                                                            \
	__u64 begin_ns;                                                                                      \
	__u64 cgroup_id;                                                                                     \
	__u32 pages;                                                                                         \
	__u32 limit_pages;                                                                                   \
	__u32 busy_us;                                                                                       \
	__u16 calls;                                                                                         \
	__u16 throttled_ms;

struct direct_reclaim {
	STRETCH
};
WHYSPAN_EVENT(direct_reclaim);

struct memcg_reclaim {
	STRETCH
};
WHYSPAN_EVENT(memcg_reclaim);

struct compaction {
	STRETCH
};
WHYSPAN_EVENT(compaction);

struct oom_victim {
	struct whyspan_head head; /* subject: the victim, tgid 0 where only its thread is known */
	__u64 cgroup_id;	  /* 0: no memory cgroup of the victim was full */
	__u32 limit_pages;
	__u32 usage_pages;
	__u32 anon_pages;
	__u32 file_pages;
	__u32 shmem_pages;
	__u32 uid;
};
WHYSPAN_EVENT(oom_victim);

struct oom_name {
	struct whyspan_head head;
	char comm[16];
	__u32 asker_tid;
	__u32 asker_tgid;
	__s32 score_adj;
	__u32 swap_pages;
};
WHYSPAN_EVENT(oom_name);

/* "mm: convert mm's rss stats into percpu_counter" (6.2) */
struct percpu_counter___rss {
	__s64 count;
} __attribute__((preserve_access_index));

struct mm_struct___percpu {
	struct percpu_counter___rss rss_stat[4];
} __attribute__((preserve_access_index));

struct mm_rss_stat___atomic {
	atomic_long_t count[4];
} __attribute__((preserve_access_index));

struct mm_struct___atomic {
	struct mm_rss_stat___atomic rss_stat;
} __attribute__((preserve_access_index));

/* One thread's calls of one kind so far. */
struct stretch {
	__u64 begin_ns; /* of the first; 0: none yet */
	__u64 open_ns;	/* of the one it is in; 0: in none */
	__u64 last_ns;	/* end of the last */
	__u64 busy_ns;
	__u64 cgroup_id;
	__u64 pages;
	__u32 limit_pages;
	__u32 throttled_us;
	__u32 calls;
	__u32 aux;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64); /* kind << 32 | tid */
	__type(value, struct stretch);
} reclaim_open SEC(".maps");

struct limit {
	__u64 cgroup_id;
	__u64 pages;
	__u64 usage;
	__s64 room;
	__u64 high; /* 1: it is memory.high */
};

static __always_inline __u32 at_most(__u64 value, __u32 most)
{
	return value < most ? value : most;
}

static __always_inline struct mem_cgroup *memcg_of(struct task_struct *task)
{
	struct cgroup_subsys_state *css = NULL;
	struct css_set *set;

	set = BPF_CORE_READ(task, cgroups);
	if (!set)
		return NULL;
	bpf_probe_read_kernel(&css, sizeof(css),
			      (void *)&set->subsys +
				      bpf_core_enum_value(enum cgroup_subsys_id, memory_cgrp_id) *
					      sizeof(void *));
	return (struct mem_cgroup *)css; /* its first member, as in every kernel */
}

/* The memory cgroup with the least room, from `m` upwards; room is what is left below its limit. */
static __always_inline void find_limit(struct mem_cgroup *m, bool high_too, struct limit *found)
{
	for (int i = 0; i < MAX_LEVELS && m; i++) {
		__u64 limit = BPF_CORE_READ(m, memory.max), usage = BPF_CORE_READ(m, memory.usage.counter);
		__u64 high = BPF_CORE_READ(m, memory.high);
		__u64 is_high = high_too && high < limit;

		if (is_high)
			limit = high;
		if (limit < UNLIMITED && (!found->pages || (__s64)(limit - usage) < found->room)) {
			found->pages = limit;
			found->usage = usage;
			found->room = limit - usage;
			found->high = is_high;
			found->cgroup_id = BPF_CORE_READ(m, css.cgroup, kn, id);
		}
		m = (struct mem_cgroup *)BPF_CORE_READ(m, css.parent);
	}
}

static __always_inline int on_begin(__u32 kind, __u32 order)
{
	__u64 id = bpf_get_current_pid_tgid(), now, key = (__u64)kind << 32 | (__u32)id;
	struct stretch fresh = {}, *s;

	if (!whyspan_is_watched(id >> 32))
		return 0;
	now = bpf_ktime_get_ns();
	s = bpf_map_lookup_elem(&reclaim_open, &key);
	if (!s || !s->begin_ns || now - s->last_ns > cfg.gap_ns) {
		fresh.begin_ns = now;
		if (kind == KIND_memcg_reclaim && bpf_core_type_exists(struct mem_cgroup)) {
			struct task_struct *task = (struct task_struct *)bpf_get_current_task();
			struct limit limit = {};
			struct mem_cgroup *m = NULL;

			/* Charged for somebody else: remote charging. */
			if (bpf_core_field_exists(task->active_memcg))
				m = BPF_CORE_READ(task, active_memcg);
			find_limit(m ?: memcg_of(task), true, &limit);
			fresh.cgroup_id = limit.cgroup_id;
			fresh.limit_pages = at_most(limit.pages, -1);
			fresh.aux = limit.high ? FLAG_HIGH : 0;
		}
		fresh.open_ns = now;
		fresh.aux |= order & 0xff;
		bpf_map_update_elem(&reclaim_open, &key, &fresh, BPF_ANY);
		return 0;
	}
	s->open_ns = now;
	s->aux = (s->aux & FLAG_HIGH) | (order & 0xff);
	return 0;
}

static __always_inline int on_end(__u32 kind, __u64 pages)
{
	__u64 id = bpf_get_current_pid_tgid(), now, key = (__u64)kind << 32 | (__u32)id;
	struct direct_reclaim *e; /* all three are alike */
	struct stretch *s;

	s = bpf_map_lookup_elem(&reclaim_open, &key);
	if (!s || !s->open_ns)
		return 0;
	now = bpf_ktime_get_ns();
	s->busy_ns += now - s->open_ns;
	s->pages += pages;
	s->calls++;
	s->open_ns = 0;
	s->last_ns = now;
	if (s->busy_ns < cfg.least_ns)
		return 0;
	e = whyspan_reserve(kind, now, id, id >> 32, s->aux);
	if (e) {
		e->begin_ns = s->begin_ns;
		e->cgroup_id = s->cgroup_id;
		e->pages = at_most(s->pages, -1);
		e->limit_pages = s->limit_pages;
		e->busy_us = at_most(s->busy_ns / 1000, -1);
		e->calls = at_most(s->calls, MAX_U16);
		e->throttled_ms = at_most(s->throttled_us / 1000, MAX_U16);
		whyspan_submit(e);
	}
	s->begin_ns = 0; /* the next begins anew */
	return 0;
}

static __always_inline int on_throttled(__u32 us)
{
	__u64 id = bpf_get_current_pid_tgid();

	if (!whyspan_is_watched(id >> 32))
		return 0;
	for (__u32 kind = KIND_direct_reclaim; kind <= KIND_compaction; kind++) {
		__u64 key = (__u64)kind << 32 | (__u32)id;
		struct stretch *s = bpf_map_lookup_elem(&reclaim_open, &key);

		if (s && s->open_ns)
			s->throttled_us += us;
	}
	return 0;
}

/* MM_FILEPAGES 0, MM_ANONPAGES 1, MM_SWAPENTS 2, MM_SHMEMPAGES 3 */
#define RSS(mm, member)                                                                                      \
	({                                                                                                   \
		__s64 __count = 0;                                                                           \
		if (bpf_core_field_exists(((struct mm_struct___percpu *)(mm))->rss_stat[0].count))           \
			__count = BPF_CORE_READ((struct mm_struct___percpu *)(mm), rss_stat[member].count);  \
		else if (bpf_core_field_exists(((struct mm_struct___atomic *)(mm))->rss_stat.count))         \
			__count = BPF_CORE_READ((struct mm_struct___atomic *)(mm),                           \
						rss_stat.count[member].counter);                             \
		__count > 0 ? at_most(__count, -1) : 0;                                                      \
	})

static __always_inline int on_victim(const bool raw, struct task_struct *task, __u32 uid)
{
	__u64 now = bpf_ktime_get_ns(), id = bpf_get_current_pid_tgid();
	__u32 tid = WHYSPAN_FIELD(raw, task, pid), tgid = WHYSPAN_FIELD(raw, task, tgid);
	struct mm_struct *mm = WHYSPAN_FIELD(raw, task, mm);
	struct limit limit = {};
	struct oom_victim *e;
	struct oom_name *n;

	if (bpf_core_type_exists(struct mem_cgroup))
		find_limit(memcg_of(task), false, &limit);
	if (limit.room > AT_LIMIT)
		limit.cgroup_id = limit.pages = limit.usage =
			0; /* the host's memory was full, not the group's */
	e = whyspan_reserve(KIND_oom_victim, now, tid, tgid, 0);
	if (e) {
		e->cgroup_id = limit.cgroup_id;
		e->limit_pages = at_most(limit.pages, -1);
		e->usage_pages = at_most(limit.usage, -1);
		e->anon_pages = mm ? RSS(mm, 1) : 0;
		e->file_pages = mm ? RSS(mm, 0) : 0;
		e->shmem_pages = mm ? RSS(mm, 3) : 0;
		e->uid = uid;
		whyspan_submit(e);
	}
	n = whyspan_reserve(KIND_oom_name, now, tid, tgid, 0);
	if (n) {
		WHYSPAN_COMM(raw, n->comm, task);
		n->asker_tid = id;
		n->asker_tgid = id >> 32;
		n->score_adj = BPF_CORE_READ(task, signal, oom_score_adj);
		n->swap_pages = mm ? RSS(mm, 2) : 0;
		whyspan_submit(n);
	}
	return 0;
}

/* Before "mm/oom_kill: add more information to mark_victim tracepoint" (6.8) there is only a thread id. */
static __always_inline int on_victim_pid(__u32 tid)
{
	struct oom_victim *e = whyspan_reserve(KIND_oom_victim, bpf_ktime_get_ns(), tid, 0, 0);

	if (!e)
		return 0;
	e->cgroup_id = 0;
	e->limit_pages = e->usage_pages = e->anon_pages = e->file_pages = e->shmem_pages = e->uid = 0;
	whyspan_submit(e);
	return 0;
}

#define BEGIN(attach, name, tracepoint, kind)                                                                \
	SEC(attach "/" tracepoint)                                                                           \
	int BPF_PROG(name, int order)                                                                        \
	{                                                                                                    \
		return on_begin(kind, order);                                                                \
	}
#define END(attach, name, tracepoint, kind)                                                                  \
	SEC(attach "/" tracepoint)                                                                           \
	int BPF_PROG(name, unsigned long pages)                                                              \
	{                                                                                                    \
		return on_end(kind, pages);                                                                  \
	}
/* No argument of compaction's is read: they differ from kernel to kernel. */
#define PLAIN(attach, name, tracepoint, call)                                                                \
	SEC(attach "/" tracepoint)                                                                           \
	int BPF_PROG(name)                                                                                   \
	{                                                                                                    \
		return call;                                                                                 \
	}
#define BOTH(MAKE, name, tracepoint, what)                                                                   \
	MAKE("tp_btf", name##_tp, tracepoint, what)                                                          \
	MAKE("raw_tp", name##_raw, tracepoint, what)

BOTH(BEGIN, reclaim_direct_begin, "mm_vmscan_direct_reclaim_begin", KIND_direct_reclaim)
BOTH(END, reclaim_direct_end, "mm_vmscan_direct_reclaim_end", KIND_direct_reclaim)
BOTH(BEGIN, reclaim_memcg_begin, "mm_vmscan_memcg_reclaim_begin", KIND_memcg_reclaim)
BOTH(END, reclaim_memcg_end, "mm_vmscan_memcg_reclaim_end", KIND_memcg_reclaim)
BOTH(PLAIN, reclaim_compact_begin, "mm_compaction_begin", on_begin(KIND_compaction, 0))
BOTH(PLAIN, reclaim_compact_end, "mm_compaction_end", on_end(KIND_compaction, 0))

/* "mm/vmscan: throttle reclaim until some writeback completes if congested" (5.16) */
SEC("tp_btf/mm_vmscan_throttled")
int BPF_PROG(reclaim_throttled_tp, int nid, int usec_timeout, int usec_delayed)
{
	return on_throttled(usec_delayed);
}

SEC("raw_tp/mm_vmscan_throttled")
int BPF_PROG(reclaim_throttled_raw, int nid, int usec_timeout, int usec_delayed)
{
	return on_throttled(usec_delayed);
}

SEC("tp_btf/mark_victim")
int BPF_PROG(reclaim_victim_tp, struct task_struct *task, uid_t uid)
{
	return on_victim(false, task, uid);
}

SEC("tp_btf/mark_victim")
int BPF_PROG(reclaim_victim_pid_tp, int pid)
{
	return on_victim_pid(pid);
}

/* The second argument is read, so that a kernel with one refuses it. */
SEC("raw_tp/mark_victim")
int BPF_PROG(reclaim_victim_raw, struct task_struct *task, uid_t uid)
{
	return on_victim(true, task, uid);
}

SEC("raw_tp/mark_victim")
int BPF_PROG(reclaim_victim_pid_raw, int pid)
{
	return on_victim_pid(pid);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
