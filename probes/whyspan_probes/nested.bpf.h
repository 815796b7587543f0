/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What a thread is in the middle of, for functions that are hooked by a kprobe at the entry and a kretprobe
 * at the return: what the first learns, the second needs.
 *
 * A thread may be in several such functions, one called from the other, or in one of them twice: a send that
 * copies from a file mapped over the network faults, and sends. So each thread has a small stack of frames,
 * and a frame belongs to the place of the kernel's stack at which its function began. The kernel follows a
 * bounded number of returns at a time (kretprobe's maxactive: 10, or twice the CPUs if that is more, of all
 * processes together) and forgets others: a frame whose place the stack has left without a return is one of
 * those, is counted as a lost record, and can never be taken for another call's.
 */
#pragma once

#define WHYSPAN_DEPTH 4

struct whyspan_frame {
	__u64 sp; /* of the entry */
	__u64 value;
	__u32 function; /* the program's number for it */
	__u32 aux;
};

struct whyspan_frames {
	__u32 depth;
	__u32 _pad;
	struct whyspan_frame at[WHYSPAN_DEPTH];
};

/* By tid, while it is in one. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct whyspan_frames);
} whyspan_nested SEC(".maps");

/* Forget the innermost frames that began below *sp*: their functions have returned. */
static __always_inline void whyspan_unwind(struct whyspan_frames *f, __u64 sp, __u32 lost_kind)
{
	int i;

#pragma unroll
	for (i = 0; i < WHYSPAN_DEPTH; i++) {
		__u32 top = f->depth - 1;

		if (top >= WHYSPAN_DEPTH || f->at[top].sp >= sp)
			return;
		f->depth = top;
		whyspan_drop(lost_kind);
	}
}

/* A function begins. *lost_kind* is the record that is lost if its return is. */
static __always_inline void whyspan_push(struct pt_regs *ctx, __u32 function, const void *value, __u32 aux,
					 __u32 lost_kind)
{
	__u32 tid = bpf_get_current_pid_tgid(), top;
	struct whyspan_frames *f = bpf_map_lookup_elem(&whyspan_nested, &tid), fresh = {};
	__u64 sp = PT_REGS_SP(ctx);

	if (!f) {
		bpf_map_update_elem(&whyspan_nested, &tid, &fresh, BPF_NOEXIST);
		f = bpf_map_lookup_elem(&whyspan_nested, &tid);
		if (!f) {
			whyspan_drop(lost_kind);
			return;
		}
	}
	/* A function that is still running began above. */
	whyspan_unwind(f, sp + 1, lost_kind);
	top = f->depth;
	if (top >= WHYSPAN_DEPTH) {
		whyspan_drop(lost_kind);
		return;
	}
	f->at[top].sp = sp;
	f->at[top].value = (__u64)value;
	f->at[top].function = function;
	f->at[top].aux = aux;
	f->depth = top + 1;
}

/*
 * A function returns: its frame, or false if it began unseen. The return's stack pointer is the entry's, or
 * just above: x86 has taken the return address off.
 */
static __always_inline bool whyspan_pop(struct pt_regs *ctx, __u32 function, struct whyspan_frame *out,
					__u32 lost_kind)
{
	__u32 tid = bpf_get_current_pid_tgid(), top;
	struct whyspan_frames *f = bpf_map_lookup_elem(&whyspan_nested, &tid);
	__u64 sp = PT_REGS_SP(ctx);

	if (!f)
		return false;
	whyspan_unwind(f, sp - 16, lost_kind);
	top = f->depth - 1;
	if (top >= WHYSPAN_DEPTH || f->at[top].sp > sp || f->at[top].function != function)
		return false;
	*out = f->at[top];
	f->depth = top;
	if (!top)
		bpf_map_delete_elem(&whyspan_nested, &tid);
	return true;
}
