/* The runtime calls the driver through pointers that it asks the driver for, as the real one does. */
#pragma once
#include "cuda_abi.h"
#include "stub.h"

typedef int cudaError_t;

/* [0]: the legacy default stream; [1]: one per thread. */
#define PLAIN_DRIVER(D)                                                                                      \
	D(cuInit, (unsigned int))                                                                            \
	D(cuDriverGetVersion, (int *))                                                                       \
	D(cuDeviceGetCount, (int *))                                                                         \
	D(cuDeviceGetAttribute, (int *, int, CUdevice))                                                      \
	D(cuDeviceGetName, (char *, int, CUdevice))                                                          \
	D(cuDeviceTotalMem, (size_t *, CUdevice))                                                            \
	D(cuDeviceGetPCIBusId, (char *, int, CUdevice))                                                      \
	D(cuDeviceGetUuid, (CUuuid *, CUdevice))                                                             \
	D(cuDeviceCanAccessPeer, (int *, CUdevice, CUdevice))                                                \
	D(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                                 \
	D(cuDevicePrimaryCtxReset, (CUdevice))                                                               \
	D(cuDevicePrimaryCtxSetFlags, (CUdevice, unsigned int))                                              \
	D(cuDevicePrimaryCtxGetState, (CUdevice, unsigned int *, int *))                                     \
	D(cuCtxSetCurrent, (CUcontext))                                                                      \
	D(cuCtxGetCurrent, (CUcontext *))                                                                    \
	D(cuCtxSynchronize, (void))                                                                          \
	D(cuCtxGetStreamPriorityRange, (int *, int *))                                                       \
	D(cuGetErrorName, (CUresult, const char **))                                                         \
	D(cuGetErrorString, (CUresult, const char **))                                                       \
	D(cuLibraryLoadData, (CUlibrary *, const void *, int *, void **, unsigned int, int *, void **, unsigned int)) \
	D(cuLibraryUnload, (CUlibrary))                                                                      \
	D(cuLibraryGetKernel, (CUkernel *, CUlibrary, const char *))                                         \
	D(cuKernelSetAttribute, (int, int, CUkernel, CUdevice))                                              \
	D(cuMemAlloc, (CUdeviceptr *, size_t))                                                               \
	D(cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned int))                                          \
	D(cuMemFree, (CUdeviceptr))                                                                          \
	D(cuMemGetInfo, (size_t *, size_t *))                                                                \
	D(cuMemHostAlloc, (void **, size_t, unsigned int))                                                   \
	D(cuMemFreeHost, (void *))                                                                           \
	D(cuMemHostRegister, (void *, size_t, unsigned int))                                                 \
	D(cuMemHostUnregister, (void *))                                                                     \
	D(cuMemHostGetDevicePointer, (CUdeviceptr *, void *, unsigned int))                                  \
	D(cuMemPoolTrimTo, (CUmemoryPool, size_t))                                                           \
	D(cuDeviceGetDefaultMemPool, (CUmemoryPool *, CUdevice))                                             \
	D(cuPointerGetAttribute, (void *, int, CUdeviceptr))                                                 \
	D(cuStreamCreate, (CUstream *, unsigned int))                                                        \
	D(cuStreamCreateWithPriority, (CUstream *, unsigned int, int))                                       \
	D(cuStreamDestroy, (CUstream))                                                                       \
	D(cuEventCreate, (CUevent *, unsigned int))                                                          \
	D(cuEventDestroy, (CUevent))                                                                         \
	D(cuEventSynchronize, (CUevent))                                                                     \
	D(cuEventQuery, (CUevent))                                                                           \
	D(cuEventElapsedTime, (float *, CUevent, CUevent))                                                   \
	D(cuGraphCreate, (CUgraph *, unsigned int))                                                          \
	D(cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, unsigned long long))                         \
	D(cuGraphExecUpdate, (CUgraphExec, CUgraph, CUgraphExecUpdateResultInfo *))                          \
	D(cuGraphGetNodes, (CUgraph, CUgraphNode *, size_t *))                                               \
	D(cuGraphDestroy, (CUgraph))                                                                         \
	D(cuGraphExecDestroy, (CUgraphExec))

