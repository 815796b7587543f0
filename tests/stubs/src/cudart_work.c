/* libcudart: memory, copies, streams, events and graphs. Each call goes on to the driver. */
#include "cudart.h"

#include <string.h>

/* -- memory -- */

#define P(pointer) ((CUdeviceptr)(size_t)(pointer))

static cudaError_t none_for_nothing(void **out)
{
	*out = NULL;
	return CUDA_SUCCESS;
}

static cudaError_t pool_of(CUmemoryPool *pool, int d)
{
	return drivers[0].cuDeviceGetDefaultMemPool(pool, d);
}

struct attributes {
	int type, device;
	void *device_pointer, *host_pointer;
	long reserved[8];
};

static cudaError_t attributes(struct attributes *out, const void *at)
{
	unsigned int type = 0, is_managed = 0;

	memset(out, 0, sizeof(*out));
	out->device = rt_current();
	out->host_pointer = (void *)at;
	if (drivers[0].cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, P(at)))
		return CUDA_SUCCESS; /* not registered: type 0 */
	drivers[0].cuPointerGetAttribute(&is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, P(at));
	out->type = is_managed ? 3 : (int)type;
	out->device_pointer = (void *)at;
	if (out->type == 2)
		out->host_pointer = NULL;
	return CUDA_SUCCESS;
}

RT(cudaMalloc, (void **out, size_t n), rt_device,
   !out ? CUDA_ERROR_INVALID_VALUE : n ? drivers[0].cuMemAlloc((CUdeviceptr *)out, n) : none_for_nothing(out))
RT(cudaFree, (void *at), rt_device, at ? drivers[0].cuMemFree(P(at)) : CUDA_SUCCESS)
RT(cudaMallocManaged, (void **out, size_t n, unsigned int flags), rt_device,
   drivers[0].cuMemAllocManaged((CUdeviceptr *)out, n, flags))
RT_BOTH(cudaMallocAsync, _ptsz, (void **out, size_t n, CUstream stream),
	driver->cuMemAllocAsync((CUdeviceptr *)out, n, stream))
RT_BOTH(cudaFreeAsync, _ptsz, (void *at, CUstream stream), driver->cuMemFreeAsync(P(at), stream))
RT(cudaDeviceGetDefaultMemPool, (CUmemoryPool * pool, int d), rt_device, pool_of(pool, d))
RT(cudaMemPoolTrimTo, (CUmemoryPool pool, size_t keep), rt_device, drivers[0].cuMemPoolTrimTo(pool, keep))
RT(cudaHostAlloc, (void **out, size_t n, unsigned int flags), rt_device, drivers[0].cuMemHostAlloc(out, n, flags))
RT(cudaMallocHost, (void **out, size_t n), rt_device, drivers[0].cuMemHostAlloc(out, n, 0))
RT(cudaFreeHost, (void *at), rt_device, at ? drivers[0].cuMemFreeHost(at) : CUDA_SUCCESS)
RT(cudaHostRegister, (void *at, size_t n, unsigned int flags), rt_device, drivers[0].cuMemHostRegister(at, n, flags))
RT(cudaHostUnregister, (void *at), rt_device, drivers[0].cuMemHostUnregister(at))
RT(cudaHostGetDevicePointer, (void **out, void *at, unsigned int flags), rt_device,
   drivers[0].cuMemHostGetDevicePointer((CUdeviceptr *)out, at, flags))
RT(cudaMemGetInfo, (size_t * unused, size_t *total), rt_device, drivers[0].cuMemGetInfo(unused, total))
RT(cudaPointerGetAttributes, (struct attributes * out, const void *at), rt_device, attributes(out, at))

/* -- copies -- */

enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS };

static cudaError_t copy(const struct driver *driver, void *to, const void *from, size_t n, int kind)
{
	switch (kind) {
	case HOST_TO_DEVICE:
		return driver->cuMemcpyHtoD(P(to), from, n);
	case DEVICE_TO_HOST:
		return driver->cuMemcpyDtoH(to, P(from), n);
	case DEVICE_TO_DEVICE:
		return driver->cuMemcpyDtoD(P(to), P(from), n);
	case HOST_TO_HOST:
	case BY_ADDRESS:
		return driver->cuMemcpy(P(to), P(from), n);
	default:
		return 21; /* cudaErrorInvalidMemcpyDirection */
	}
}

static cudaError_t copy_async(const struct driver *driver, void *to, const void *from, size_t n, int kind, CUstream s)
{
	switch (kind) {
	case HOST_TO_DEVICE:
		return driver->cuMemcpyHtoDAsync(P(to), from, n, s);
	case DEVICE_TO_HOST:
		return driver->cuMemcpyDtoHAsync(to, P(from), n, s);
	case DEVICE_TO_DEVICE:
		return driver->cuMemcpyDtoDAsync(P(to), P(from), n, s);
	case HOST_TO_HOST:
	case BY_ADDRESS:
		return driver->cuMemcpyAsync(P(to), P(from), n, s);
	default:
		return 21;
	}
}

