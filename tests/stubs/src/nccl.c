/*
 * libnccl: collectives and point-to-point calls. Each enqueues one kernel of NCCL's on the stream (through the driver,
 * as the real library does), which ends when all ranks have reached it; the ranks meet in the device's file.
 */
#include "cuda_abi.h"
#include "meeting.h"
#include "stub.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

typedef int ncclResult_t;
typedef struct comm *ncclComm_t;
typedef struct {
	char internal[128];
} ncclUniqueId;

enum { ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage };
enum { MAX_RANKS = 64, MAX_GROUPED = 256, KERNELS = 64 };
#define VERSION 22703

struct comm {
	u64 key, collectives;
	u64 sent[MAX_RANKS], received[MAX_RANKS];
	int ranks, rank, device;
	CUcontext context;
	bool joining;
};

static struct {
	CUresult (*cuCtxGetCurrent)(CUcontext *);
	CUresult (*cuCtxSetCurrent)(CUcontext);
	CUresult (*cuCtxGetDevice)(CUdevice *);
	CUresult (*cuLibraryLoadData)(CUlibrary *, const void *, int *, void **, unsigned, int *, void **, unsigned);
	CUresult (*cuLibraryGetKernel)(CUkernel *, CUlibrary, const char *);
	CUresult (*cuLaunchKernelEx)(const CUlaunchConfig *, CUfunction, void **, void **);
	next_meetings *next;
	CUlibrary library;
} driver;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
	char name[96];
	CUkernel kernel;
} kernels[KERNELS];

static ncclResult_t load_driver(void)
{
	static bool loaded;
	void *handle;
	CUresult (*get)(const char *, void **, int, unsigned long long, int *);
	CUresult r = CUDA_SUCCESS;

	pthread_mutex_lock(&lock);
	if (!loaded) {
		handle = dlopen("libcuda.so.1", RTLD_NOW);
		get = handle ? (__typeof__(get))dlsym(handle, "cuGetProcAddress_v2") : NULL;
		driver.next = handle ? (next_meetings *)dlsym(handle, "whyspan_stub_next_meetings") : NULL;
		r = get && driver.next ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
#define GET(name) r = r ? r : get(#name, (void **)&driver.name, DRIVER_VERSION, 0, NULL)
		GET(cuCtxGetCurrent);
		GET(cuCtxSetCurrent);
		GET(cuCtxGetDevice);
		GET(cuLibraryLoadData);
		GET(cuLibraryGetKernel);
		GET(cuLaunchKernelEx);
#undef GET
		r = r ? r : driver.cuLibraryLoadData(&driver.library, "\x7f" "ELF", NULL, NULL, 0, NULL, NULL, 0);
		loaded = !r;
	}
	pthread_mutex_unlock(&lock);
	return r ? ncclUnhandledCudaError : ncclSuccess;
}

/* -- groups -- */

struct grouped {
	struct comm *comm;
	CUstream stream;
	struct meeting_arg meeting;
	char kernel[96];
	u64 order; /* the same on all ranks, so that none waits for another in a circle */
};

static __thread int depth;
static __thread struct grouped ops[MAX_GROUPED];
static __thread int op_count;
static __thread struct comm *joins[MAX_RANKS];
static __thread int join_count;

static CUkernel kernel_named(const char *name)
{
	CUkernel found = NULL;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < KERNELS && !found; i++) {
		if (!kernels[i].name[0]) {
			if (driver.cuLibraryGetKernel(&kernels[i].kernel, driver.library, name))
				break;
			snprintf(kernels[i].name, sizeof(kernels[i].name), "%s", name);
		}
		if (!strcmp(kernels[i].name, name))
			found = kernels[i].kernel;
	}
	pthread_mutex_unlock(&lock);
	return found;
}

static int in_order(const void *a, const void *b)
{
	const struct grouped *x = a, *y = b;

	if (x->comm != y->comm)
		return x->comm < y->comm ? -1 : 1;
	return x->order < y->order ? -1 : x->order > y->order;
}

/* What a group has for one communicator is one kernel. */
static ncclResult_t launch(struct grouped *first, int n)
{
	struct meeting_arg meetings[MAX_GROUPED];
	CUlaunchConfig config = {24, 1, 1, 544, 1, 1, 0, first->stream, NULL, 0};
	CUkernel kernel = kernel_named(n > 1 ? "_Z22ncclDevKernel_SendRecv24ncclDevKernelArgsStorageILm4096EE"
					     : first->kernel);
	void *params[] = {&meetings};
	CUcontext before;
	CUresult r;

	if (!kernel)
		return ncclInternalError;
	for (int i = 0; i < n; i++)
		meetings[i] = first[i].meeting;
	driver.cuCtxGetCurrent(&before);
	if (before != first->comm->context)
		driver.cuCtxSetCurrent(first->comm->context);
	driver.next(meetings, (u32)n);
	r = driver.cuLaunchKernelEx(&config, kernel, params, NULL);
	if (before != first->comm->context)
		driver.cuCtxSetCurrent(before);
	return r ? ncclUnhandledCudaError : ncclSuccess;
}

