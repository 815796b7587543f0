/* libcuda: addresses and memory apart, and pinned memory of the host. */
#include "cuda_blocks.h"

#include <stdlib.h>
#include <sys/mman.h>

static u64 next_mapped = MAPPED_BASE, next_handle = 0x1000;

/* -- addresses and memory apart -- */

static CUresult reserve(CUdeviceptr *out, size_t bytes)
{
	TRY(usable());
	if (!out || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	*out = next_mapped;
	next_mapped += (bytes + 0x1fffff) & ~0x1fffffULL;
	remember((struct block){.at = *out, .bytes = bytes, .kind = RESERVED});
	pthread_mutex_unlock(&sim_lock);
	here.bytes = bytes;
	return CUDA_SUCCESS;
}

static CUresult physical(CUmemGenericAllocationHandle *out, size_t bytes)
{
	struct context *ctx;
	struct gpu *gpu;
	struct proc *p;
	struct block b = {.kind = PHYSICAL, .bytes = 1};
	u64 n, got = 0;

	TRY(context_now(&ctx));
	gpu = gpu_of(ctx);
	if (!out || !bytes || bytes % gpu->granule_bytes)
		return CUDA_ERROR_INVALID_VALUE;
	here.bytes = bytes;
	in_driver(region->control.alloc_host_ns);
	p = this_process();
	n = bytes / gpu->granule_bytes;
	b.list = calloc(n, sizeof(*b.list));
	b.granules = n;
	b.device = ctx->device;
	lock_word(&region->lock);
	if (total_granules(gpu) - gpu->used_granules >= n) {
		for (u32 g = 0; got < n && g < total_granules(gpu); g++)
			if (!gpu->owner[g]) {
				gpu->owner[g] = (u8)(p - region->procs + 1);
				b.list[got++] = g;
			}
		gpu->used_granules += n;
		p->granules[ctx->device] += n;
	}
	unlock_word(&region->lock);
	if (got < n) {
		free(b.list);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_lock(&sim_lock);
	b.at = *out = next_handle++;
	remember(b);
	pthread_mutex_unlock(&sim_lock);
	return CUDA_SUCCESS;
}

static CUresult release_physical(CUmemGenericAllocationHandle handle)
{
	struct block *b;

	TRY(usable());
	in_driver(region->control.free_host_ns);
	pthread_mutex_lock(&sim_lock);
	b = block_at(handle);
	if (b && b->kind == PHYSICAL) {
		struct gpu *gpu = &region->gpus[b->device];

		here.bytes = b->granules * gpu->granule_bytes;
		lock_word(&region->lock);
		for (u64 i = 0; i < b->granules; i++)
			gpu->owner[b->list[i]] = 0;
		gpu->used_granules -= b->granules;
		this_process()->granules[b->device] -= b->granules;
		unlock_word(&region->lock);
		free(b->list);
		forget(b);
	} else {
		b = NULL;
	}
	pthread_mutex_unlock(&sim_lock);
	return b ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult map(CUdeviceptr at, size_t bytes, CUmemGenericAllocationHandle handle)
{
	struct block *to, *from;

	TRY(usable());
	here.bytes = bytes;
	in_driver(region->control.call_host_ns);
	pthread_mutex_lock(&sim_lock);
	to = block_of(at);
	from = block_at(handle);
	pthread_mutex_unlock(&sim_lock);
	return to && to->kind == RESERVED && from && from->kind == PHYSICAL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult unmap(CUdeviceptr at, size_t bytes)
{
	struct context *ctx;
	struct block *b;

	TRY(context_now(&ctx));
	here.bytes = bytes;
	wait_for_device(ctx, wait_mode_of(ctx)); /* as cuMemFree does */
	in_driver(region->control.free_host_ns);
	pthread_mutex_lock(&sim_lock);
	b = block_of(at);
	pthread_mutex_unlock(&sim_lock);
	return b && b->kind == RESERVED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult unreserve(CUdeviceptr at)
{
	struct block *b;

	pthread_mutex_lock(&sim_lock);
	b = block_at(at);
	if (b && b->kind == RESERVED)
		forget(b);
	else
		b = NULL;
	pthread_mutex_unlock(&sim_lock);
	return b ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult granularity(size_t *bytes)
{
	TRY(usable());
	*bytes = region->gpus[0].granule_bytes;
	return CUDA_SUCCESS;
}

API(cuMemAddressReserve,
    (CUdeviceptr * out, size_t bytes, size_t alignment, CUdeviceptr at, unsigned long long flags),
    ((void)alignment, (void)at, (void)flags, reserve(out, bytes)))
API(cuMemAddressFree, (CUdeviceptr at, size_t bytes), ((void)bytes, unreserve(at)))
API(cuMemCreate, (CUmemGenericAllocationHandle * out, size_t bytes, const void *prop, unsigned long long flags),
    ((void)prop, (void)flags, physical(out, bytes)))
API(cuMemRelease, (CUmemGenericAllocationHandle handle), release_physical(handle))
API(cuMemMap,
    (CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags),
    ((void)offset, (void)flags, map(at, bytes, handle)))
API(cuMemUnmap, (CUdeviceptr at, size_t bytes), unmap(at, bytes))
API(cuMemSetAccess, (CUdeviceptr at, size_t bytes, const void *access, size_t n),
    ((void)at, (void)bytes, (void)access, (void)n, usable()))
API(cuMemGetAllocationGranularity, (size_t * bytes, const void *prop, int option),
    ((void)prop, (void)option, granularity(bytes)))

/* -- pinned memory of the host -- */

static u64 pin_ns(u64 bytes)
{
	const struct control *c = &region->control;

	return c->pin_host_ns + (u64)((f64)c->pin_host_ns_per_mib * (f64)bytes / (1 << 20));
}

static CUresult host_alloc(void **out, size_t bytes)
{
	struct context *ctx;
	void *at;

	TRY(context_now(&ctx));
	if (!out || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	if (capturing_anywhere())
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	here.bytes = bytes;
	in_driver(pin_ns(bytes));
	at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (at == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&sim_lock);
	remember((struct block){.at = (u64)at, .bytes = bytes, .kind = PINNED});
	this_process()->pinned_bytes += bytes;
	pthread_mutex_unlock(&sim_lock);
	*out = at;
	return CUDA_SUCCESS;
}

static CUresult host_register(void *at, size_t bytes)
{
	struct context *ctx;
	CUresult result = CUDA_SUCCESS;

	TRY(context_now(&ctx));
	if (!at || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	here.bytes = bytes;
	pthread_mutex_lock(&sim_lock);
	if (block_of((u64)at))
		result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	pthread_mutex_unlock(&sim_lock);
	TRY(result);
	in_driver(pin_ns(bytes));
	pthread_mutex_lock(&sim_lock);
	remember((struct block){.at = (u64)at, .bytes = bytes, .kind = REGISTERED});
	this_process()->pinned_bytes += bytes;
	pthread_mutex_unlock(&sim_lock);
	return CUDA_SUCCESS;
}

/* Both ends of pinned memory wait for the device. */
static CUresult host_release(void *at, enum kind kind, CUresult otherwise)
{
	struct context *ctx;
	struct block *b;
	u64 bytes;

	TRY(context_now(&ctx));
	pthread_mutex_lock(&sim_lock);
	b = block_at((u64)at);
	bytes = b && b->kind == kind ? b->bytes : 0;
	pthread_mutex_unlock(&sim_lock);
	if (!bytes)
		return otherwise;
	here.bytes = bytes;
	wait_for_device(ctx, wait_mode_of(ctx));
	in_driver(pin_ns(bytes) / 2);
	pthread_mutex_lock(&sim_lock);
	b = block_at((u64)at);
	if (b)
		forget(b);
	this_process()->pinned_bytes -= bytes;
	pthread_mutex_unlock(&sim_lock);
	if (kind == PINNED)
		munmap(at, bytes);
	return CUDA_SUCCESS;
}

static CUresult host_device_pointer(CUdeviceptr *out, void *at)
{
	bool pinned;

	pthread_mutex_lock(&sim_lock);
	pinned = is_pinned(at);
	pthread_mutex_unlock(&sim_lock);
	*out = pinned ? (CUdeviceptr)at : 0;
	return pinned ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemHostAlloc, (void **out, size_t bytes, unsigned int flags), ((void)flags, host_alloc(out, bytes)))
API(cuMemAllocHost_v2, (void **out, size_t bytes), host_alloc(out, bytes))
API(cuMemFreeHost, (void *at), host_release(at, PINNED, CUDA_ERROR_INVALID_VALUE))
API(cuMemHostRegister_v2, (void *at, size_t bytes, unsigned int flags), ((void)flags, host_register(at, bytes)))
API(cuMemHostUnregister, (void *at), host_release(at, REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED))
API(cuMemHostGetDevicePointer_v2, (CUdeviceptr * out, void *at, unsigned int flags),
    ((void)flags, host_device_pointer(out, at)))
