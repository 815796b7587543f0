// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * llama: steps, graphs and cache operations of llama.cpp, in any program that maps libllama.so and
 * libggml*.so.
 *
 * Hooks the entry and the return of llama_decode, llama_encode and of the two functions that compute a graph,
 * and the entry of the memory functions. A step is told at its entry too, so that one in progress is known.
 * What a batch holds is read from the caller's memory: its size, the sequences and outputs of its first
 * tokens and of its last, the position of the first. Never a token.
 *
 * A return is hooked by a return probe, which changes the return address on the stack: not in every process,
 * see user_hooks.py, safety.py and catchers.py. Where it is refused, a step ends when its results are asked
 * for on the same thread (llama_get_logits and its like), or when the next one begins: a little late, and
 * told as such.
 *
 * Cost: about 1 us per trap, 8 traps a step; a step takes a millisecond or more.
 */
#include "whyspan.bpf.h"

#define LOOKED_AT 32 /* tokens of a batch; servers put those that decode first, then prompts */

WHYSPAN_KINDS(llama, KIND_llama_step, KIND_llama_step_start, KIND_llama_memory, KIND_llama_graph);

struct llama_cfg {
	__u32 graphs; /* 1 = report graphs; default 1 */
	__u32 memory; /* 1 = report memory functions; default 1 */
};
const volatile struct llama_cfg cfg = { .graphs = 1, .memory = 1 };

struct llama_step {
	struct whyspan_head
		head; /* aux = result, a signed number; 0x80000000: not known, its end is inferred */
	__u64 begin_ns;
	__u64 context;
	__u32 tokens;
	__u16 sequences;
	__u16 call; /* 0 decode, 1 encode */
	__s32 position;
	__u16 outputs;
	__u16 looked_at;
};
WHYSPAN_EVENT(llama_step);

struct llama_step_start {
	struct whyspan_head head;
	__u64 _pad;
	__u64 context;
	__u32 tokens;
	__u16 sequences;
	__u16 call;
	__s32 position;
	__u16 outputs;
	__u16 looked_at;
};
WHYSPAN_EVENT(llama_step_start);

struct llama_memory {
	struct whyspan_head head; /* aux = enum memory_op */
	__u64 context;
	__s32 sequence;
	__s32 other;
	__s32 from;
	__s32 to;
	__s32 delta;
	__u32 _pad;
};
WHYSPAN_EVENT(llama_memory);

struct llama_graph {
	struct whyspan_head head; /* aux = status, a signed number; 0 done */
	__u64 begin_ns;
	__u32 by; /* 0 the scheduler of backends, 1 the CPU backend */
	__u32 _pad0;
	__u64 _pad[2];
};
WHYSPAN_EVENT(llama_graph);

/* Numbers of llama.py's cookies. */
enum memory_op { MEMORY_RM, MEMORY_CP, MEMORY_CLEAR, MEMORY_KEEP, MEMORY_ADD, MEMORY_DIV };

/* What has been called and not yet returned, by thread and function. Lost entries are calls without an end.
 */
struct call {
	__u64 begin_ns;
	__u64 context;
	__u32 tokens;
	__s32 position;
	__u16 sequences;
	__u16 call;
	__u16 outputs;
	__u16 looked_at;
};

enum slot { SLOT_STEP, SLOT_GRAPH };

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, __u64);
	__type(value, struct call);
} calls SEC(".maps");

/* struct llama_batch, llama.h; unchanged in these fields since it came (2023-09). */
struct batch {
	__s32 n_tokens;
	__u32 _pad;
	__u64 token;
	__u64 embd;
	__u64 pos;
	__u64 n_seq_id;
	__u64 seq_id;
	__u64 logits;
};

static __always_inline __u64 key_of(__u64 id, __u32 slot)
{
	return (id << 8) | slot; /* the thread and 24 bits of the process */
}

