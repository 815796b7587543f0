// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * malloc_burst: every call of an allocator's functions by one process, added up in the kernel by thread,
 * place, function and size.
 *
 * Hooks entry and return of the functions (uprobes: an entry is a trap, a return probe another) and, while
 * they are on, the scheduler's switches, to tell how long the thread slept within the call and whether for a
 * futex: a lock of the allocator. For seconds only: a call costs about 1.5 us more. Return probes only where
 * safety.py allows them; without one a call is counted at its entry, and its time is not known.
 *
 * Nothing waits in here, nothing is written into the process. A row belongs to one thread, so that no two
 * CPUs add to it at a time. A program of a uprobe can be preempted: a call is not "in progress" while its
 * record is being filled or emptied.
 *
 * Of calls within calls (an allocator that wraps another, realloc that goes on to malloc) the outermost
 * counts; the stack pointer tells them apart.
 */
#include "burst.bpf.h"

#define ROWS 16384
#define REST 8192
#define NO_CLASS 255	 /* of a call that asks for no size */
#define SMALLEST_CLASS 4 /* 16 bytes: no allocator gives less */

/* What a cookie says of a function: where its size is, in the low byte; its number and its file's above. */
enum malloc_size {
	SIZE_none,    /* free */
	SIZE_first,   /* malloc(size) */
	SIZE_second,  /* realloc(p, size), aligned_alloc(alignment, size) */
	SIZE_third,   /* posix_memalign(p, alignment, size) */
	SIZE_product, /* calloc(n, size) */
};
enum malloc_size *unused_malloc_size __attribute__((unused));

struct malloc_key {
	__u64 caller; /* whom the call returns to */
	__u32 tid;
	__s32 stack;
	__u16 function;	  /* the cookie's upper bits */
	__u16 size_class; /* n: at most 2^n bytes, and more than half of that */
	__u32 _pad;
};

struct malloc_sum {
	__u64 calls;
	__u64 timed; /* of these, those whose return was seen; the times are of them */
	__u64 bytes; /* asked for */
	__u64 total_ns;
	__u64 max_ns;
	__u64 blocked_ns; /* asleep within the call */
	__u64 max_blocked_ns;
	__u64 runnable_ns; /* ready to run within the call, and not running */
	__u64 lock_waits;  /* futexes slept for */
	char comm[16];
};

struct malloc_call {
	__u64 begin_ns; /* 0: in none */
	__u64 sp;
	__u64 size;
	__u64 cookie;
	struct malloc_key key;
	struct burst_off off;
	__u32 inner; /* a function that this one went on to has returned */
	__u32 _pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, BURST_THREADS);
	__type(key, __u32);
	__type(value, struct malloc_call);
} malloc_calls SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, ROWS);
	__type(key, struct malloc_key);
	__type(value, struct malloc_sum);
} malloc_rows SEC(".maps");

/*
 * Rows without a stack, for when there is no room for another with one. In code without frame pointers a walk
 * over them finds other rubbish each time, and every call may have a stack of its own.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, REST);
	__type(key, struct malloc_key);
	__type(value, struct malloc_sum);
} malloc_rest SEC(".maps");

static __always_inline __u64 size_of(struct pt_regs *ctx, __u64 cookie)
{
	__u64 n, each;

	switch (cookie & 0xff) {
	case SIZE_first:
		return PT_REGS_PARM1(ctx);
	case SIZE_second:
		return PT_REGS_PARM2(ctx);
	case SIZE_third:
		return PT_REGS_PARM3(ctx);
	case SIZE_product:
		n = PT_REGS_PARM1(ctx);
		each = PT_REGS_PARM2(ctx);
		return n >> 32 || each >> 32 ? 0 : n * each; /* what no allocator grants is not added up */
	default:
		return 0;
	}
}

static __always_inline __u16 class_of(__u64 size, __u64 cookie)
{
	__u16 bits = 0;
	__u64 rest = size ? size - 1 : 0;

	if ((cookie & 0xff) == SIZE_none)
		return NO_CLASS;
	if (rest >> 32) {
		bits += 32;
		rest >>= 32;
	}
	if (rest >> 16) {
		bits += 16;
		rest >>= 16;
	}
	if (rest >> 8) {
		bits += 8;
		rest >>= 8;
	}
	if (rest >> 4) {
		bits += 4;
		rest >>= 4;
	}
	if (rest >> 2) {
		bits += 2;
		rest >>= 2;
	}
	bits += rest >> 1 ? 2 : rest;
	return bits < SMALLEST_CLASS ? SMALLEST_CLASS : bits;
}

/* Whom the function returns to; at its entry, which a walk over frame pointers leaves out. */
static __always_inline __u64 caller_of(struct pt_regs *ctx)
{
#if defined(__TARGET_ARCH_x86)
	__u64 caller = 0;

	bpf_probe_read_user(&caller, sizeof(caller), (const void *)PT_REGS_SP(ctx));
	return caller;
#else
	return PT_REGS_RET(ctx);
#endif
}

