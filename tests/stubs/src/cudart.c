/* libcudart: the driver, devices, registered kernels and their launches. Each call goes on to the driver. */
#include "cudart.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INSUFFICIENT_DRIVER = 35, MISSING_CONFIGURATION = 52, INVALID_DEVICE_FUNCTION = 98 };

struct driver drivers[2];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static cudaError_t driver_state = -1; /* not asked yet */
static CUcontext contexts[MAX_DEVICES];
static __thread CUdevice device;
static __thread cudaError_t last_error;
static __thread bool has_context;

typedef CUresult get_proc(const char *, void **, int, unsigned long long, int *);

static cudaError_t load_driver(void)
{
	void *handle = dlopen("libcuda.so.1", RTLD_NOW);
	get_proc *get = handle ? (get_proc *)dlsym(handle, "cuGetProcAddress_v2") : NULL;

	if (!get)
		return INSUFFICIENT_DRIVER;
	for (int i = 0; i < 2; i++) {
		const unsigned long long flags = i ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : 0;
#define D(name, params)                                                                                      \
	if (get(#name, (void **)&drivers[i].name, DRIVER_VERSION, flags, NULL))                              \
		return INSUFFICIENT_DRIVER;
		PLAIN_DRIVER(D) STREAM_DRIVER(D)
#undef D
	}
	return drivers[0].cuInit(0);
}

cudaError_t rt_ready(void)
{
	if (unlikely(driver_state < 0)) {
		pthread_mutex_lock(&lock);
		if (driver_state < 0)
			driver_state = load_driver();
		pthread_mutex_unlock(&lock);
	}
	return driver_state;
}

cudaError_t rt_device(void)
{
	CUresult r = rt_ready();

	if (r || has_context)
		return r;
	pthread_mutex_lock(&lock);
	if (!contexts[device])
		r = drivers[0].cuDevicePrimaryCtxRetain(&contexts[device], device);
	pthread_mutex_unlock(&lock);
	r = r ? r : drivers[0].cuCtxSetCurrent(contexts[device]);
	has_context = !r;
	return r;
}

cudaError_t rt_note(cudaError_t error)
{
	if (error && error != CUDA_ERROR_NOT_READY)
		last_error = error;
	return error;
}

CUdevice rt_current(void)
{
	return device;
}

static cudaError_t nothing_needed(void)
{
	return CUDA_SUCCESS;
}

static cudaError_t set_device(int d)
{
	int n;
	CUresult r = drivers[0].cuDeviceGetCount(&n);

	if (r || d < 0 || d >= n)
		return r ? r : CUDA_ERROR_INVALID_DEVICE;
	device = d;
	has_context = false;
	return rt_device(); /* since CUDA 12 it initialises the device */
}

static cudaError_t device_flags(unsigned int *flags)
{
	int active;

	return drivers[0].cuDevicePrimaryCtxGetState(device, flags, &active);
}

static cudaError_t take_error(bool keep)
{
	cudaError_t e = last_error;

	if (!keep)
		last_error = CUDA_SUCCESS;
	return e;
}

RT(cudaRuntimeGetVersion, (int *version), nothing_needed, (*version = DRIVER_VERSION, CUDA_SUCCESS))
RT(cudaDriverGetVersion, (int *version), rt_ready, drivers[0].cuDriverGetVersion(version))
RT(cudaGetDeviceCount, (int *n), rt_ready, drivers[0].cuDeviceGetCount(n))
RT(cudaGetDevice, (int *d), rt_ready, (*d = device, CUDA_SUCCESS))
RT(cudaSetDevice, (int d), rt_ready, set_device(d))
RT(cudaSetDeviceFlags, (unsigned int flags), rt_ready, drivers[0].cuDevicePrimaryCtxSetFlags(device, flags))
RT(cudaGetDeviceFlags, (unsigned int *flags), rt_ready, device_flags(flags))
RT(cudaDeviceGetAttribute, (int *value, int which, int d), rt_ready,
   drivers[0].cuDeviceGetAttribute(value, which, d))
RT(cudaDeviceGetPCIBusId, (char *id, int length, int d), rt_ready, drivers[0].cuDeviceGetPCIBusId(id, length, d))
RT(cudaDeviceCanAccessPeer, (int *can, int a, int b), rt_ready, drivers[0].cuDeviceCanAccessPeer(can, a, b))
RT(cudaDeviceGetStreamPriorityRange, (int *least, int *greatest), rt_device,
   drivers[0].cuCtxGetStreamPriorityRange(least, greatest))
RT(cudaDeviceSynchronize, (void), rt_device, drivers[0].cuCtxSynchronize())
RT(cudaDeviceReset, (void), rt_device, drivers[0].cuDevicePrimaryCtxReset(device))

EXPORT cudaError_t cudaGetLastError(void)
{
	return take_error(false);
}

EXPORT cudaError_t cudaPeekAtLastError(void)
{
	return take_error(true);
}

static const char *error_text(cudaError_t error, bool name)
{
	const char *text = NULL;

	if (error == INSUFFICIENT_DRIVER)
		return name ? "cudaErrorInsufficientDriver" : "CUDA driver version is insufficient for CUDA runtime version";
	if (error == INVALID_DEVICE_FUNCTION)
		return name ? "cudaErrorInvalidDeviceFunction" : "invalid device function";
	if (!rt_ready() && !(name ? drivers[0].cuGetErrorName(error, &text) : drivers[0].cuGetErrorString(error, &text)))
		return text;
	return name ? "cudaErrorUnknown" : "unrecognized error code";
}

EXPORT const char *cudaGetErrorName(cudaError_t error)
{
	return error_text(error, true);
}

EXPORT const char *cudaGetErrorString(cudaError_t error)
{
	return error_text(error, false);
}

/* -- what nvcc's host code registers before main -- */

struct fat_binary {
	const void *image;
	CUlibrary library;
};

struct kernel {
	struct kernel *next;
	const void *host;
	char *name;
	struct fat_binary *in;
	CUkernel found;
};

#define KERNEL_SLOTS 1024
static struct kernel *kernels[KERNEL_SLOTS];

static struct kernel **slot_of(const void *host)
{
	return &kernels[((size_t)host >> 4) % KERNEL_SLOTS];
}

EXPORT void **__cudaRegisterFatBinary(void *wrapper)
{
	struct {
		int magic, version;
		const void *data;
		void *file;
	} *w = wrapper;
	struct fat_binary *b = calloc(1, sizeof(*b));

	b->image = w && w->magic == 0x466243b1 ? w->data : wrapper;
	return (void **)b;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **handle)
{
	(void)handle;
}

EXPORT void __cudaUnregisterFatBinary(void **handle)
{
	struct fat_binary *b = (struct fat_binary *)handle;

	if (b && b->library && !rt_ready())
		drivers[0].cuLibraryUnload(b->library);
}

EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device_function, const char *device_name,
				   int thread_limit, void *tid, void *bid, void *block, void *grid, int *size)
{
	struct kernel *k = calloc(1, sizeof(*k));

	(void)device_function, (void)thread_limit, (void)tid, (void)bid, (void)block, (void)grid, (void)size;
	k->host = host;
	k->name = strdup(device_name);
	k->in = (struct fat_binary *)handle;
	pthread_mutex_lock(&lock);
	k->next = *slot_of(host);
	*slot_of(host) = k;
	pthread_mutex_unlock(&lock);
}

EXPORT void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int ext, size_t size,
			      int constant, int global)
{
	(void)handle, (void)host, (void)address, (void)name, (void)ext, (void)size, (void)constant, (void)global;
}