RT_BOTH(cudaMemcpy, _ptds, (void *to, const void *from, size_t n, int kind), copy(driver, to, from, n, kind))
RT_BOTH(cudaMemcpyAsync, _ptsz, (void *to, const void *from, size_t n, int kind, CUstream stream),
	copy_async(driver, to, from, n, kind, stream))
RT_BOTH(cudaMemset, _ptds, (void *to, int v, size_t n), driver->cuMemsetD8(P(to), (unsigned char)v, n))
RT_BOTH(cudaMemsetAsync, _ptsz, (void *to, int v, size_t n, CUstream stream),
	driver->cuMemsetD8Async(P(to), (unsigned char)v, n, stream))

/* -- streams and events -- */

RT(cudaStreamCreate, (CUstream * out), rt_device, drivers[0].cuStreamCreate(out, 0))
RT(cudaStreamCreateWithFlags, (CUstream * out, unsigned int flags), rt_device, drivers[0].cuStreamCreate(out, flags))
RT(cudaStreamCreateWithPriority, (CUstream * out, unsigned int flags, int priority), rt_device,
   drivers[0].cuStreamCreateWithPriority(out, flags, priority))
RT(cudaStreamDestroy, (CUstream stream), rt_device, drivers[0].cuStreamDestroy(stream))
RT_BOTH(cudaStreamSynchronize, _ptsz, (CUstream stream), driver->cuStreamSynchronize(stream))
RT_BOTH(cudaStreamQuery, _ptsz, (CUstream stream), driver->cuStreamQuery(stream))
RT_BOTH(cudaStreamWaitEvent, _ptsz, (CUstream stream, CUevent event, unsigned int flags),
	driver->cuStreamWaitEvent(stream, event, flags))
RT_BOTH(cudaStreamGetFlags, _ptsz, (CUstream stream, unsigned int *flags), driver->cuStreamGetFlags(stream, flags))
RT_BOTH(cudaStreamGetPriority, _ptsz, (CUstream stream, int *priority),
	driver->cuStreamGetPriority(stream, priority))
RT(cudaEventCreate, (CUevent * out), rt_device, drivers[0].cuEventCreate(out, 0))
RT(cudaEventCreateWithFlags, (CUevent * out, unsigned int flags), rt_device, drivers[0].cuEventCreate(out, flags))
RT(cudaEventDestroy, (CUevent event), rt_device, drivers[0].cuEventDestroy(event))
RT_BOTH(cudaEventRecord, _ptsz, (CUevent event, CUstream stream), driver->cuEventRecord(event, stream))
RT_BOTH(cudaEventRecordWithFlags, _ptsz, (CUevent event, CUstream stream, unsigned int flags),
	driver->cuEventRecordWithFlags(event, stream, flags))
RT(cudaEventSynchronize, (CUevent event), rt_device, drivers[0].cuEventSynchronize(event))
RT(cudaEventQuery, (CUevent event), rt_device, drivers[0].cuEventQuery(event))
RT(cudaEventElapsedTime, (float *ms, CUevent begin, CUevent end), rt_device,
   drivers[0].cuEventElapsedTime(ms, begin, end))

/* -- graphs -- */

RT_BOTH(cudaStreamBeginCapture, _ptsz, (CUstream stream, int mode), driver->cuStreamBeginCapture(stream, mode))
RT_BOTH(cudaStreamEndCapture, _ptsz, (CUstream stream, CUgraph *out), driver->cuStreamEndCapture(stream, out))
RT_BOTH(cudaStreamIsCapturing, _ptsz, (CUstream stream, int *status), driver->cuStreamIsCapturing(stream, status))
RT(cudaGraphCreate, (CUgraph * out, unsigned int flags), rt_device, drivers[0].cuGraphCreate(out, flags))
RT(cudaGraphInstantiate, (CUgraphExec * out, CUgraph graph, unsigned long long flags), rt_device,
   drivers[0].cuGraphInstantiateWithFlags(out, graph, flags))
RT(cudaGraphInstantiateWithFlags, (CUgraphExec * out, CUgraph graph, unsigned long long flags), rt_device,
   drivers[0].cuGraphInstantiateWithFlags(out, graph, flags))
RT(cudaGraphExecUpdate, (CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info), rt_device,
   drivers[0].cuGraphExecUpdate(exec, graph, info))
RT(cudaGraphGetNodes, (CUgraph graph, CUgraphNode * nodes, size_t *n), rt_device,
   drivers[0].cuGraphGetNodes(graph, nodes, n))
RT_BOTH(cudaGraphUpload, _ptsz, (CUgraphExec exec, CUstream stream), driver->cuGraphUpload(exec, stream))
RT_BOTH(cudaGraphLaunch, _ptsz, (CUgraphExec exec, CUstream stream), driver->cuGraphLaunch(exec, stream))
RT(cudaGraphDestroy, (CUgraph graph), rt_device, drivers[0].cuGraphDestroy(graph))
RT(cudaGraphExecDestroy, (CUgraphExec exec), rt_device, drivers[0].cuGraphExecDestroy(exec))