static __always_inline struct malloc_sum *row_in(void *map, const struct malloc_key *key)
{
	struct malloc_sum *row = bpf_map_lookup_elem(map, key), fresh = {};

	if (row)
		return row;
	bpf_get_current_comm(fresh.comm, sizeof(fresh.comm));
	bpf_map_update_elem(map, key, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(map, key);
}

static __always_inline struct malloc_sum *row_of(struct malloc_key *key)
{
	struct malloc_sum *row = row_in(&malloc_rows, key);

	if (row)
		return row;
	key->stack = BURST_NO_STACK;
	burst_count(MISSED_stacks);
	row = row_in(&malloc_rest, key);
	if (!row)
		burst_count(MISSED_rows_full);
	return row;
}

static __always_inline void describe(struct pt_regs *ctx, __u64 cookie, __u64 size, struct malloc_key *key)
{
	key->caller = caller_of(ctx);
	key->tid = (__u32)bpf_get_current_pid_tgid();
	key->stack = burst_user_stack(ctx);
	key->function = cookie >> 8;
	key->size_class = class_of(size, cookie);
	key->_pad = 0;
}

static __always_inline bool is_ours(__u64 id)
{
	return id >> 32 == burst_run.tgid && !burst_is_over(bpf_ktime_get_ns());
}

static __always_inline int on_sample(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();

	if (is_ours(id))
		burst_sampled(id, bpf_get_attach_cookie(ctx) >> 8);
	return 0;
}

/*
 * Is the call that the thread is in one that has gone on to this function? Deeper on the stack, or by a jump;
 * not if it is the same function at the same place, which has come round again and whose return was not seen.
 */
static __always_inline bool is_within(const struct malloc_call *call, __u64 sp, __u64 cookie)
{
	return call->begin_ns &&
	       (sp < call->sp || (sp == call->sp && !call->inner && call->cookie != cookie));
}

static __always_inline int on_entry(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), sp = PT_REGS_SP(ctx), cookie;
	struct malloc_call *call, fresh = {};
	__u32 tid = id;

	if (!is_ours(id))
		return 0;
	call = bpf_map_lookup_elem(&malloc_calls, &tid);
	if (!call) {
		bpf_map_update_elem(&malloc_calls, &tid, &fresh, BPF_NOEXIST);
		call = bpf_map_lookup_elem(&malloc_calls, &tid);
	}
	if (!call) {
		burst_count(MISSED_threads_full);
		return 0;
	}
	cookie = bpf_get_attach_cookie(ctx);
	if (is_within(call, sp, cookie))
		return 0;
	if (call->begin_ns)
		burst_count(MISSED_begins);
	call->begin_ns = 0;
	barrier();
	call->sp = sp;
	call->cookie = cookie;
	call->size = size_of(ctx, cookie);
	call->inner = 0;
	call->off = fresh.off;
	describe(ctx, cookie, call->size, &call->key);
	barrier();
	call->begin_ns = bpf_ktime_get_ns();
	return 0;
}

static __always_inline int on_return(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns(), took, blocked;
	struct malloc_call *call;
	struct malloc_sum *row;
	struct malloc_key key;
	__u32 tid = id;

	if (!is_ours(id))
		return 0;
	call = bpf_map_lookup_elem(&malloc_calls, &tid);
	if (!call) /* it began before the burst */
		return 0;
	if (!call->begin_ns) {
		burst_count(MISSED_ends);
		return 0;
	}
	if (call->sp != PT_REGS_SP(ctx) - RETURN_BYTES)
		return 0; /* of a call within this one */
	if (call->cookie != bpf_get_attach_cookie(ctx)) {
		call->inner = 1;
		return 0;
	}
	took = now - call->begin_ns;
	call->begin_ns = 0;
	barrier();
	blocked = call->off.blocked_ns;
	key = call->key;
	row = row_of(&key);
	if (!row)
		return 0;
	row->calls++;
	row->timed++;
	row->bytes += call->size;
	row->total_ns += took;
	row->blocked_ns += blocked;
	row->runnable_ns += call->off.runnable_ns;
	row->lock_waits += call->off.locks;
	if (took > row->max_ns)
		row->max_ns = took;
	if (blocked > row->max_blocked_ns)
		row->max_blocked_ns = blocked;
	return 0;
}

/* Where no return may be hooked. */
static __always_inline int on_entry_only(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), cookie, size;
	struct malloc_key key = {};
	struct malloc_call *call;
	struct malloc_sum *row;
	__u32 tid = id;

	if (!is_ours(id))
		return 0;
	call = bpf_map_lookup_elem(&malloc_calls, &tid);
	cookie = bpf_get_attach_cookie(ctx);
	if (call && is_within(call, PT_REGS_SP(ctx), cookie))
		return 0;
	size = size_of(ctx, cookie);
	describe(ctx, cookie, size, &key);
	row = row_of(&key);
	if (!row)
		return 0;
	row->calls++;
	row->bytes += size;
	return 0;
}

static __always_inline int on_switch(const bool raw, void *ctx, bool preempt, struct task_struct *prev,
				     struct task_struct *next, __u32 prev_state)
{
	struct malloc_call *call;
	__u32 tid;

	if (WHYSPAN_FIELD(raw, prev, tgid) == burst_run.tgid) {
		tid = WHYSPAN_FIELD(raw, prev, pid);
		call = bpf_map_lookup_elem(&malloc_calls, &tid);
		if (call && call->begin_ns)
			burst_leaves(raw, &call->off, prev, preempt ? 0 : prev_state, bpf_ktime_get_ns());
	}
	if (WHYSPAN_FIELD(raw, next, tgid) == burst_run.tgid) {
		tid = WHYSPAN_FIELD(raw, next, pid);
		call = bpf_map_lookup_elem(&malloc_calls, &tid);
		if (call && call->begin_ns)
			burst_returns(&call->off, bpf_ktime_get_ns());
	}
	return 0;
}

WHYSPAN_USER_PROBE(malloc_sample, "uprobe", on_sample(ctx))
WHYSPAN_USER_PROBE(malloc_entry, "uprobe", on_entry(ctx))
WHYSPAN_USER_PROBE(malloc_return, "uretprobe", on_return(ctx))
WHYSPAN_USER_PROBE(malloc_only, "uprobe", on_entry_only(ctx))
BURST_SWITCH(on_switch)

char LICENSE[] SEC("license") = "Dual BSD/GPL";