/* The second argument, larger than two registers and passed by value. */
static __always_inline bool read_batch(struct pt_regs *ctx, struct batch *to)
{
#if defined(__TARGET_ARCH_x86)
	/* A copy on the stack, System V ABI 3.2.3: above the return address, as the function has just been
	 * entered. */
	const void *at = (const void *)(PT_REGS_SP(ctx) + 8);
#else
	/* A pointer to a copy, AAPCS64 6.8.2 stage B. */
	const void *at = (const void *)PT_REGS_PARM2(ctx);
#endif
	return !bpf_probe_read_user(to, sizeof(*to), at) && to->n_tokens >= 0;
}

/* The first sequence of a token; -1 when it cannot be read. */
static __always_inline __s32 sequence_of(const struct batch *b, __u64 i)
{
	__u64 list = 0;
	__s32 sequence = -1;

	if (!bpf_probe_read_user(&list, sizeof(list), (const void *)(b->seq_id + i * 8)) && list)
		bpf_probe_read_user(&sequence, sizeof(sequence), (const void *)list);
	return sequence;
}

static __always_inline void describe(const struct batch *b, struct call *c)
{
	__u64 seen[4] = {};
	__u32 tokens = b->n_tokens, looked = tokens < LOOKED_AT ? tokens : LOOKED_AT;
	int k;

	c->tokens = tokens;
	c->looked_at = looked;
	/* Left out, the arrays mean: sequence 0, the last token's output, positions after the ones in the
	 * cache. */
	c->sequences = tokens && !b->seq_id;
	c->outputs = tokens && !b->logits;
	c->position = -1;
	if (tokens && b->pos)
		bpf_probe_read_user(&c->position, sizeof(c->position), (const void *)b->pos);
	for (k = 0; k < LOOKED_AT; k++) {
		__u64 i = k + 1 < LOOKED_AT ? k : tokens - 1;
		__s32 sequence;
		__s8 output = 0;

		if (k >= looked)
			break;
		if (b->logits) {
			bpf_probe_read_user(&output, sizeof(output), (const void *)(b->logits + i));
			c->outputs += output != 0;
		}
		if (!b->seq_id)
			continue;
		sequence = sequence_of(b, i);
		if (sequence < 0 || sequence > 255) /* LLAMA_MAX_SEQ */
			continue;
		if (!(seen[(sequence >> 6) & 3] & (1ULL << (sequence & 63)))) {
			seen[(sequence >> 6) & 3] |= 1ULL << (sequence & 63);
			c->sequences++;
		}
	}
}

static __always_inline void report_step(const struct call *c, __u64 now, __u64 id, __u32 result)
{
	struct llama_step *e = whyspan_reserve(KIND_llama_step, now, id, id >> 32, result);

	if (!e)
		return;
	e->begin_ns = c->begin_ns;
	e->context = c->context;
	e->tokens = c->tokens;
	e->sequences = c->sequences;
	e->call = c->call;
	e->position = c->position;
	e->outputs = c->outputs;
	e->looked_at = c->looked_at;
	whyspan_submit(e);
}

/* A step of this thread that has not been seen to end has ended by now. */
static __always_inline void end_inferred(__u64 id, __u64 now)
{
	__u64 key = key_of(id, SLOT_STEP);
	struct call *open = bpf_map_lookup_elem(&calls, &key);

	if (!open)
		return;
	report_step(open, now, id, 0x80000000);
	bpf_map_delete_elem(&calls, &key);
}

static __always_inline int on_step(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns(), key = key_of(id, SLOT_STEP);
	struct llama_step_start *e;
	struct call c = {};
	struct batch b;

	if (!whyspan_is_watched(id >> 32))
		return 0;
	end_inferred(id, now);
	c.begin_ns = now;
	c.context = whyspan_key((const void *)PT_REGS_PARM1(ctx));
	c.call = bpf_get_attach_cookie(ctx);
	c.position = -1;
	if (read_batch(ctx, &b))
		describe(&b, &c);
	bpf_map_update_elem(&calls, &key, &c, BPF_ANY);
	e = whyspan_reserve(KIND_llama_step_start, now, id, id >> 32, 0);
	if (!e)
		return 0;
	e->_pad = 0;
	e->context = c.context;
	e->tokens = c.tokens;
	e->sequences = c.sequences;
	e->call = c.call;
	e->position = c.position;
	e->outputs = c.outputs;
	e->looked_at = c.looked_at;
	whyspan_submit(e);
	return 0;
}

