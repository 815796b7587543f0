// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * marker: what an inference process says of itself through whyspan_mark_v1(kind, length, payload).
 *
 * Hooks that function of the extension module `whyspan_inproc._marker` in every file of it that a watched
 * process maps. The function does nothing, and is not called unless the module's semaphore says that somebody
 * watches.
 *
 * A link is on the file, for every process that maps it: so a worker that is just being spawned is heard from
 * its first instruction, before anybody has looked at it. An *unwatched* process with the same file pays for
 * that: its semaphore is up too, so it builds its records (some us each) and traps (about 1 us), and is
 * turned away here by its tgid before anything is read. It sends nothing, and pays nothing once the last
 * watched process has gone.
 *
 * Cost: the trap and one copy of the payload, about 1 us. A uprobe's program may be preempted and another run
 * on the same CPU meanwhile: so there is no per-CPU scratch memory; the payload is read straight into the
 * ring, into the smallest of a few sizes. A payload that is not in memory is not waited for: it is counted as
 * lost.
 */
#include "whyspan.bpf.h"

#define MAX_PAYLOAD 8192 /* whyspan.marks.MAX_BODY */
#define MARKS_WAKE_BYTES                                                                                     \
	(256 * 1024) /* a quarter of the ring: then the reader does not wait for its timer                   \
		      */

WHYSPAN_KINDS(marker, KIND_mark);

struct marker_cfg {
	__u32 min_kind; /* lower kinds are left out; default 0 */
	__u32 max_kind; /* higher kinds are left out; default 0xffff */
};
const volatile struct marker_cfg cfg = { .min_kind = 0, .max_kind = 0xffff };

/* Not sent through the rings of events: it heads a record in the ring of marks, and the payload follows. */
struct mark {
	struct whyspan_head head; /* aux = kind of mark */
	__u32 length;
	__u32 _pad0;
	__u64 _pad[3];
};
WHYSPAN_EVENT(mark);

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} whyspan_marks SEC(".maps");

/* Take a record of that size and read the payload into it. `size` must be a constant. */
static __always_inline bool carry(const __u32 size, __u32 kind, __u32 length, const void *payload, __u64 id)
{
	__u64 flags = BPF_RB_NO_WAKEUP, bytes = length;
	struct mark *m = bpf_ringbuf_reserve(&whyspan_marks, sizeof(*m) + size, 0);

	if (!m)
		return false;
	m->head.ts_ns = bpf_ktime_get_ns();
	m->head.tid = (__u32)id;
	m->head.tgid = id >> 32;
	m->head.kind = whyspan_run.kind_base + KIND_mark;
	m->head.cpu = bpf_get_smp_processor_id();
	m->head.aux = kind;
	m->length = length;
	m->_pad0 = 0;
	m->_pad[0] = m->_pad[1] = m->_pad[2] = 0;
	barrier_var(bytes); /* or clang forgets the bound, which the verifier has to see here */
	if (bytes > size || (bytes && bpf_probe_read_user(m + 1, bytes, payload))) {
		bpf_ringbuf_discard(m, flags);
		return false;
	}
	if (bpf_ringbuf_query(&whyspan_marks, BPF_RB_AVAIL_DATA) > MARKS_WAKE_BYTES)
		flags = BPF_RB_FORCE_WAKEUP;
	bpf_ringbuf_submit(m, flags);
	return true;
}

static __always_inline int on_mark(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 kind = PT_REGS_PARM1(ctx), length = PT_REGS_PARM2(ctx);
	const void *payload = (const void *)PT_REGS_PARM3(ctx);
	bool carried = false;

	if (!whyspan_is_watched(id >> 32) || kind < cfg.min_kind || kind > cfg.max_kind)
		return 0;
	if (length <= 256)
		carried = carry(256, kind, length, payload, id);
	else if (length <= 512)
		carried = carry(512, kind, length, payload, id);
	else if (length <= 1024)
		carried = carry(1024, kind, length, payload, id);
	else if (length <= 2048)
		carried = carry(2048, kind, length, payload, id);
	else if (length <= 4096)
		carried = carry(4096, kind, length, payload, id);
	else if (length <= MAX_PAYLOAD)
		carried = carry(MAX_PAYLOAD, kind, length, payload, id);
	if (!carried)
		whyspan_drop(KIND_mark);
	return 0;
}

SEC("uprobe.multi")
int marker_mark_multi(struct pt_regs *ctx)
{
	return on_mark(ctx);
}

SEC("uprobe")
int marker_mark_perf(struct pt_regs *ctx)
{
	return on_mark(ctx);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
