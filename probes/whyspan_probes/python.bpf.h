/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Stacks: the kernel's and the program's frames by frame pointers, and the interpreter's own chain of frames
 * of CPython 3.11 to 3.14. No pause, no ptrace; only reads, of memory that is there.
 *
 * Where things lie in an interpreter is told by user space for each process (whyspan/code/layouts.py). A
 * frame is told as the address of its code object, the place in its bytecode, and a check over what the code
 * object says of itself *now*: whoever reads names later can tell that the object has become another one
 * since.
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
#define STACK_DEEPER 2	  /* more frames of Python than fit */
#define STACK_BROKEN 4	  /* a frame could not be read: what is below it is missing */
#define STACK_NO_PYTHON 8 /* the process has an interpreter, and no frame of it was found for this thread */
#define STACK_USER_DEEPER 16 /* more frames of the program than fit */

/* Where things lie in a process's interpreter. Offsets, WHYSPAN_NOWHERE: this version has no such thing. */
struct whyspan_python {
	__u64 runtime;	      /* address of _PyRuntime */
	__u16 current_thread; /* in the runtime: the state of the thread that has the GIL */
	__u16 interpreters;   /* in the runtime: the first interpreter */
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
	__u16 code_bytes;      /* where the bytecode begins */
	__u16 name_hash;       /* in a string */
	__u16 tag_mask;	       /* bits of a reference that are no address */
	__u16 code_table;      /* of lines */
	__u16 cframe_previous; /* what had the current frame before C called into Python once more */
	__u16 frame_entry;     /* whether C called this frame; else the frame that it came by is nobody's */
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

/*
 * The states of threads as found last, by tgid and their own number; each is asked whose it is before it is
 * believed. Odd: there was none at half of that time.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, __u64);
} thread_states SEC(".maps");

#define NO_STATE_NS 1000000000ULL /* until one is looked for again */

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

/*
 * What changes on the way from frame to frame. It lies in a map: of what is on the stack, the verifier
 * follows every value through every round.
 */
struct whyspan_way {
	__u64 frame;
	__u64 state;
	__u64 before; /* 3.11, 3.12: the cframe before that of this frame; 0 when there is none, or no such
			 thing */
	__u64 outer;  /* the frame that is current there: it called C, which called this one */
	__u32 first_word;
	__u32 words;
	__u32 frames;
	__u32 flags;
	__u32 sure; /* see whyspan_walk_again */
	__u32 _pad;
};

struct whyspan_scratch {
	__u8 frame[136];
	__u8 code[264];
	struct whyspan_way way;
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
 * Loops are bpf_loop (5.17): the verifier looks at their bodies once, and not at every way through a hundred
 * rounds. What they share is a struct on the stack of their caller.
 */
struct whyspan_search {
	struct task_struct *task;
	const struct whyspan_python *py;
	__u64 interpreter;
	__u64 state;
	__u64 process; /* its tgid, in the upper half */
	__u32 own_tid;
	__u32 found;
};

static long whyspan_search_on(__u64 i, struct whyspan_search *f)
{
	__u64 key, state = f->state;
	__u32 own_tid;

	if (!state) {
		f->interpreter = whyspan_peek_word(f->task, f->interpreter + f->py->interpreter_next);
		if (!f->interpreter)
			return 1;
		f->state = whyspan_peek_word(f->task, f->interpreter + f->py->threads);
		return 0;
	}
	own_tid = whyspan_peek_word(f->task, state + f->py->thread_native);
	/* Others' are noted on the way, or looking at all threads of a process would take the square of their
	 * number. */
	key = f->process | own_tid;
	bpf_map_update_elem(&thread_states, &key, &state, BPF_ANY);
	if (own_tid == f->own_tid) {
		f->found = 1;
		return 1;
	}
	f->state = whyspan_peek_word(f->task, state + f->py->thread_next);
	return 0;
}

/* The state of a thread, 0 when it has none. */
static __always_inline __u64 whyspan_thread_state(struct task_struct *task, const struct whyspan_python *py,
						  __u32 tgid, __u32 own_tid)
{
	struct whyspan_search f = {
		.task = task, .py = py, .process = (__u64)tgid << 32, .own_tid = own_tid
	};
	__u64 key = f.process | own_tid, now = bpf_ktime_get_ns(), none = now << 1 | 1;
	__u64 *known = bpf_map_lookup_elem(&thread_states, &key), one = known ? *known : 0;
	struct task_struct *self;

	if (one & 1) {
		if (now - (one >> 1) < NO_STATE_NS)
			return 0;
	} else if (one && (__u32)whyspan_peek_word(task, one + py->thread_native) == own_tid) {
		return one;
	}
	f.interpreter = whyspan_peek_word(task, py->runtime + py->interpreters);
	if (!f.interpreter)
		return 0;
	f.state = whyspan_peek_word(task, f.interpreter + py->threads);
	bpf_loop(WHYSPAN_THREAD_STATES, whyspan_search_on, &f, 0);
	if (f.found)
		return f.state;
	/* A thread that has just begun may not have said its number yet. */
	self = task ? task : (struct task_struct *)bpf_get_current_task();
	if (now - BPF_CORE_READ(self, start_time) > NO_STATE_NS)
		bpf_map_update_elem(&thread_states, &key, &none, BPF_ANY);
	return 0;
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
#define AT(buffer, offset) (*(__u64 *)((buffer) + ((offset)&0x78)))
#define AT_CODE(offset) (*(__u64 *)(s->code + ((offset)&0xf8)))

struct whyspan_walk {
	struct task_struct *task;
	const struct whyspan_python *py;
	struct whyspan_scratch *s;
};

/*
 * 3.11 and 3.12: when C calls into Python, the thread's cframe is another one for some instructions before
 * that says what the current frame is, and which cframe was before. What is found there meanwhile is left
 * from an earlier call, and leads anywhere. So the way along the frames is compared with that along the
 * cframes: a frame that C called comes after the one that is current in the cframe before, and the last
 * cframe is in the thread's state. Where the first frame that C called does not, the one before is where the
 * thread is; where they differ later, or end apart, nothing is told.
 */
static __always_inline bool whyspan_last_cframe(const struct whyspan_way *way, __u64 cframe)
{
	return cframe - way->state < 4096;
}

static __always_inline void whyspan_walk_before(struct task_struct *task, const struct whyspan_python *py,
						struct whyspan_way *way, __u64 cframe)
{
	way->before = cframe ? whyspan_peek_word(task, cframe + py->cframe_previous) : 0;
	way->outer = way->before ? whyspan_peek_word(task, way->before + py->current_frame) : 0;
}

static __always_inline long whyspan_walk_again(struct whyspan_walk *w, struct whyspan_way *way)
{
	way->words = way->first_word;
	way->frames = 0;
	if (way->sure) {
		way->flags |= STACK_BROKEN;
		return 1;
	}
	way->sure = 1;
	way->frame = way->outer;
	whyspan_walk_before(w->task, w->py, way, way->before);
	return 0;
}

static long whyspan_walk_on(__u64 i, struct whyspan_walk *w)
{
	const struct whyspan_python *py = w->py;
	struct whyspan_scratch *s = w->s;
	struct whyspan_way *way = &s->way;
	__u64 code, instr, name, hash;
	__u32 words = way->words, line;
	bool nobody, entry;

	if (!way->frame)
		return way->before && !whyspan_last_cframe(way, way->before) ? whyspan_walk_again(w, way) : 1;
	if (whyspan_peek(w->task, s->frame, 80, way->frame)) {
		if (way->before && !way->sure)
			return whyspan_walk_again(w, way);
		way->flags |= STACK_BROKEN;
		return 1;
	}
	code = AT(s->frame, py->frame_code) & ~(__u64)(py->tag_mask & 7);
	instr = AT(s->frame, py->frame_instr);
	way->frame = AT(s->frame, py->frame_previous);
	nobody = s->frame[py->frame_owner & 0x7f] >= OWNED_BY_NOBODY;
	if (way->before) {
		entry = py->frame_entry == WHYSPAN_NOWHERE ? nobody : s->frame[py->frame_entry & 0x7f];
		if (entry && way->frame != way->outer)
			return whyspan_walk_again(w, way);
		if (entry) {
			way->sure = 1;
			whyspan_walk_before(w->task, py, way, way->before);
		}
	}
	if (nobody)
		return 0;
	if (words > WHYSPAN_STACK_WORDS - 2 || way->frames >= WHYSPAN_PYTHON_FRAMES) {
		way->flags |= STACK_DEEPER;
		return 1;
	}
	if (whyspan_peek(w->task, s->code, 152, code)) {
		if (way->before && !way->sure)
			return whyspan_walk_again(w, way);
		way->flags |= STACK_BROKEN;
		return 1;
	}
	name = AT_CODE(py->code_name);
	hash = whyspan_peek_word(w->task, name + py->name_hash);
	line = *(__u32 *)(s->code + (py->code_line & 0x7c));
	hash ^= name ^ (AT_CODE(py->code_filename) << 1) ^ (AT_CODE(py->code_table) << 2) ^
		((__u64)line << 32);
	s->stack.words[words] = code;
	s->stack.words[words + 1] = (__u32)(instr - code - py->code_bytes) | (hash ^ hash >> 32) << 32;
	way->words = words + 2;
	way->frames++;
	return 0;
}

/* Add the frames of Python, the innermost first. */
static __always_inline void whyspan_walk_python(struct task_struct *task, const struct whyspan_python *py,
						__u32 own_tid, __u32 words, struct whyspan_scratch *s)
{
	__u64 state = whyspan_thread_state(task, py, s->stack.tgid, own_tid), at = state;
	struct whyspan_walk w = { .task = task, .py = py, .s = s };
	struct whyspan_way *way = &s->way;

	if (!state) {
		s->stack.flags |= STACK_NO_PYTHON;
		return;
	}
	way->first_word = way->words = words;
	way->state = state;
	way->before = way->outer = 0;
	way->frames = way->flags = way->sure = 0;
	if (whyspan_has_gil(task, py, state))
		way->flags |= STACK_HOLDS_GIL;
	if (py->thread_cframe != WHYSPAN_NOWHERE) {
		at = whyspan_peek_word(task, state + py->thread_cframe);
		if (!whyspan_last_cframe(way, at))
			whyspan_walk_before(task, py, way, at);
		/* The stack grows down. */
		if (!whyspan_last_cframe(way, at) && !whyspan_last_cframe(way, way->before) &&
		    way->before <= at) {
			way->flags |= STACK_BROKEN;
			at = way->before = 0;
		}
	}
	way->frame = at ? whyspan_peek_word(task, at + py->current_frame) : 0;
	/* Some frames are none of Python's: a few more rounds than frames. */
	bpf_loop(2 * WHYSPAN_PYTHON_FRAMES, whyspan_walk_on, &w, 0);
	if (!way->frames && !(way->flags & STACK_BROKEN))
		way->flags |= STACK_NO_PYTHON;
	s->stack.flags |= way->flags;
	s->stack.python_frames = way->frames;
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
