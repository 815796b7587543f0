/*
 * Streams of a simulated GPU, inside libcuda.so.1 of one process. Work has a duration; a stream's works follow each
 * other; so its end is known when it is enqueued, except behind a meeting with other ranks. Everything here is called
 * with sim_lock held, except where it says that it waits.
 */
#pragma once
#include <pthread.h>

#include "cuda_abi.h"
#include "meeting.h"
#include "stub.h"

enum op_kind { OP_WORK, OP_RECORD, OP_WAIT_TICKET, OP_WAIT_STREAM, OP_MEET };
enum copy_engine { NO_ENGINE, TO_DEVICE, FROM_DEVICE };

/* One recording of an event. */
struct ticket {
	u64 ns;
	u32 users;
	bool done;
};

struct op {
	enum op_kind kind;
	enum copy_engine engine;
	bool kernel; /* slowed by clocks, by a spill and by other processes */
	bool arrived;
	u32 expected;
	u64 ns, earliest_ns, seq, key, bytes;
	struct ticket *ticket;
	struct stream *stream;
};

struct stream {
	struct stream *next;
	struct context *ctx;
	u64 number, end_ns, enqueued, resolved, legacy_seen;
	u32 flags;
	i32 priority;
	bool legacy, dead, invalidated;
	struct op *pending; /* a ring of `room` */
	u32 room, head, waiting;
	u64 *ends; /* when recent launches end, a ring of `ends_room` */
	u32 ends_room, ends_head, ends_count;
	struct graph *capture;
	bool capture_origin;
};

struct context {
	int device;
	u32 flags, users, api_version;
	u64 id;
	bool primary;
	struct stream *legacy;
	u64 bytes_spilled;
};

struct event {
	u32 flags;
	struct ticket *ticket; /* NULL: never recorded */
	struct graph *capture; /* recorded in a capture */
};

struct function {
	struct function *next;
	struct module *module;
	char name[512];
	u64 generation, ns, ns_per_block;
	bool loaded;
};

struct module {
	struct module *next;
	struct function *functions;
	bool any_name; /* an image that cannot be read: it has what is asked for */
	bool unloaded;
};

enum node_kind { NODE_KERNEL, NODE_COPY, NODE_MEMSET, NODE_MEET };

struct node {
	enum node_kind kind;
	struct function *function;
	u64 blocks, bytes, ns;
	enum copy_engine engine;
	int direction, pinned;
	struct meeting_arg *meetings;
	u32 meets;
};

struct graph {
	struct node *nodes;
	u32 count, room;
	bool invalid;
};

struct graph_exec {
	struct node *nodes;
	u32 count;
};

extern pthread_mutex_t sim_lock;
extern struct stream *all_streams;
extern __thread struct context *current_context;

struct gpu *gpu_of(const struct context *ctx);
struct proc *this_process(void);
void leave_device(void);

u64 shared_end(int device, u64 at, f64 ns);
void account(int device, u64 begin, u64 end);
u64 engine_turn(struct gpu *gpu, enum copy_engine e, u64 start, u64 ns, u64 bytes);

static inline u64 later(u64 a, u64 b)
{
	return a > b ? a : b;
}

static inline u64 sooner(u64 a, u64 b)
{
	return a < b ? a : b;
}

struct stream *stream_new(struct context *ctx, u32 flags, i32 priority, bool legacy);
struct stream *stream_of(CUstream handle);
enum wait_mode wait_mode_of(const struct context *ctx);

u64 kernel_ns(struct function *f, u64 blocks);
void enqueue(struct stream *s, struct op op);
void enqueue_record(struct stream *s, struct event *e);
void enqueue_ticket(struct stream *s, struct ticket *t);
void enqueue_meeting(struct stream *s, const struct meeting_arg *m);
void enqueue_copy(struct stream *s, int direction, u64 bytes, enum copy_engine engine);
void wait_for_room(struct stream *s);
void ticket_drop(struct ticket *t);
void progress(void);
u64 link_ns(const struct context *ctx, u64 bytes, u64 bps);

/* These take the lock themselves and wait. */
void wait_for_stream(struct stream *s, enum wait_mode mode);
void wait_for_device(struct context *ctx, enum wait_mode mode);
void wait_for_ticket(struct ticket *t, enum wait_mode mode);

CUresult usable(void);
CUresult context_now(struct context **ctx);

/* Memory: what a host pointer is, and the accounts of copies. */
bool is_pinned(const void *host);
bool is_device(CUdeviceptr at);
void count_copy(int direction, int pinned, int async, u64 bytes);

struct node *graph_add(struct graph *g);
bool capturing_anywhere(void);