static struct kernel *registered(const void *host)
{
	struct kernel *k;

	for (k = *slot_of(host); k && k->host != host; k = k->next)
		;
	return k;
}

/* The driver's kernel for a host function; its module is loaded at the first use of one of its kernels. */
static cudaError_t kernel_of(const void *host, CUkernel *out)
{
	struct kernel *k = registered(host);
	CUresult r = CUDA_SUCCESS;

	if (!k)
		return INVALID_DEVICE_FUNCTION;
	if (unlikely(!k->found)) {
		pthread_mutex_lock(&lock);
		if (!k->in->library)
			r = drivers[0].cuLibraryLoadData(&k->in->library, k->in->image, NULL, NULL, 0, NULL, NULL, 0);
		if (!r && !k->found)
			r = drivers[0].cuLibraryGetKernel(&k->found, k->in->library, k->name);
		pthread_mutex_unlock(&lock);
	}
	*out = k->found;
	return r;
}

static __thread struct {
	dim3 grid, block;
	size_t shared;
	CUstream stream;
} pushed[8];
static __thread unsigned int pushed_count;

EXPORT unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream stream)
{
	if (pushed_count == 8)
		return 1;
	pushed[pushed_count].grid = grid;
	pushed[pushed_count].block = block;
	pushed[pushed_count].shared = shared;
	pushed[pushed_count++].stream = stream;
	return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, CUstream *stream)
{
	if (!pushed_count)
		return rt_note(MISSING_CONFIGURATION);
	*grid = pushed[--pushed_count].grid;
	*block = pushed[pushed_count].block;
	*shared = pushed[pushed_count].shared;
	*stream = pushed[pushed_count].stream;
	return CUDA_SUCCESS;
}