static __always_inline int on_step_end(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), key = key_of(id, SLOT_STEP);
	struct call *c;

	if (!whyspan_is_watched(id >> 32))
		return 0;
	c = bpf_map_lookup_elem(&calls, &key);
	if (!c)
		return 0;
	report_step(c, bpf_ktime_get_ns(), id, PT_REGS_RC(ctx));
	bpf_map_delete_elem(&calls, &key);
	return 0;
}

static __always_inline int on_results(void)
{
	__u64 id = bpf_get_current_pid_tgid();

	if (whyspan_is_watched(id >> 32))
		end_inferred(id, bpf_ktime_get_ns());
	return 0;
}

static __always_inline int on_memory(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 op = bpf_get_attach_cookie(ctx);
	struct llama_memory *e;

	if (!whyspan_is_watched(id >> 32) || !cfg.memory)
		return 0;
	e = whyspan_reserve(KIND_llama_memory, bpf_ktime_get_ns(), id, id >> 32, op);
	if (!e)
		return 0;
	e->context = whyspan_key((const void *)PT_REGS_PARM1(ctx));
	e->sequence = op == MEMORY_CLEAR ? -1 : PT_REGS_PARM2(ctx);
	e->other = op == MEMORY_CP ? PT_REGS_PARM3(ctx) : -1;
	e->from = e->to = -1;
	e->delta = 0;
	if (op == MEMORY_CP) {
		e->from = PT_REGS_PARM4(ctx);
		e->to = PT_REGS_PARM5(ctx);
	} else if (op != MEMORY_CLEAR && op != MEMORY_KEEP) {
		e->from = PT_REGS_PARM3(ctx);
		e->to = PT_REGS_PARM4(ctx);
	}
	if (op == MEMORY_ADD || op == MEMORY_DIV)
		e->delta = PT_REGS_PARM5(ctx);
	e->_pad = 0;
	whyspan_submit(e);
	return 0;
}

static __always_inline int on_graph(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), key = key_of(id, SLOT_GRAPH + bpf_get_attach_cookie(ctx));
	struct call c = {};

	if (!whyspan_is_watched(id >> 32) || !cfg.graphs)
		return 0;
	c.begin_ns = bpf_ktime_get_ns();
	bpf_map_update_elem(&calls, &key, &c, BPF_ANY);
	return 0;
}

static __always_inline int on_graph_end(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 by = bpf_get_attach_cookie(ctx);
	__u64 key = key_of(id, SLOT_GRAPH + by);
	struct llama_graph *e;
	struct call *c;

	if (!whyspan_is_watched(id >> 32))
		return 0;
	c = bpf_map_lookup_elem(&calls, &key);
	if (!c)
		return 0;
	e = whyspan_reserve(KIND_llama_graph, bpf_ktime_get_ns(), id, id >> 32, PT_REGS_RC(ctx));
	if (e) {
		e->begin_ns = c->begin_ns;
		e->by = by;
		e->_pad0 = 0;
		e->_pad[0] = e->_pad[1] = 0;
		whyspan_submit(e);
	}
	bpf_map_delete_elem(&calls, &key);
	return 0;
}

WHYSPAN_USER_PROBE(llama_step_entry, "uprobe", on_step(ctx))
WHYSPAN_USER_PROBE(llama_step_return, "uretprobe", on_step_end(ctx))
WHYSPAN_USER_PROBE(llama_results, "uprobe", on_results())
WHYSPAN_USER_PROBE(llama_memory_entry, "uprobe", on_memory(ctx))
WHYSPAN_USER_PROBE(llama_graph_entry, "uprobe", on_graph(ctx))
WHYSPAN_USER_PROBE(llama_graph_return, "uretprobe", on_graph_end(ctx))

char LICENSE[] SEC("license") = "Dual BSD/GPL";