static ncclResult_t run_group(void)
{
	ncclResult_t r = ncclSuccess;

	qsort(ops, (size_t)op_count, sizeof(*ops), in_order);
	for (int i = 0, n; i < op_count && !r; i += n) {
		for (n = 1; i + n < op_count && ops[i + n].comm == ops[i].comm; n++)
			;
		r = launch(&ops[i], n);
	}
	op_count = 0;
	return r;
}

/* -- communicators -- */

static struct meeting *joining(struct comm *c)
{
	u64 key = mixed(c->key ^ 0x6a6f696e);

	for (u32 i = 0; i < MAX_MEETINGS; i++) {
		struct meeting *m = &region->meetings[(key + i) % MAX_MEETINGS];

		if (m->key == key || !m->key) {
			if (!m->key)
				*m = (struct meeting){.key = key, .expected = (u32)c->ranks};
			return m;
		}
	}
	return NULL;
}

static void join(struct comm *c)
{
	struct meeting *m;

	lock_word(&region->lock);
	m = joining(c);
	if (m)
		m->arrived++;
	c->joining = true;
	unlock_word(&region->lock);
}

static void wait_for_all(struct comm *c)
{
	const struct timespec slice = {.tv_nsec = 200000};
	u64 begin = now_ns();
	bool all = false;

	while (!all) {
		struct meeting *m;

		lock_word(&region->lock);
		m = joining(c);
		all = !m || m->arrived >= m->expected;
		if (m && all && ++m->left == m->expected)
			m->key = 0;
		unlock_word(&region->lock);
		if (!all)
			nanosleep(&slice, NULL);
	}
	here.wait_ns += now_ns() - begin;
	c->joining = false;
}

static ncclResult_t init_rank(ncclComm_t *out, int ranks, const ncclUniqueId *id, int rank)
{
	struct comm *c;
	ncclResult_t r = load_driver();

	if (r)
		return r;
	if (!out || ranks < 1 || ranks > MAX_RANKS || rank < 0 || rank >= ranks)
		return ncclInvalidArgument;
	c = calloc(1, sizeof(*c));
	memcpy(&c->key, id->internal, sizeof(c->key));
	c->ranks = ranks;
	c->rank = rank;
	driver.cuCtxGetCurrent(&c->context);
	if (!c->context || driver.cuCtxGetDevice(&c->device)) {
		free(c);
		return ncclUnhandledCudaError;
	}
	join(c);
	*out = c;
	if (depth && join_count < MAX_RANKS)
		joins[join_count++] = c;
	else
		wait_for_all(c);
	return ncclSuccess;
}

static ncclResult_t unique_id(ncclUniqueId *id)
{
	if (!id)
		return ncclInvalidArgument;
	return getrandom(id, sizeof(*id), 0) == sizeof(*id) ? ncclSuccess : ncclSystemError;
}

static ncclResult_t end_group(void)
{
	ncclResult_t r;

	if (!depth)
		return ncclInvalidUsage;
	if (--depth)
		return ncclSuccess;
	r = run_group();
	while (join_count)
		wait_for_all(joins[--join_count]);
	return r;
}

/* -- operations -- */

static const u32 sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static const char *const types[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "f8e4m3", "f8e5m2"};
static const char *const reductions[] = {"Sum", "Prod", "MinMax", "MinMax", "SumPostDiv"};

static void kernel_name(char *out, size_t size, const char *what)
{
	snprintf(out, size, "_Z%zu%s24ncclDevKernelArgsStorageILm4096EE", strlen(what), what);
}

/* `share`: how much of the bytes a rank has to move. */
static ncclResult_t add(struct comm *c, CUstream stream, const char *kernel, u64 key, u64 *counter, u32 expected,
			u64 bytes, double share, u64 order)
{
	struct grouped op = {.comm = c, .stream = stream, .order = order};
	bool alone = !depth;

	op.meeting = (struct meeting_arg){.key = key, .bytes = (u64)((double)bytes * share), .counter = counter,
					  .expected = expected};
	kernel_name(op.kernel, sizeof(op.kernel), kernel);
	if (op_count == MAX_GROUPED)
		return ncclInternalError;
	here.bytes = bytes;
	ops[op_count++] = op;
	return alone ? run_group() : ncclSuccess;
}

static ncclResult_t collective(const char *name, int reduction, u64 elements, int type, struct comm *c, CUstream stream,
			       double share)
{
	char kernel[64];

	if (!c || type < 0 || type > 11 || reduction > 4)
		return ncclInvalidArgument;
	if (reduction >= 0)
		snprintf(kernel, sizeof(kernel), "ncclDevKernel_%s_%s_%s_RING_LL", name, reductions[reduction], types[type]);
	else
		snprintf(kernel, sizeof(kernel), "ncclDevKernel_%s_RING_LL", name);
	return add(c, stream, kernel, c->key, &c->collectives, (u32)c->ranks, elements * sizes[type],
		   c->ranks > 1 ? share * (c->ranks - 1) / c->ranks : 0.0, c->collectives + (u64)op_count);
}

