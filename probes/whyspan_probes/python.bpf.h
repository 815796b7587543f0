/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Stacks: the kernel's and the program's frames by frame pointers, and the interpreter's own chain of frames of
 * CPython 3.11 to 3.14. No pause, no ptrace; only reads, of memory that is there.
 *
 * Where things lie in an interpreter is told by user space for each process (whyspan/code/layouts.py). A frame is
 * told as the address of its code object, the place in its bytecode, and a check over what the code object says of
 * itself *now*: whoever reads names later can tell that the object has become another one since.
 */
#pragma once

#include "whyspan.bpf.h"

#define WHYSPAN_KERNEL_FRAMES 32
#define WHYSPAN_USER_FRAMES 64
#define WHYSPAN_PYTHON_FRAMES 128
#define WHYSPAN_STACK_WORDS (WHYSPAN_KERNEL_FRAMES + WHYSPAN_USER_FRAMES + 2 * WHYSPAN_PYTHON_FRAMES)
#define WHYSPAN_THREAD_STATES 512 /* looked through for a thread's own, in all interpreters of a process */
#define WHYSPAN_NOWHERE 0xffff

/* Flags of a stack. */
#define STACK_HOLDS_GIL 1
#define STACK_DEEPER 2 /* more frames of Python than fit */
#define STACK_BROKEN 4 /* a frame could not be read: what is below it is missing */
#define STACK_NO_PYTHON 8 /* the process has an interpreter, and this thread no state of it, or no frame */
#define STACK_USER_DEEPER 16 /* more frames of the program than fit */

/* Where things lie in a process's interpreter. Offsets, WHYSPAN_NOWHERE: this version has no such thing. */
struct whyspan_python {
	__u64 runtime; /* address of _PyRuntime */
	__u16 current_thread; /* in the runtime: the state of the thread that has the GIL */
	__u16 interpreters; /* in the runtime: the first interpreter */
	__u16 interpreter_next;
	__u16 interpreter_gil; /* in an interpreter: pointer to its GIL */
	__u16 gil_holder;
	__u16 gil_locked;
	__u16 threads; /* in an interpreter: the first thread state */
	__u16 thread_next;
	__u16 thread_native; /* its number, as the process knows it */
	__u16 thread_cframe; /* pointer to what has the current frame; else the state itself has */
	__u16 current_frame;
	__u16 frame_code;
	__u16 frame_previous;
	__u16 frame_instr;
	__u16 frame_owner;
	__u16 code_filename;
	__u16 code_name;
	__u16 code_line;
	__u16 code_bytes; /* where the bytecode begins */
	__u16 name_hash; /* in a string */
	__u16 tag_mask; /* bits of a reference that are no address */
	__u16 code_table; /* of lines */
	__u16 _pad[2];
};

/* Interpreters by tgid; filled by user space. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, WHYSPAN_MAX_WATCHED);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct whyspan_python);
} whyspan_pythons SEC(".maps");

/* Stacks that user space has not seen lately, by their content. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} whyspan_stacks SEC(".maps");

/* Their numbers, and when each was sent last. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, __u64);
} sent_stacks SEC(".maps");

#define SEND_AGAIN_NS 10000000000ULL /* user space forgets, too */

/* The state of each thread as found last; it is asked whose it is before it is believed. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u64);
} thread_states SEC(".maps");

struct whyspan_stack {
	__u64 id;
	__u32 tgid;
	__u16 flags;
	__u8 kernel_frames;
	__u8 user_frames;
	__u32 python_frames;
	__u32 _pad;
	__u64 words[WHYSPAN_STACK_WORDS]; /* kernel, user, then two words for each frame of Python */
};

#define STACK_HEAD_BYTES 24

struct whyspan_scratch {
	__u8 frame[136];
	__u8 code[264];
	struct whyspan_stack stack;
};

/* Read memory of a task; NULL is the current one, whose missing pages are not waited for. */
static __always_inline long whyspan_peek(struct task_struct *task, void *to, __u32 bytes, __u64 from)
{
	if (task)
		return bpf_copy_from_user_task(to, bytes, (const void *)from, task, 0);
	return bpf_probe_read_user(to, bytes, (const void *)from);
}

static __always_inline __u64 whyspan_peek_word(struct task_struct *task, __u64 from)
{
	__u64 word = 0;

	whyspan_peek(task, &word, sizeof(word), from);
	return word;
}

