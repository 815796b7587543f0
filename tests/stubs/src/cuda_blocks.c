/* libcuda: which memory is whose, and what an address is. See cuda_blocks.h. */
#include "cuda_blocks.h"

#include <stdlib.h>
#include <string.h>

/* Sorted by address, so that an address within a block finds it. Under sim_lock. */
struct block *blocks;
u32 block_count;
static u32 block_room;

static u32 position(u64 at)
{
	u32 low = 0, high = block_count;

	while (low < high) {
		u32 middle = (low + high) / 2;

		if (blocks[middle].at <= at)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

struct block *block_of(u64 at)
{
	u32 i = position(at);

	return i && at - blocks[i - 1].at < blocks[i - 1].bytes ? &blocks[i - 1] : NULL;
}

struct block *block_at(u64 at)
{
	struct block *b = block_of(at);

	return b && b->at == at ? b : NULL;
}

void remember(struct block b)
{
	u32 i = position(b.at);

	if (block_count == block_room) {
		block_room = block_room ? 2 * block_room : 256;
		blocks = realloc(blocks, block_room * sizeof(*blocks));
	}
	memmove(&blocks[i + 1], &blocks[i], (block_count++ - i) * sizeof(*blocks));
	blocks[i] = b;
}

void forget(struct block *b)
{
	u32 i = (u32)(b - blocks);

	memmove(b, b + 1, (--block_count - i) * sizeof(*blocks));
}

bool is_pinned(const void *host)
{
	struct block *b = block_of((u64)host);

	return b && (b->kind == PINNED || b->kind == REGISTERED);
}

bool is_device(CUdeviceptr at)
{
	struct block *b = block_of(at);

	return b && b->kind < PINNED && b->kind != PHYSICAL;
}

/* -- granules; under the region's lock -- */

u64 total_granules(const struct gpu *gpu)
{
	u64 n = gpu->memory_bytes / gpu->granule_bytes;

	return n < MAX_GRANULES ? n : MAX_GRANULES;
}

/* The first run of `n` free granules; -1: none. */
static i64 free_run(const struct gpu *gpu, u64 n)
{
	u64 total = total_granules(gpu), run = 0;

	for (u64 g = 0; g < total; g++) {
		run = gpu->owner[g] ? 0 : run + 1;
		if (run == n)
			return (i64)(g + 1 - n);
	}
	return -1;
}

void give_back(struct gpu *gpu, int d, u64 first, u64 n)
{
	memset(&gpu->owner[first], 0, n);
	gpu->used_granules -= n;
	this_process()->granules[d] -= n;
}

i64 take_run(struct gpu *gpu, int d, u64 n)
{
	struct proc *p = this_process();
	i64 first;

	lock_word(&region->lock);
	first = free_run(gpu, n);
	if (first >= 0) {
		memset(&gpu->owner[first], (int)(p - region->procs + 1), n);
		gpu->used_granules += n;
		p->granules[d] += n;
	}
	unlock_word(&region->lock);
	return first;
}

u64 granules_for(const struct gpu *gpu, u64 bytes)
{
	return (bytes + gpu->granule_bytes - 1) / gpu->granule_bytes;
}

/* Memory calls take the driver's lock, which all processes of the host share. */
void in_driver(u64 ns)
{
	u64 begin = now_ns();

	lock_word(&region->driver_lock);
	here.wait_ns += now_ns() - begin;
	burn_ns(ns);
	unlock_word(&region->driver_lock);
}

/* -- what an address is -- */

static CUresult pointer(void *out, int which, CUdeviceptr at)
{
	struct block *found, b;

	TRY(usable());
	pthread_mutex_lock(&sim_lock);
	found = block_of(at);
	if (found)
		b = *found;
	pthread_mutex_unlock(&sim_lock);
	if (!found || b.kind == PHYSICAL)
		return CUDA_ERROR_INVALID_VALUE; /* memory that CUDA knows nothing of: pageable */
	switch (which) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*(CUcontext *)out = current_context;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned int *)out = b.kind >= PINNED ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		*(CUdeviceptr *)out = at;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (b.kind < PINNED && b.kind != MANAGED)
			return CUDA_ERROR_INVALID_VALUE;
		*(void **)out = (void *)at;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		*(unsigned int *)out = b.kind == MANAGED;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)out = b.device;
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

API(cuPointerGetAttribute, (void *out, int which, CUdeviceptr at), pointer(out, which, at))