static ncclResult_t point_to_point(struct comm *c, int peer, bool send, u64 elements, int type, CUstream stream)
{
	u64 from, to, order;

	if (!c || type < 0 || type > 11 || peer < 0 || peer >= c->ranks)
		return ncclInvalidArgument;
	from = (u64)(send ? c->rank : peer);
	to = (u64)(send ? peer : c->rank);
	order = (from < to ? from << 16 | to << 8 : to << 16 | from << 8) | (from < to);
	return add(c, stream, "ncclDevKernel_SendRecv", mixed(c->key + 1 + (from << 32 | to)),
		   send ? &c->sent[peer] : &c->received[peer], from == to ? 1 : 2, elements * sizes[type], 1.0, order);
}

#define NCCL(name, params, what)                                                                             \
	EXPORT ncclResult_t p##name params                                                                   \
	{                                                                                                    \
		ncclResult_t r_;                                                                             \
		ENTER(#name);                                                                                \
		r_ = here.forced ? here.forced : !region ? ncclUnhandledCudaError : (what);                  \
		return call_end(r_, 7);                                                                      \
	}                                                                                                    \
	EXPORT ncclResult_t name params __attribute__((weak, alias("p" #name)));

NCCL(ncclGetVersion, (int *version), (*version = VERSION, ncclSuccess))
NCCL(ncclGetUniqueId, (ncclUniqueId * id), unique_id(id))
NCCL(ncclCommInitRank, (ncclComm_t * out, int ranks, ncclUniqueId id, int rank), init_rank(out, ranks, &id, rank))
NCCL(ncclCommInitRankConfig, (ncclComm_t * out, int ranks, ncclUniqueId id, int rank, void *config),
     ((void)config, init_rank(out, ranks, &id, rank)))
NCCL(ncclCommFinalize, (ncclComm_t comm), comm ? ncclSuccess : ncclInvalidArgument)
NCCL(ncclCommDestroy, (ncclComm_t comm), comm ? ncclSuccess : ncclInvalidArgument) /* its counters may be in use */
NCCL(ncclCommAbort, (ncclComm_t comm), comm ? ncclSuccess : ncclInvalidArgument)
NCCL(ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *error),
     comm ? (*error = ncclSuccess, ncclSuccess) : ncclInvalidArgument)
NCCL(ncclCommCount, (ncclComm_t comm, int *n), comm ? (*n = comm->ranks, ncclSuccess) : ncclInvalidArgument)
NCCL(ncclCommUserRank, (ncclComm_t comm, int *n), comm ? (*n = comm->rank, ncclSuccess) : ncclInvalidArgument)
NCCL(ncclCommCuDevice, (ncclComm_t comm, int *n), comm ? (*n = comm->device, ncclSuccess) : ncclInvalidArgument)
NCCL(ncclGroupStart, (void), (depth++, ncclSuccess))
NCCL(ncclGroupEnd, (void), end_group())
NCCL(ncclAllReduce,
     (const void *from, void *to, size_t n, int type, int reduction, ncclComm_t comm, CUstream stream),
     ((void)from, (void)to, collective("AllReduce", reduction, n, type, comm, stream, 2.0)))
NCCL(ncclAllGather, (const void *from, void *to, size_t n, int type, ncclComm_t comm, CUstream stream),
     ((void)from, (void)to, collective("AllGather", -1, comm ? n * (size_t)comm->ranks : 0, type, comm, stream, 1.0)))
NCCL(ncclReduceScatter,
     (const void *from, void *to, size_t n, int type, int reduction, ncclComm_t comm, CUstream stream),
     ((void)from, (void)to,
      collective("ReduceScatter", reduction, comm ? n * (size_t)comm->ranks : 0, type, comm, stream, 1.0)))
NCCL(ncclBroadcast, (const void *from, void *to, size_t n, int type, int root, ncclComm_t comm, CUstream stream),
     ((void)from, (void)to, (void)root, collective("Broadcast", -1, n, type, comm, stream, 1.0)))
NCCL(ncclBcast, (void *at, size_t n, int type, int root, ncclComm_t comm, CUstream stream),
     ((void)at, (void)root, collective("Broadcast", -1, n, type, comm, stream, 1.0)))
NCCL(ncclReduce,
     (const void *from, void *to, size_t n, int type, int reduction, int root, ncclComm_t comm, CUstream stream),
     ((void)from, (void)to, (void)root, collective("Reduce", reduction, n, type, comm, stream, 1.0)))
NCCL(ncclSend, (const void *from, size_t n, int type, int peer, ncclComm_t comm, CUstream stream),
     ((void)from, point_to_point(comm, peer, true, n, type, stream)))
NCCL(ncclRecv, (void *to, size_t n, int type, int peer, ncclComm_t comm, CUstream stream),
     ((void)to, point_to_point(comm, peer, false, n, type, stream)))

EXPORT const char *ncclGetErrorString(ncclResult_t error)
{
	static const char *const texts[] = {"no error",		"unhandled cuda error", "unhandled system error",
					    "internal error",	"invalid argument",	"invalid usage"};

	return error >= 0 && error < 6 ? texts[error] : "unknown result code";
}

EXPORT const char *ncclGetLastError(ncclComm_t comm)
{
	(void)comm;
	return "";
}