#define STREAM_DRIVER(D)                                                                                     \
	D(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
			   CUstream, void **, void **))                                                      \
	D(cuLaunchKernelEx, (const CUlaunchConfig *, CUfunction, void **, void **))                          \
	D(cuLaunchCooperativeKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,          \
				      unsigned, unsigned, CUstream, void **))                                \
	D(cuMemcpy, (CUdeviceptr, CUdeviceptr, size_t))                                                      \
	D(cuMemcpyHtoD, (CUdeviceptr, const void *, size_t))                                                 \
	D(cuMemcpyDtoH, (void *, CUdeviceptr, size_t))                                                       \
	D(cuMemcpyDtoD, (CUdeviceptr, CUdeviceptr, size_t))                                                  \
	D(cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                       \
	D(cuMemcpyHtoDAsync, (CUdeviceptr, const void *, size_t, CUstream))                                  \
	D(cuMemcpyDtoHAsync, (void *, CUdeviceptr, size_t, CUstream))                                        \
	D(cuMemcpyDtoDAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                   \
	D(cuMemsetD8, (CUdeviceptr, unsigned char, size_t))                                                  \
	D(cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))                                   \
	D(cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream))                                                \
	D(cuMemFreeAsync, (CUdeviceptr, CUstream))                                                           \
	D(cuStreamSynchronize, (CUstream))                                                                   \
	D(cuStreamQuery, (CUstream))                                                                         \
	D(cuStreamWaitEvent, (CUstream, CUevent, unsigned int))                                              \
	D(cuStreamGetFlags, (CUstream, unsigned int *))                                                      \
	D(cuStreamGetPriority, (CUstream, int *))                                                            \
	D(cuEventRecord, (CUevent, CUstream))                                                                \
	D(cuEventRecordWithFlags, (CUevent, CUstream, unsigned int))                                         \
	D(cuStreamBeginCapture, (CUstream, int))                                                             \
	D(cuStreamEndCapture, (CUstream, CUgraph *))                                                         \
	D(cuStreamIsCapturing, (CUstream, int *))                                                            \
	D(cuGraphLaunch, (CUgraphExec, CUstream))                                                            \
	D(cuGraphUpload, (CUgraphExec, CUstream))

struct driver {
#define D(name, params) CUresult(*name) params;
	PLAIN_DRIVER(D) STREAM_DRIVER(D)
#undef D
};
extern struct driver drivers[2];

cudaError_t rt_ready(void);  /* the driver is there and initialised */
cudaError_t rt_device(void); /* ... and this thread has its device's context */
cudaError_t rt_note(cudaError_t error);
CUdevice rt_current(void);

typedef struct {
	unsigned int x, y, z;
} dim3;

/* An exported function of the runtime; `ready` is what it needs first. */
#define RT(name, params, ready, what)                                                                        \
	EXPORT cudaError_t name params                                                                       \
	{                                                                                                    \
		cudaError_t r_;                                                                              \
		ENTER(#name);                                                                                \
		r_ = here.forced;                                                                            \
		if (!r_)                                                                                     \
			r_ = ready();                                                                        \
		if (!r_)                                                                                     \
			r_ = (what);                                                                         \
		return call_end(rt_note(r_), CUDA_ERROR_NOT_READY);                                          \
	}

/* Both variants: `driver` is the table for the default stream that the variant means. */
#define RT_BOTH(name, suffix, params, what)                                                                  \
	EXPORT cudaError_t name params                                                                       \
	{                                                                                                    \
		const struct driver *driver = &drivers[0];                                                   \
		cudaError_t r_;                                                                              \
		ENTER(#name);                                                                                \
		r_ = here.forced;                                                                            \
		if (!r_)                                                                                     \
			r_ = rt_device();                                                                    \
		if (!r_)                                                                                     \
			r_ = (what);                                                                         \
		return call_end(rt_note(r_), CUDA_ERROR_NOT_READY);                                          \
	}                                                                                                    \
	EXPORT cudaError_t name##suffix params                                                               \
	{                                                                                                    \
		const struct driver *driver = &drivers[1];                                                   \
		cudaError_t r_;                                                                              \
		ENTER(#name #suffix);                                                                        \
		r_ = here.forced;                                                                            \
		if (!r_)                                                                                     \
			r_ = rt_device();                                                                    \
		if (!r_)                                                                                     \
			r_ = (what);                                                                         \
		return call_end(rt_note(r_), CUDA_ERROR_NOT_READY);                                          \
	}
