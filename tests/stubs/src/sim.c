/* See sim.h. */
#include "sim.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

pthread_mutex_t sim_lock = PTHREAD_MUTEX_INITIALIZER;
struct stream *all_streams;
static u64 stream_numbers = 10; /* below: the special ones */
static u32 pending_ops;

/* -- meetings of ranks -- */

static struct meeting *meeting_of(u64 key)
{
	struct meeting *free = NULL;

	for (u32 i = 0; i < MAX_MEETINGS; i++) {
		struct meeting *m = &region->meetings[(key + i) % MAX_MEETINGS];

		if (m->key == key)
			return m;
		if (!m->key && !free)
			free = m;
		if (free && i >= 63)
			break;
	}
	if (free)
		*free = (struct meeting){.key = key};
	return free;
}

static bool meet(struct stream *s, struct op *op)
{
	struct proc *p = this_process();
	int d = s->ctx->device;
	u64 start = later(s->end_ns, op->earliest_ns);
	struct meeting *m;
	bool all = false;

	lock_word(&region->lock);
	m = meeting_of(op->key);
	if (!m)
		goto out; /* too many at once: tried again */
	if (!op->arrived) {
		op->arrived = true;
		op->earliest_ns = start;
		m->expected = op->expected;
		m->latest_ns = later(m->latest_ns, start);
		p->spinning[d]++;
		if (++m->arrived == m->expected) {
			__atomic_fetch_add(&region->meeting_word, 1, __ATOMIC_RELEASE);
			syscall(SYS_futex, &region->meeting_word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
		}
	}
	all = m->arrived == m->expected;
	if (all) {
		s->end_ns = m->latest_ns + op->ns;
		p->spinning[d]--;
		if (++m->left == m->expected)
			m->key = 0;
	}
out:
	unlock_word(&region->lock);
	if (all)
		account(d, op->earliest_ns, s->end_ns);
	return all;
}

/* -- streams -- */

static bool resolve(struct stream *s, struct op *op)
{
	struct gpu *gpu = gpu_of(s->ctx);
	u64 start;
	f64 ns;

	switch (op->kind) {
	case OP_WORK:
		start = later(later(s->end_ns, op->earliest_ns), gpu->stall_until_ns);
		if (op->engine) {
			s->end_ns = engine_turn(gpu, op->engine, start, op->ns, op->bytes);
		} else if (op->kernel) {
			ns = (f64)op->ns / (gpu->clock_factor > 0 ? gpu->clock_factor : 1.0);
			if (this_process()->spilled_bytes)
				ns *= region->control.spill_factor;
			s->end_ns = shared_end(s->ctx->device, start, ns);
			account(s->ctx->device, start, s->end_ns);
			count(&region->kernel_ns, s->end_ns - start);
		} else {
			s->end_ns = start + op->ns;
		}
		break;
	case OP_RECORD:
		op->ticket->ns = later(s->end_ns, op->earliest_ns);
		op->ticket->done = true;
		ticket_drop(op->ticket);
		break;
	case OP_WAIT_TICKET:
		if (!op->ticket->done)
			return false;
		s->end_ns = later(s->end_ns, op->ticket->ns);
		ticket_drop(op->ticket);
		break;
	case OP_WAIT_STREAM:
		if (op->stream->resolved < op->seq)
			return false;
		s->end_ns = later(s->end_ns, op->stream->end_ns);
		break;
	case OP_MEET:
		if (!meet(s, op))
			return false;
		count(&region->kernel_ns, op->ns);
		break;
	}
	s->resolved++;
	return true;
}

static void remember_end(struct stream *s)
{
	if (s->ends_count == s->ends_room) {
		u32 room = s->ends_room ? 2 * s->ends_room : 256;
		u64 *ends = malloc(room * sizeof(*ends));

		for (u32 i = 0; i < s->ends_count; i++)
			ends[i] = s->ends[(s->ends_head + i) % s->ends_room];
		free(s->ends);
		s->ends = ends;
		s->ends_room = room;
		s->ends_head = 0;
	}
	s->ends[(s->ends_head + s->ends_count++) % s->ends_room] = s->end_ns;
}

void progress(void)
{
	bool moved = pending_ops > 0;

	while (moved) {
		moved = false;
		for (struct stream *s = all_streams; s; s = s->next) {
			while (s->waiting && resolve(s, &s->pending[s->head])) {
				if (s->pending[s->head].kind == OP_WORK || s->pending[s->head].kind == OP_MEET)
					remember_end(s);
				s->head = (s->head + 1) % s->room;
				s->waiting--;
				pending_ops--;
				moved = true;
			}
		}
	}
}

static void push(struct stream *s, const struct op *op)
{
	if (s->waiting == s->room) {
		u32 room = s->room ? 2 * s->room : 64;
		struct op *ops = malloc(room * sizeof(*ops));

		for (u32 i = 0; i < s->waiting; i++)
			ops[i] = s->pending[(s->head + i) % s->room];
		free(s->pending);
		s->pending = ops;
		s->room = room;
		s->head = 0;
	}
	s->pending[(s->head + s->waiting++) % s->room] = *op;
	pending_ops++;
}

static void put(struct stream *s, struct op *op)
{
	s->enqueued++;
	if (s->waiting || !resolve(s, op))
		push(s, op);
	else if (op->kind == OP_WORK || op->kind == OP_MEET)
		remember_end(s);
}

/* The legacy stream waits for all streams that do not decline, and they for it. */
static void order_with_legacy(struct stream *s)
{
	struct stream *legacy = s->ctx->legacy;

	if (s->legacy) {
		for (struct stream *o = all_streams; o; o = o->next)
			if (o->ctx == s->ctx && o != s && !(o->flags & CU_STREAM_NON_BLOCKING) &&
			    (o->waiting || o->end_ns > s->end_ns))
				put(s, &(struct op){.kind = OP_WAIT_STREAM, .stream = o, .seq = o->enqueued});
	} else if (!(s->flags & CU_STREAM_NON_BLOCKING) && legacy->enqueued > s->legacy_seen) {
		s->legacy_seen = legacy->enqueued;
		if (legacy->waiting || legacy->end_ns > s->end_ns)
			put(s, &(struct op){.kind = OP_WAIT_STREAM, .stream = legacy, .seq = legacy->enqueued});
	}
}

void enqueue(struct stream *s, struct op op)
{
	this_process();
	progress();
	order_with_legacy(s);
	if (!op.earliest_ns)
		op.earliest_ns = now_ns() + region->control.launch_latency_ns;
	put(s, &op);
}

void enqueue_record(struct stream *s, struct event *e)
{
	struct ticket *t = calloc(1, sizeof(*t));

	t->users = 2;
	if (e->ticket)
		ticket_drop(e->ticket);
	e->ticket = t;
	enqueue(s, (struct op){.kind = OP_RECORD, .ticket = t, .earliest_ns = now_ns()});
}

void enqueue_ticket(struct stream *s, struct ticket *t)
{
	t->users++;
	enqueue(s, (struct op){.kind = OP_WAIT_TICKET, .ticket = t});
}

void enqueue_meeting(struct stream *s, const struct meeting_arg *m)
{
	const struct control *c = &region->control;
	u64 number = ++*m->counter;
	u64 ns = c->nccl_ns + (c->nccl_bps ? (u64)((f64)m->bytes * 1e9 / (f64)c->nccl_bps) : 0);

	count(&region->collectives, 1);
	enqueue(s, (struct op){.kind = OP_MEET, .key = mixed(m->key + number * 0x9e3779b97f4a7c15ULL),
			       .expected = m->expected, .ns = ns});
}

void enqueue_copy(struct stream *s, int direction, u64 bytes, enum copy_engine engine)
{
	const struct control *c = &region->control;
	u64 ns = c->copy_latency_ns;

	if (direction == 2)
		ns += c->d2d_bps ? (u64)((f64)bytes * 1e9 / (f64)c->d2d_bps) : 0;
	else
		ns += link_ns(s->ctx, bytes, direction ? c->d2h_bps : c->h2d_bps);
	enqueue(s, (struct op){.kind = OP_WORK, .ns = ns, .engine = engine, .bytes = bytes});
}

void ticket_drop(struct ticket *t)
{
	if (!--t->users)
		free(t);
}

struct stream *stream_new(struct context *ctx, u32 flags, i32 priority, bool legacy)
{
	struct stream *s = calloc(1, sizeof(*s));

	s->ctx = ctx;
	s->flags = flags;
	s->priority = priority;
	s->legacy = legacy;
	s->number = legacy ? 1 : ++stream_numbers;
	s->next = all_streams;
	all_streams = s;
	return s;
}

/* The stream that a handle means in this thread and context; NULL if it means none. */
struct stream *stream_of(CUstream handle)
{
	static __thread struct stream *mine[MAX_DEVICES];
	struct context *ctx = current_context;

	if (handle == NULL || handle == CU_STREAM_LEGACY)
		return ctx ? ctx->legacy : NULL;
	if (handle == CU_STREAM_PER_THREAD) {
		if (!ctx)
			return NULL;
		if (!mine[ctx->device] || mine[ctx->device]->ctx != ctx)
			mine[ctx->device] = stream_new(ctx, 0, 0, false);
		return mine[ctx->device];
	}
	return handle->dead ? NULL : handle;
}

/* -- waiting; without the lock -- */

enum wait_mode wait_mode_of(const struct context *ctx)
{
	switch (ctx->flags & CU_CTX_SCHED_MASK) {
	case CU_CTX_SCHED_BLOCKING_SYNC:
		return WAIT_BLOCK;
	case CU_CTX_SCHED_YIELD:
		return WAIT_YIELD;
	default:
		return WAIT_SPIN; /* automatic, with no more contexts than processors */
	}
}

static void pause_for_ranks(u32 seen, enum wait_mode mode)
{
	const struct timespec slice = {.tv_nsec = 1000000};

	if (mode == WAIT_BLOCK)
		syscall(SYS_futex, &region->meeting_word, FUTEX_WAIT, seen, &slice, NULL, 0);
	else if (mode == WAIT_YIELD)
		sched_yield();
	else
		cpu_relax();
}

void wait_for_stream(struct stream *s, enum wait_mode mode)
{
	u64 begin = 0, wanted, end;

	pthread_mutex_lock(&sim_lock);
	for (wanted = s->enqueued; progress(), s->resolved < wanted;) {
		u32 seen = __atomic_load_n(&region->meeting_word, __ATOMIC_ACQUIRE);

		begin = begin ? begin : now_ns();
		pthread_mutex_unlock(&sim_lock);
		pause_for_ranks(seen, mode);
		pthread_mutex_lock(&sim_lock);
	}
	end = s->end_ns;
	pthread_mutex_unlock(&sim_lock);
	if (begin)
		here.wait_ns += now_ns() - begin;
	wait_until(end, mode);
}

void wait_for_device(struct context *ctx, enum wait_mode mode)
{
	/* Streams are never freed, and new ones come before the head: no lock for the walk. */
	pthread_mutex_lock(&sim_lock);
	struct stream *first = all_streams;
	pthread_mutex_unlock(&sim_lock);
	for (struct stream *s = first; s; s = s->next)
		if (s->ctx->device == ctx->device)
			wait_for_stream(s, mode);
}

void wait_for_ticket(struct ticket *t, enum wait_mode mode)
{
	u64 begin = 0, end;

	pthread_mutex_lock(&sim_lock);
	t->users++;
	while (progress(), !t->done) {
		u32 seen = __atomic_load_n(&region->meeting_word, __ATOMIC_ACQUIRE);

		begin = begin ? begin : now_ns();
		pthread_mutex_unlock(&sim_lock);
		pause_for_ranks(seen, mode);
		pthread_mutex_lock(&sim_lock);
	}
	end = t->ns;
	ticket_drop(t);
	pthread_mutex_unlock(&sim_lock);
	if (begin)
		here.wait_ns += now_ns() - begin;
	wait_until(end, mode);
}

/* Wait until the stream has room for one more launch, as the driver does when its queue is full. Lock held. */
void wait_for_room(struct stream *s)
{
	u64 limit = region->control.launch_queue, begin = 0, until;

	for (;;) {
		u64 now = now_ns();

		while (s->ends_count && s->ends[s->ends_head] <= now) {
			s->ends_head = (s->ends_head + 1) % s->ends_room;
			s->ends_count--;
		}
		if (!limit || s->ends_count + s->waiting < limit)
			break;
		begin = begin ? begin : now;
		until = s->ends_count ? s->ends[s->ends_head] : now + 20000;
		pthread_mutex_unlock(&sim_lock);
		burn_until(until);
		pthread_mutex_lock(&sim_lock);
		progress();
	}
	if (begin)
		here.wait_ns += now_ns() - begin;
}