/* A thread's number in its own PID namespace. */
static __always_inline __u32 whyspan_own_tid(struct task_struct *task)
{
	struct pid *pid = BPF_CORE_READ(task, thread_pid);
	__u32 level = BPF_CORE_READ(pid, level);
	struct upid upid = {};

	bpf_probe_read_kernel(&upid, bpf_core_type_size(struct upid) < sizeof(upid) ? 0 : sizeof(upid),
			      (void *)pid + bpf_core_field_offset(struct pid, numbers) +
				      (level & 31) * bpf_core_type_size(struct upid));
	return upid.nr;
}

/*
 * Loops are bpf_loop (5.17): the verifier looks at their bodies once, and not at every way through a hundred rounds.
 * What they share is a struct on the stack of their caller.
 */
struct whyspan_search {
	struct task_struct *task;
	const struct whyspan_python *py;
	__u64 interpreter;
	__u64 state;
	__u32 own_tid;
	__u32 found;
};

static long whyspan_search_on(__u64 i, struct whyspan_search *f)
{
	if (!f->state) {
		f->interpreter = whyspan_peek_word(f->task, f->interpreter + f->py->interpreter_next);
		if (!f->interpreter)
			return 1;
		f->state = whyspan_peek_word(f->task, f->interpreter + f->py->threads);
		return 0;
	}
	if ((__u32)whyspan_peek_word(f->task, f->state + f->py->thread_native) == f->own_tid) {
		f->found = 1;
		return 1;
	}
	f->state = whyspan_peek_word(f->task, f->state + f->py->thread_next);
	return 0;
}

/* The state of a thread, 0 when it has none. */
static __always_inline __u64 whyspan_thread_state(struct task_struct *task, const struct whyspan_python *py,
						  __u32 tid, __u32 own_tid)
{
	__u64 *known = bpf_map_lookup_elem(&thread_states, &tid), one = known ? *known : 0;
	struct whyspan_search f = { .task = task, .py = py, .own_tid = own_tid };

	if (one && (__u32)whyspan_peek_word(task, one + py->thread_native) == own_tid)
		return one;
	f.interpreter = whyspan_peek_word(task, py->runtime + py->interpreters);
	if (!f.interpreter)
		return 0;
	f.state = whyspan_peek_word(task, f.interpreter + py->threads);
	bpf_loop(WHYSPAN_THREAD_STATES, whyspan_search_on, &f, 0);
	if (!f.found)
		return 0;
	one = f.state;
	bpf_map_update_elem(&thread_states, &tid, &one, BPF_ANY);
	return one;
}

/* Whether the thread whose state it is has the interpreter's lock. */
static __always_inline bool whyspan_has_gil(struct task_struct *task, const struct whyspan_python *py,
					    __u64 state)
{
	__u64 interpreter, gil;
	__u32 locked = 0;

	if (py->current_thread != WHYSPAN_NOWHERE)
		return whyspan_peek_word(task, py->runtime + py->current_thread) == state;
	/* Of the main interpreter, which is the last of the list and nearly always the only one. */
	interpreter = whyspan_peek_word(task, py->runtime + py->interpreters);
	gil = interpreter ? whyspan_peek_word(task, interpreter + py->interpreter_gil) : 0;
	if (!gil || whyspan_peek_word(task, gil + py->gil_holder) != state)
		return false;
	whyspan_peek(task, &locked, sizeof(locked), gil + py->gil_locked);
	return locked == 1;
}

#define OWNED_BY_NOBODY 3 /* FRAME_OWNED_BY_CSTACK or _INTERPRETER (pycore_frame.h): no frame of Python's */
#define AT(buffer, offset) (*(__u64 *)((buffer) + ((offset) & 0x78)))
#define AT_CODE(offset) (*(__u64 *)(s->code + ((offset) & 0xf8)))

struct whyspan_walk {
	struct task_struct *task;
	const struct whyspan_python *py;
	struct whyspan_scratch *s;
	__u64 frame;
	__u32 words;
	__u32 frames;
	__u32 flags;
	__u32 _pad;
};

