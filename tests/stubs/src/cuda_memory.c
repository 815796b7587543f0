/* libcuda: memory of the device, as it is asked for or in the order of a stream. */
#include "cuda_blocks.h"

#include <sys/mman.h>

static u64 next_spill = SPILL_BASE;

static void spill(i64 bytes)
{
	struct proc *p = this_process();

	__atomic_fetch_add(&p->spilled_bytes, (u64)bytes, __ATOMIC_RELAXED);
	__atomic_fetch_add(&gpu_of(current_context)->spilled_bytes, (u64)bytes, __ATOMIC_RELAXED);
}

static CUresult take(struct context *ctx, u64 bytes, enum kind kind, CUdeviceptr *out)
{
	struct gpu *gpu = gpu_of(ctx);
	struct block b = {.bytes = bytes, .kind = kind, .device = ctx->device};
	i64 first;

	b.granules = granules_for(gpu, bytes);
	first = take_run(gpu, ctx->device, b.granules);
	if (first >= 0) {
		b.first = (u64)first;
		b.at = DEVICE_BASE + DEVICE_STEP * (u64)ctx->device + b.first * gpu->granule_bytes;
	} else if (region->control.spill) {
		b.kind = SPILLED;
		b.granules = 0;
		b.at = next_spill;
		next_spill += (bytes + 0xffff) & ~0xffffULL;
		spill((i64)bytes);
	} else {
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	remember(b);
	*out = b.at;
	return CUDA_SUCCESS;
}

static void release(struct block *b)
{
	if (b->granules) {
		lock_word(&region->lock);
		give_back(&region->gpus[b->device], b->device, b->first, b->granules);
		unlock_word(&region->lock);
	} else if (b->kind == SPILLED) {
		spill(-(i64)b->bytes);
	}
	forget(b);
}

/* -- plain memory -- */

/* Freed by cuMemFreeAsync and kept by the process's pool. */
static u64 pooled_bytes;

static void trim_pool(void)
{
	for (u32 i = block_count; i-- > 0;)
		if (blocks[i].kind == POOLED && blocks[i].list)
			release(&blocks[i]);
	pooled_bytes = 0;
}

static CUresult allocate(CUdeviceptr *out, size_t bytes)
{
	struct context *ctx;
	CUresult result;

	TRY(context_now(&ctx));
	if (!out || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	if (capturing_anywhere())
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	here.bytes = bytes;
	in_driver(region->control.alloc_host_ns);
	pthread_mutex_lock(&sim_lock);
	result = take(ctx, bytes, PLAIN, out);
	if (result == CUDA_ERROR_OUT_OF_MEMORY && pooled_bytes) {
		trim_pool();
		result = take(ctx, bytes, PLAIN, out);
	}
	pthread_mutex_unlock(&sim_lock);
	return result;
}

static CUresult deallocate(CUdeviceptr at)
{
	struct context *ctx;
	struct block *b;

	TRY(context_now(&ctx));
	if (!at)
		return CUDA_SUCCESS;
	if (capturing_anywhere())
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	pthread_mutex_lock(&sim_lock);
	b = block_at(at);
	here.bytes = b ? b->bytes : 0;
	pthread_mutex_unlock(&sim_lock);
	if (!b)
		return CUDA_ERROR_INVALID_VALUE;
	/* It waits for everything on the device, for the memory may be in use. */
	wait_for_device(ctx, wait_mode_of(ctx));
	in_driver(region->control.free_host_ns);
	pthread_mutex_lock(&sim_lock);
	b = block_at(at);
	if (b) {
		if (b->kind == MANAGED)
			munmap((void *)b->at, b->bytes);
		release(b);
	}
	pthread_mutex_unlock(&sim_lock);
	return CUDA_SUCCESS;
}

static CUresult managed(CUdeviceptr *out, size_t bytes)
{
	struct context *ctx;
	struct block b = {.bytes = bytes, .kind = MANAGED};
	struct gpu *gpu;
	i64 first;

	TRY(context_now(&ctx));
	if (!out || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	here.bytes = bytes;
	in_driver(region->control.alloc_host_ns);
	b.at = (u64)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if ((void *)b.at == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	gpu = gpu_of(ctx);
	b.device = ctx->device;
	pthread_mutex_lock(&sim_lock);
	b.granules = granules_for(gpu, bytes);
	first = take_run(gpu, ctx->device, b.granules);
	if (first < 0) {
		b.granules = 0; /* over-subscribed: the rest stays in system memory */
		spill((i64)bytes);
	}
	b.first = first < 0 ? 0 : (u64)first;
	remember(b);
	pthread_mutex_unlock(&sim_lock);
	*out = b.at;
	return CUDA_SUCCESS;
}

static CUresult info(size_t *unused, size_t *total)
{
	struct context *ctx;
	struct gpu *gpu;

	TRY(context_now(&ctx));
	gpu = gpu_of(ctx);
	if (unused)
		*unused = (total_granules(gpu) - gpu->used_granules) * gpu->granule_bytes;
	if (total)
		*total = gpu->memory_bytes;
	return CUDA_SUCCESS;
}

static CUresult range(CUdeviceptr *base, size_t *bytes, CUdeviceptr at)
{
	struct block *b;

	pthread_mutex_lock(&sim_lock);
	b = block_of(at);
	if (b && base)
		*base = b->at;
	if (b && bytes)
		*bytes = b->bytes;
	pthread_mutex_unlock(&sim_lock);
	return b ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API(cuMemAlloc_v2, (CUdeviceptr * out, size_t bytes), allocate(out, bytes))
API(cuMemFree_v2, (CUdeviceptr at), deallocate(at))
API(cuMemAllocManaged, (CUdeviceptr * out, size_t bytes, unsigned int flags), ((void)flags, managed(out, bytes)))
API(cuMemGetInfo_v2, (size_t * unused, size_t *total), info(unused, total))
API(cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t *bytes, CUdeviceptr at), range(base, bytes, at))

/* -- memory in the order of a stream: from the process's pool where it has a block of that size -- */

/* `list` marks a pooled block as free; it is a tag here, never followed. */
#define FREE_TAG ((u32 *)1)

static CUresult allocate_async(CUdeviceptr *out, size_t bytes, CUstream handle)
{
	struct stream *s;
	CUresult result = CUDA_SUCCESS;
	bool found = false;

	TRY(stream_now(handle, &s));
	if (!out || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	here.bytes = bytes;
	burn_ns(region->control.call_host_ns);
	pthread_mutex_lock(&sim_lock);
	for (u32 i = 0; pooled_bytes && i < block_count && !found; i++)
		if (blocks[i].kind == POOLED && blocks[i].list && blocks[i].bytes == bytes) {
			blocks[i].list = NULL;
			pooled_bytes -= bytes;
			*out = blocks[i].at;
			found = true;
		}
	pthread_mutex_unlock(&sim_lock);
	if (found)
		return CUDA_SUCCESS;
	in_driver(region->control.alloc_host_ns);
	pthread_mutex_lock(&sim_lock);
	result = take(s->ctx, bytes, POOLED, out);
	if (result == CUDA_ERROR_OUT_OF_MEMORY && pooled_bytes) {
		trim_pool();
		result = take(s->ctx, bytes, POOLED, out);
	}
	pthread_mutex_unlock(&sim_lock);
	return result;
}

static CUresult free_async(CUdeviceptr at, CUstream handle)
{
	struct stream *s;
	struct block *b;

	TRY(stream_now(handle, &s));
	burn_ns(region->control.call_host_ns);
	pthread_mutex_lock(&sim_lock);
	b = block_at(at);
	if (b && b->kind == POOLED && !b->list) {
		b->list = FREE_TAG;
		pooled_bytes += b->bytes;
		here.bytes = b->bytes;
	} else if (b && b->kind == SPILLED) {
		release(b);
	} else {
		b = NULL;
	}
	pthread_mutex_unlock(&sim_lock);
	return b ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult trim(void)
{
	struct context *ctx;

	TRY(context_now(&ctx));
	in_driver(region->control.free_host_ns);
	pthread_mutex_lock(&sim_lock);
	trim_pool();
	pthread_mutex_unlock(&sim_lock);
	return CUDA_SUCCESS;
}

API_BOTH(cuMemAllocAsync, _ptsz, (CUdeviceptr * out, size_t bytes, CUstream stream),
	 allocate_async(out, bytes, STREAM(stream)))
API_BOTH(cuMemAllocFromPoolAsync, _ptsz, (CUdeviceptr * out, size_t bytes, CUmemoryPool pool, CUstream stream),
	 ((void)pool, allocate_async(out, bytes, STREAM(stream))))
API_BOTH(cuMemFreeAsync, _ptsz, (CUdeviceptr at, CUstream stream), free_async(at, STREAM(stream)))
API(cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep), ((void)pool, (void)keep, trim()))
API(cuDeviceGetDefaultMemPool, (CUmemoryPool * pool, CUdevice d), ((void)d, *pool = (CUmemoryPool)0x10, usable()))
API(cuDeviceGetMemPool, (CUmemoryPool * pool, CUdevice d), ((void)d, *pool = (CUmemoryPool)0x10, usable()))
API(cuMemPoolSetAttribute, (CUmemoryPool pool, int which, void *value),
    ((void)pool, (void)which, (void)value, usable()))
