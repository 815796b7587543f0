// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * python_gc: collections of CPython's cyclic garbage collector that take long.
 *
 * Where the interpreter has USDT notes (python:gc__start and gc__done, a nop each until their semaphores are
 * up) these are hooked. Else, by symbol, the entry and the return of the function that collects. The return
 * is hooked by a return probe, which is not put into every process, see user_hooks.py, safety.py and
 * catchers.py. Where it is refused a collection has ended at the latest when the next one of its thread
 * begins; its start is told too, so that user space can tell an end from what the thread did next. Such ends
 * are told as inferred.
 *
 * Reads one register, or one word of the caller's stack: the generation. No object, no type.
 *
 * Cost: two traps of about 1 us per collection, a record only for one of min_us or more; an interpreter that
 * allocates makes some hundred collections of its youngest generation a second, of some 10 to 100 us each.
 */
#include "whyspan.bpf.h"
#include "usdt.bpf.h"

WHYSPAN_KINDS(python_gc, KIND_gc_pause, KIND_gc_start);

struct python_gc_cfg {
	__u32 min_us; /* shorter collections are not reported; default 1000 */
	__u32 _pad;
};
const volatile struct python_gc_cfg cfg = { .min_us = 1000 };

#define UNKNOWN_GENERATION 0xff
#define INFERRED 0x100 /* the end was not seen: this is when the next one began */

struct gc_pause {
	struct whyspan_head head; /* aux = generation, UNKNOWN_GENERATION, INFERRED */
	__u64 begin_ns;
	__s64 collected;
	__u64 _pad[2];
};
WHYSPAN_EVENT(gc_pause);

struct gc_start {
	struct whyspan_head head; /* aux = generation */
	__u64 _pad[4];
};
WHYSPAN_EVENT(gc_start);

/* Numbers of python_gc.py's notes. */
enum note { NOTE_START, NOTE_DONE };

struct collection {
	__u64 begin_ns;
	__u32 generation;
	__u32 _pad;
};

/* Collections in progress by thread. A lost entry is a collection that goes unreported. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct collection);
} python_gc_open SEC(".maps");

/* Processes whose returns are seen: their starts need not be told. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u32);
} python_gc_returns SEC(".maps");

static __always_inline void report(const struct collection *c, __u64 now, __u64 id, __u32 flags,
				   __s64 collected)
{
	struct gc_pause *e;

	if (now - c->begin_ns < cfg.min_us * 1000ULL)
		return;
	e = whyspan_reserve(KIND_gc_pause, now, (__u32)id, id >> 32, c->generation | flags);
	if (!e)
		return;
	e->begin_ns = c->begin_ns;
	e->collected = collected;
	e->_pad[0] = e->_pad[1] = 0;
	whyspan_submit(e);
}

static __always_inline void begin(__u64 id, __u64 now, __s64 generation)
{
	struct collection c = { .begin_ns = now, .generation = UNKNOWN_GENERATION };
	__u32 tid = id;

	if (generation >= 0 && generation <= 2)
		c.generation = generation;
	bpf_map_update_elem(&python_gc_open, &tid, &c, BPF_ANY);
}

static __always_inline void end(__u64 id, __u64 now, __s64 collected)
{
	__u32 tid = id;
	struct collection *c = bpf_map_lookup_elem(&python_gc_open, &tid);

	if (!c)
		return;
	report(c, now, id, 0, collected);
	bpf_map_delete_elem(&python_gc_open, &tid);
}

static __always_inline int on_note(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), cookie = bpf_get_attach_cookie(ctx);
	__s64 value = -1;

	if (!whyspan_is_watched(id >> 32))
		return 0;
	if (!whyspan_note_argument(ctx, cookie, &value))
		value = -1;
	if (whyspan_note_number(cookie) == NOTE_START)
		begin(id, bpf_ktime_get_ns(), value);
	else
		end(id, bpf_ktime_get_ns(), value);
	return 0;
}

/* gc_collect_main(tstate, generation, ...), _PyGC_Collect(tstate, generation, reason). */
static __always_inline int on_entry(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
	__u32 tid = id, tgid = id >> 32, generation = PT_REGS_PARM2(ctx);
	struct collection *last;

	if (!whyspan_is_watched(tgid))
		return 0;
	if (!bpf_map_lookup_elem(&python_gc_returns, &tgid)) {
		last = bpf_map_lookup_elem(&python_gc_open, &tid);
		/* The youngest generation's are short, and what comes between two of them is the program's.
		 */
		if (last && last->generation)
			report(last, now, id, INFERRED, -1);
		if (generation) {
			struct gc_start *e = whyspan_reserve(KIND_gc_start, now, tid, tgid, generation);

			if (e) {
				e->_pad[0] = e->_pad[1] = e->_pad[2] = e->_pad[3] = 0;
				whyspan_submit(e);
			}
		}
	}
	begin(id, now, generation);
	return 0;
}

static __always_inline int on_return(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tgid = id >> 32, one = 1;

	if (!whyspan_is_watched(tgid))
		return 0;
	if (!bpf_map_lookup_elem(&python_gc_returns, &tgid))
		bpf_map_update_elem(&python_gc_returns, &tgid, &one, BPF_ANY);
	end(id, bpf_ktime_get_ns(), PT_REGS_RC(ctx));
	return 0;
}

WHYSPAN_USER_PROBE(python_gc_note, "uprobe", on_note(ctx))
WHYSPAN_USER_PROBE(python_gc_entry, "uprobe", on_entry(ctx))
WHYSPAN_USER_PROBE(python_gc_return, "uretprobe", on_return(ctx))

char LICENSE[] SEC("license") = "Dual BSD/GPL";