static long whyspan_walk_on(__u64 i, struct whyspan_walk *w)
{
	const struct whyspan_python *py = w->py;
	struct whyspan_scratch *s = w->s;
	__u64 code, instr, name, hash;
	__u32 words = w->words, line;

	if (!w->frame)
		return 1;
	if (whyspan_peek(w->task, s->frame, 80, w->frame)) {
		w->flags |= STACK_BROKEN;
		return 1;
	}
	code = AT(s->frame, py->frame_code) & ~(__u64)(py->tag_mask & 7);
	instr = AT(s->frame, py->frame_instr);
	w->frame = AT(s->frame, py->frame_previous);
	if (s->frame[py->frame_owner & 0x7f] >= OWNED_BY_NOBODY)
		return 0;
	if (words > WHYSPAN_STACK_WORDS - 2 || w->frames >= WHYSPAN_PYTHON_FRAMES) {
		w->flags |= STACK_DEEPER;
		return 1;
	}
	if (whyspan_peek(w->task, s->code, 152, code)) {
		w->flags |= STACK_BROKEN;
		return 1;
	}
	name = AT_CODE(py->code_name);
	hash = whyspan_peek_word(w->task, name + py->name_hash);
	line = *(__u32 *)(s->code + (py->code_line & 0x7c));
	hash ^= name ^ (AT_CODE(py->code_filename) << 1) ^ (AT_CODE(py->code_table) << 2) ^
		((__u64)line << 32);
	s->stack.words[words] = code;
	s->stack.words[words + 1] = (__u32)(instr - code - py->code_bytes) | (hash ^ hash >> 32) << 32;
	w->words += 2;
	w->frames++;
	return 0;
}

/* Add the frames of Python, the innermost first. */
static __always_inline void whyspan_walk_python(struct task_struct *task, const struct whyspan_python *py,
						__u32 tid, __u32 own_tid, __u32 words, struct whyspan_scratch *s)
{
	__u64 state = whyspan_thread_state(task, py, tid, own_tid), at = state;
	struct whyspan_walk w = { .task = task, .py = py, .s = s, .words = words };

	if (!state) {
		s->stack.flags |= STACK_NO_PYTHON;
		return;
	}
	if (whyspan_has_gil(task, py, state))
		w.flags |= STACK_HOLDS_GIL;
	if (py->thread_cframe != WHYSPAN_NOWHERE)
		at = whyspan_peek_word(task, state + py->thread_cframe);
	w.frame = at ? whyspan_peek_word(task, at + py->current_frame) : 0;
	if (!w.frame)
		w.flags |= STACK_NO_PYTHON;
	/* Some frames are none of Python's: a few more rounds than frames. */
	bpf_loop(2 * WHYSPAN_PYTHON_FRAMES, whyspan_walk_on, &w, 0);
	s->stack.flags |= w.flags;
	s->stack.python_frames = w.frames;
}

struct whyspan_sum {
	const struct whyspan_scratch *s;
	__u64 id;
	__u32 words;
	__u32 _pad;
};

static long whyspan_sum_on(__u64 i, struct whyspan_sum *sum)
{
	if (i >= sum->words || i >= WHYSPAN_STACK_WORDS)
		return 1;
	sum->id = (sum->id ^ sum->s->stack.words[i]) * 0x9e3779b97f4a7c15ULL;
	sum->id ^= sum->id >> 29;
	return 0;
}

/* Give a stack its number, and send it unless that was done lately. Returns the number, 0 if it is empty. */
static __always_inline __u64 whyspan_send_stack(struct whyspan_scratch *s, bool *lost)
{
	__u32 words = s->stack.kernel_frames + s->stack.user_frames + 2 * s->stack.python_frames, bytes;
	struct whyspan_sum sum = { .s = s, .id = 0xcbf29ce484222325ULL ^ s->stack.tgid, .words = words };
	__u64 now = bpf_ktime_get_ns(), *sent, id;

	if (!words || words > WHYSPAN_STACK_WORDS)
		return 0;
	bpf_loop(WHYSPAN_STACK_WORDS, whyspan_sum_on, &sum, 0);
	id = sum.id ^ s->stack.flags;
	id = id ? id : 1;
	sent = bpf_map_lookup_elem(&sent_stacks, &id);
	if (sent && now - *sent < SEND_AGAIN_NS)
		return id;
	s->stack.id = id;
	s->stack._pad = 0;
	bytes = STACK_HEAD_BYTES + words * 8;
	barrier_var(bytes); /* or clang forgets the bound, which the verifier has to see here */
	if (bytes > sizeof(s->stack))
		return 0;
	if (bpf_ringbuf_output(&whyspan_stacks, &s->stack, bytes, BPF_RB_NO_WAKEUP))
		*lost = true;
	else
		bpf_map_update_elem(&sent_stacks, &id, &now, BPF_ANY);
	return id;
}