/* -- launches -- */

typedef struct {
	dim3 grid, block;
	size_t shared;
	CUstream stream;
	void *attributes;
	unsigned int attribute_count;
} cudaLaunchConfig_t;

static cudaError_t launch_kernel(const struct driver *driver, CUkernel k, dim3 g, dim3 b, void **args, size_t shared,
				 CUstream stream)
{
	return driver->cuLaunchKernel(k, g.x, g.y, g.z, b.x, b.y, b.z, (unsigned int)shared, stream, args, NULL);
}

static cudaError_t launch(const struct driver *driver, const void *host, dim3 g, dim3 b, void **args, size_t shared,
			  CUstream stream)
{
	CUkernel k;
	cudaError_t r = kernel_of(host, &k);

	return r ? r : launch_kernel(driver, k, g, b, args, shared, stream);
}

static cudaError_t cooperative(const struct driver *driver, const void *host, dim3 g, dim3 b, void **args,
			       size_t shared, CUstream stream)
{
	CUkernel k;
	cudaError_t r = kernel_of(host, &k);

	return r ? r
		 : driver->cuLaunchCooperativeKernel(k, g.x, g.y, g.z, b.x, b.y, b.z, (unsigned int)shared, stream,
						     args);
}

static cudaError_t launch_ex(const struct driver *driver, const cudaLaunchConfig_t *c, const void *host, void **args)
{
	CUkernel k;
	CUlaunchConfig config;
	cudaError_t r = c ? kernel_of(host, &k) : CUDA_ERROR_INVALID_VALUE;

	if (r)
		return r;
	config = (CUlaunchConfig){c->grid.x, c->grid.y, c->grid.z, c->block.x, c->block.y, c->block.z,
				  (unsigned int)c->shared, c->stream, c->attributes, c->attribute_count};
	return driver->cuLaunchKernelEx(&config, k, args, NULL);
}

static cudaError_t name_of(const char **name, const void *host)
{
	struct kernel *k = registered(host);

	if (!k)
		return INVALID_DEVICE_FUNCTION;
	*name = k->name;
	return CUDA_SUCCESS;
}

static cudaError_t attribute(const void *host, int which, int value)
{
	CUkernel k;
	cudaError_t r = kernel_of(host, &k);

	return r ? r : drivers[0].cuKernelSetAttribute(which, value, k, device);
}

RT_BOTH(cudaLaunchKernel, _ptsz,
	(const void *function, dim3 grid, dim3 block, void **args, size_t shared, CUstream stream),
	launch(driver, function, grid, block, args, shared, stream))
RT_BOTH(cudaLaunchKernelExC, _ptsz, (const cudaLaunchConfig_t *config, const void *function, void **args),
	launch_ex(driver, config, function, args))
RT_BOTH(cudaLaunchCooperativeKernel, _ptsz,
	(const void *function, dim3 grid, dim3 block, void **args, size_t shared, CUstream stream),
	cooperative(driver, function, grid, block, args, shared, stream))
/* What the host code that nvcc makes since CUDA 12.x calls, with a kernel that it has asked for before. */
RT(__cudaGetKernel, (CUkernel * out, const void *host), rt_device, kernel_of(host, out))
RT_BOTH(__cudaLaunchKernel, _ptsz,
	(CUkernel kernel, dim3 grid, dim3 block, void **args, size_t shared, CUstream stream),
	launch_kernel(driver, kernel, grid, block, args, shared, stream))
RT(cudaFuncGetName, (const char **name, const void *host), nothing_needed, name_of(name, host))
RT(cudaGetFuncBySymbol, (CUfunction * out, const void *host), rt_device, kernel_of(host, out))
RT(cudaFuncSetAttribute, (const void *host, int which, int value), rt_device, attribute(host, which, value))
