/* libcuda: copies and fills. No data moves: device memory has addresses and no contents. */
#include "cuda_api.h"

enum direction { H2D, D2H, D2D, H2H };

void count_copy(int direction, int pinned, int async, u64 bytes)
{
	int i = direction * 4 + pinned * 2 + async;

	count(&region->copies[i], 1);
	count(&region->copy_bytes[i], bytes);
}

/* The host's CPU moves pageable memory to or from the driver's own pinned buffers. */
static void stage(struct stream *s, u64 bytes)
{
	burn_ns(link_ns(s->ctx, bytes, region->control.pageable_bps));
}

static CUresult copy(struct stream *s, enum direction direction, const void *host, u64 bytes, int async)
{
	enum wait_mode mode = wait_mode_of(s->ctx);
	enum copy_engine engine = direction == H2D ? TO_DEVICE : direction == D2H ? FROM_DEVICE : NO_ENGINE;
	bool pinned;

	here.bytes = bytes;
	pthread_mutex_lock(&sim_lock);
	pinned = host && is_pinned(host);
	if (s->capture) {
		if (!async) {
			s->capture->invalid = true;
			pthread_mutex_unlock(&sim_lock);
			return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
		}
		*graph_add(s->capture) = (struct node){.kind = NODE_COPY, .bytes = bytes, .engine = engine,
						       .direction = (int)direction, .pinned = pinned};
		pthread_mutex_unlock(&sim_lock);
		return CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&sim_lock);
	count_copy((int)direction, pinned, async, bytes);
	if (!bytes)
		return CUDA_SUCCESS;
	if (direction == H2H) {
		wait_for_stream(s, mode);
		stage(s, bytes);
		return CUDA_SUCCESS;
	}
	if (direction == H2D && !pinned) {
		/* A synchronous one waits for the stream first; both return when the buffer has been read. */
		if (!async)
			wait_for_stream(s, mode);
		stage(s, bytes);
	}
	burn_ns(region->control.call_host_ns);
	pthread_mutex_lock(&sim_lock);
	if (async)
		wait_for_room(s);
	enqueue_copy(s, (int)direction, bytes, engine);
	pthread_mutex_unlock(&sim_lock);
	/* To pageable memory it is never asynchronous; on the device it always is. */
	if (direction == D2H ? !async || !pinned : direction == H2D && pinned && !async)
		wait_for_stream(s, mode);
	if (direction == D2H && !pinned)
		stage(s, bytes);
	return (CUresult)gpu_of(s->ctx)->error;
}

static CUresult copy_on(CUstream handle, enum direction direction, const void *host, u64 bytes, int async)
{
	struct stream *s;

	TRY(stream_now(handle, &s));
	return copy(s, direction, host, bytes, async);
}

/* Unified addressing: the addresses say what they are. */
static CUresult copy_any(CUstream handle, CUdeviceptr to, CUdeviceptr from, u64 bytes, int async)
{
	bool to_device, from_device;

	TRY(usable());
	pthread_mutex_lock(&sim_lock);
	to_device = is_device(to);
	from_device = is_device(from);
	pthread_mutex_unlock(&sim_lock);
	if (to_device)
		return from_device ? copy_on(handle, D2D, NULL, bytes, async)
				   : copy_on(handle, H2D, (const void *)from, bytes, async);
	return from_device ? copy_on(handle, D2H, (const void *)to, bytes, async)
			   : copy_on(handle, H2H, (const void *)from, bytes, async);
}

static CUresult fill(CUstream handle, u64 bytes)
{
	const struct control *c = &region->control;
	struct stream *s;

	TRY(stream_now(handle, &s));
	here.bytes = bytes;
	pthread_mutex_lock(&sim_lock);
	if (s->capture) {
		*graph_add(s->capture) = (struct node){.kind = NODE_MEMSET, .bytes = bytes};
	} else {
		burn_ns(c->call_host_ns);
		wait_for_room(s);
		enqueue(s, (struct op){.kind = OP_WORK,
				       .ns = c->copy_latency_ns +
					     (c->d2d_bps ? (u64)((f64)bytes * 1e9 / (f64)c->d2d_bps) : 0)});
	}
	pthread_mutex_unlock(&sim_lock);
	return CUDA_SUCCESS;
}

API_BOTH(cuMemcpy, _ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes), copy_any(null_, to, from, bytes, 0))
API_BOTH(cuMemcpyHtoD_v2, _ptds, (CUdeviceptr to, const void *from, size_t bytes),
	 ((void)to, copy_on(null_, H2D, from, bytes, 0)))
API_BOTH(cuMemcpyDtoH_v2, _ptds, (void *to, CUdeviceptr from, size_t bytes),
	 ((void)from, copy_on(null_, D2H, to, bytes, 0)))
API_BOTH(cuMemcpyDtoD_v2, _ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes),
	 ((void)to, (void)from, copy_on(null_, D2D, NULL, bytes, 0)))
API_BOTH(cuMemcpyAsync, _ptsz, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
	 copy_any(STREAM(stream), to, from, bytes, 1))
API_BOTH(cuMemcpyHtoDAsync_v2, _ptsz, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream),
	 ((void)to, copy_on(STREAM(stream), H2D, from, bytes, 1)))
API_BOTH(cuMemcpyDtoHAsync_v2, _ptsz, (void *to, CUdeviceptr from, size_t bytes, CUstream stream),
	 ((void)from, copy_on(STREAM(stream), D2H, to, bytes, 1)))
API_BOTH(cuMemcpyDtoDAsync_v2, _ptsz, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
	 ((void)to, (void)from, copy_on(STREAM(stream), D2D, NULL, bytes, 1)))
API_BOTH(cuMemsetD8_v2, _ptds, (CUdeviceptr to, unsigned char v, size_t n), ((void)to, (void)v, fill(null_, n)))
API_BOTH(cuMemsetD16_v2, _ptds, (CUdeviceptr to, unsigned short v, size_t n),
	 ((void)to, (void)v, fill(null_, 2 * n)))
API_BOTH(cuMemsetD32_v2, _ptds, (CUdeviceptr to, unsigned int v, size_t n), ((void)to, (void)v, fill(null_, 4 * n)))
API_BOTH(cuMemsetD8Async, _ptsz, (CUdeviceptr to, unsigned char v, size_t n, CUstream stream),
	 ((void)to, (void)v, fill(STREAM(stream), n)))
API_BOTH(cuMemsetD16Async, _ptsz, (CUdeviceptr to, unsigned short v, size_t n, CUstream stream),
	 ((void)to, (void)v, fill(STREAM(stream), 2 * n)))
API_BOTH(cuMemsetD32Async, _ptsz, (CUdeviceptr to, unsigned int v, size_t n, CUstream stream),
	 ((void)to, (void)v, fill(STREAM(stream), 4 * n)))
