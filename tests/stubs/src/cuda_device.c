/* libcuda: initialisation, devices and contexts. */
#include "cuda_api.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__thread struct context *current_context;
static struct context primary[MAX_DEVICES];
static bool initialised;
static u64 context_ids;
static int visible[MAX_DEVICES], visible_count;

static void find_visible(void)
{
	const char *list = getenv("CUDA_VISIBLE_DEVICES");

	visible_count = 0;
	if (!list) {
		for (u32 i = 0; i < region->devices; i++)
			visible[visible_count++] = (int)i;
		return;
	}
	for (const char *at = list; *at && visible_count < MAX_DEVICES;) {
		char *end;
		long i = strtol(at, &end, 10);

		if (end == at || i < 0 || i >= (long)region->devices)
			break; /* as the driver: what follows a bad one is not seen */
		visible[visible_count++] = (int)i;
		at = *end == ',' ? end + 1 : end;
	}
}

static CUresult init(unsigned int flags)
{
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (!stub_attach())
		return CUDA_ERROR_NO_DEVICE;
	pthread_mutex_lock(&sim_lock);
	if (!initialised) {
		find_visible();
		initialised = visible_count > 0;
	}
	pthread_mutex_unlock(&sim_lock);
	return initialised ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult usable(void)
{
	return initialised ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult context_now(struct context **ctx)
{
	TRY(usable());
	*ctx = current_context;
	if (!current_context)
		return CUDA_ERROR_INVALID_CONTEXT;
	here.device = (u16)current_context->device;
	return (CUresult)gpu_of(current_context)->error;
}

static CUresult device(CUdevice d, struct gpu **gpu)
{
	TRY(usable());
	if (d < 0 || d >= visible_count)
		return CUDA_ERROR_INVALID_DEVICE;
	*gpu = &region->gpus[visible[d]];
	return CUDA_SUCCESS;
}

static CUresult device_attribute(int *value, int attribute, CUdevice d)
{
	/* [attribute] = value, for what programs ask first; the rest is 0. */
	static const int known[160] = {
		[1] = 1024, [2] = 1024, [3] = 1024, [4] = 64,     [5] = 2147483647, [6] = 65535, [7] = 65535,
		[8] = 49152, [10] = 32, [12] = 65536, [15] = 1,    [16] = 132,       [18] = 0,    [19] = 1,
		[31] = 1,    [35] = 0,  [37] = 5120,  [38] = 52428800, [39] = 2048,  [40] = 3,    [41] = 1,
		[75] = 9,    [76] = 0,  [78] = 1,     [81] = 233472, [82] = 65536,   [83] = 1,    [89] = 1,
		[95] = 1,    [97] = 232448, [102] = 1, [106] = 32, [115] = 1,
	};
	struct gpu *gpu;

	TRY(device(d, &gpu));
	if (!value || attribute < 1)
		return CUDA_ERROR_INVALID_VALUE;
	*value = attribute < 160 ? known[attribute] : 0;
	if (attribute == 13)
		*value = (int)gpu->sm_clock_max_mhz * 1000;
	if (attribute == 36)
		*value = (int)gpu->mem_clock_max_mhz * 1000;
	return CUDA_SUCCESS;
}

static CUresult device_name(char *name, int length, CUdevice d)
{
	struct gpu *gpu;

	TRY(device(d, &gpu));
	if (!name || length < 1)
		return CUDA_ERROR_INVALID_VALUE;
	snprintf(name, (size_t)length, "%s", gpu->name);
	return CUDA_SUCCESS;
}

static CUresult device_uuid(CUuuid *uuid, CUdevice d)
{
	struct gpu *gpu;

	TRY(device(d, &gpu));
	memcpy(uuid, gpu->uuid, sizeof(*uuid));
	return CUDA_SUCCESS;
}

static CUresult device_pci(char *id, int length, CUdevice d)
{
	struct gpu *gpu;

	TRY(device(d, &gpu));
	if (!id || length < 13)
		return CUDA_ERROR_INVALID_VALUE;
	snprintf(id, (size_t)length, "%s", gpu->pci);
	return CUDA_SUCCESS;
}

static CUresult device_get(CUdevice *d, int ordinal)
{
	struct gpu *gpu;

	TRY(device(ordinal, &gpu));
	*d = ordinal;
	return CUDA_SUCCESS;
}

static CUresult device_count(int *n)
{
	TRY(usable());
	*n = visible_count;
	return CUDA_SUCCESS;
}

static CUresult device_memory(size_t *bytes, CUdevice d)
{
	struct gpu *gpu;

	TRY(device(d, &gpu));
	*bytes = gpu->memory_bytes;
	return CUDA_SUCCESS;
}

static CUresult can_access_peer(int *can, CUdevice a, CUdevice b)
{
	struct gpu *gpu;

	TRY(device(a, &gpu));
	TRY(device(b, &gpu));
	*can = a != b && gpu->nvlinks > 0;
	return CUDA_SUCCESS;
}

API(cuInit, (unsigned int flags), init(flags))
API(cuDriverGetVersion, (int *version), (*version = DRIVER_VERSION, CUDA_SUCCESS))
API(cuDeviceGet, (CUdevice * d, int ordinal), device_get(d, ordinal))
API(cuDeviceGetCount, (int *n), device_count(n))
API(cuDeviceGetName, (char *name, int length, CUdevice d), device_name(name, length, d))
API(cuDeviceGetUuid, (CUuuid * uuid, CUdevice d), device_uuid(uuid, d))
API(cuDeviceGetUuid_v2, (CUuuid * uuid, CUdevice d), device_uuid(uuid, d))
API(cuDeviceTotalMem_v2, (size_t * bytes, CUdevice d), device_memory(bytes, d))
API(cuDeviceGetAttribute, (int *value, int attribute, CUdevice d), device_attribute(value, attribute, d))
API(cuDeviceGetPCIBusId, (char *id, int length, CUdevice d), device_pci(id, length, d))
API(cuDeviceCanAccessPeer, (int *can, CUdevice a, CUdevice b), can_access_peer(can, a, b))
API(cuCtxEnablePeerAccess, (CUcontext ctx, unsigned int flags), ((void)ctx, (void)flags, usable()))

/* -- contexts -- */

static struct context *opened(struct context *ctx, int at, unsigned int flags)
{
	ctx->device = at;
	ctx->flags = flags ? flags : ctx->flags;
	ctx->id = ++context_ids;
	ctx->legacy = stream_new(ctx, 0, 0, true);
	return ctx;
}

static CUresult primary_retain(CUcontext *ctx, CUdevice d)
{
	struct gpu *gpu;

	TRY(device(d, &gpu));
	pthread_mutex_lock(&sim_lock);
	if (!primary[d].legacy)
		opened(&primary[d], visible[d], 0)->primary = true;
	primary[d].users++;
	*ctx = &primary[d];
	pthread_mutex_unlock(&sim_lock);
	this_process();
	return CUDA_SUCCESS;
}

static CUresult primary_release(CUdevice d)
{
	struct gpu *gpu;

	TRY(device(d, &gpu));
	if (!primary[d].users)
		return CUDA_ERROR_INVALID_CONTEXT;
	primary[d].users--;
	return CUDA_SUCCESS;
}

static CUresult primary_flags(CUdevice d, unsigned int flags)
{
	struct gpu *gpu;

	TRY(device(d, &gpu));
	primary[d].flags = flags;
	return CUDA_SUCCESS;
}

static CUresult primary_state(CUdevice d, unsigned int *flags, int *active)
{
	struct gpu *gpu;

	TRY(device(d, &gpu));
	*flags = primary[d].flags;
	*active = primary[d].users > 0;
	return CUDA_SUCCESS;
}

static CUresult create(CUcontext *ctx, unsigned int flags, CUdevice d)
{
	struct gpu *gpu;

	TRY(device(d, &gpu));
	pthread_mutex_lock(&sim_lock);
	*ctx = opened(calloc(1, sizeof(**ctx)), visible[d], flags);
	pthread_mutex_unlock(&sim_lock);
	this_process();
	current_context = *ctx;
	return CUDA_SUCCESS;
}

static CUresult get_current(CUcontext *ctx)
{
	TRY(usable());
	*ctx = current_context;
	return CUDA_SUCCESS;
}

static CUresult set_current(CUcontext ctx)
{
	TRY(usable());
	current_context = ctx;
	return CUDA_SUCCESS;
}

static CUresult ctx_device(CUdevice *d)
{
	struct context *ctx;

	TRY(context_now(&ctx));
	for (*d = 0; *d < visible_count && visible[*d] != ctx->device; (*d)++)
		;
	return CUDA_SUCCESS;
}

static CUresult ctx_flags(unsigned int *flags)
{
	struct context *ctx;

	TRY(context_now(&ctx));
	*flags = ctx->flags;
	return CUDA_SUCCESS;
}

static CUresult set_ctx_flags(unsigned int flags)
{
	struct context *ctx;

	TRY(context_now(&ctx));
	ctx->flags = flags;
	return CUDA_SUCCESS;
}

static CUresult ctx_id(CUcontext ctx, unsigned long long *id)
{
	ctx = ctx ? ctx : current_context;
	if (!ctx)
		return CUDA_ERROR_INVALID_CONTEXT;
	*id = ctx->id;
	return CUDA_SUCCESS;
}

static CUresult priorities(int *least, int *greatest)
{
	struct context *ctx;

	TRY(context_now(&ctx));
	if (least)
		*least = 0;
	if (greatest)
		*greatest = -5;
	return CUDA_SUCCESS;
}

static CUresult synchronize(void)
{
	struct context *ctx;

	TRY(context_now(&ctx));
	if (capturing_anywhere())
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	wait_for_device(ctx, wait_mode_of(ctx));
	return (CUresult)gpu_of(ctx)->error;
}

API(cuDevicePrimaryCtxRetain, (CUcontext * ctx, CUdevice d), primary_retain(ctx, d))
API(cuDevicePrimaryCtxRelease_v2, (CUdevice d), primary_release(d))
API(cuDevicePrimaryCtxSetFlags_v2, (CUdevice d, unsigned int flags), primary_flags(d, flags))
API(cuDevicePrimaryCtxGetState, (CUdevice d, unsigned int *flags, int *active), primary_state(d, flags, active))
API(cuDevicePrimaryCtxReset_v2, (CUdevice d), primary_release(d))
API(cuCtxCreate_v2, (CUcontext * ctx, unsigned int flags, CUdevice d), create(ctx, flags, d))
API(cuCtxCreate_v4, (CUcontext * ctx, void *params, unsigned int flags, CUdevice d),
    ((void)params, create(ctx, flags, d)))
API(cuCtxDestroy_v2, (CUcontext ctx), (current_context = current_context == ctx ? NULL : current_context, usable()))
API(cuCtxSetCurrent, (CUcontext ctx), set_current(ctx))
API(cuCtxGetCurrent, (CUcontext * ctx), get_current(ctx))
API(cuCtxPushCurrent_v2, (CUcontext ctx), set_current(ctx))
API(cuCtxPopCurrent_v2, (CUcontext * ctx), (ctx ? (void)(*ctx = current_context) : (void)0, set_current(NULL)))
API(cuCtxGetDevice, (CUdevice * d), ctx_device(d))
API(cuCtxGetFlags, (unsigned int *flags), ctx_flags(flags))
API(cuCtxSetFlags, (unsigned int flags), set_ctx_flags(flags))
API(cuCtxGetId, (CUcontext ctx, unsigned long long *id), ctx_id(ctx, id))
API(cuCtxGetStreamPriorityRange, (int *least, int *greatest), priorities(least, greatest))
API(cuCtxSynchronize, (void), synchronize())
