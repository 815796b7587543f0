/*
 * calls: so many calls of each kind, as fast as they go: `calls [--wait] [KIND=COUNT ...]`. Without kinds: prime
 * numbers of all. Prints `KIND COUNT NS` (what they took together) for each. For counting, and for the cost of a hit.
 * `calls-static` has the runtime inside.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cuda_abi.h"

typedef struct {
	unsigned int x, y, z;
} dim3;

static void *driver, *runtime, *stream, *event, *device_memory, *pinned, *exec_;
static CUfunction function;
static char pageable[4096];
static char host_function[16];

#define DRIVER(name, type) ((CUresult(*) type)need(driver, #name))
#define RUNTIME(name, type) ((int(*) type)need(runtime, #name))

static void *need(void *library, const char *name)
{
	void *found = dlsym(library, name);

	if (!found) {
		fprintf(stderr, "no %s\n", name);
		exit(2);
	}
	return found;
}

static void check(int result, const char *what)
{
	if (result && result != CUDA_ERROR_NOT_READY) {
		fprintf(stderr, "%s: error %d\n", what, result);
		exit(1);
	}
}

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

/* One kind: the function, its parameters, and the call of it. */
#define KIND(kind, library, function, params, ...)                                                           \
	static void run_##kind(long n)                                                                       \
	{                                                                                                    \
		int(*f) params = need(library, #function);                                                   \
		for (long i = 0; i < n; i++)                                                                 \
			check(f(__VA_ARGS__), #function);                                                    \
	}
/* A kind that makes something and takes it back: the second gets what the first made. */
#define PAIR(kind, make, make_params, drop, drop_params, made, dropped)                                      \
	static void run_##kind(long n)                                                                       \
	{                                                                                                    \
		int(*f) make_params = need(driver, #make);                                                   \
		int(*g) drop_params = need(driver, #drop);                                                   \
		void *at;                                                                                    \
		for (long i = 0; i < n; i++) {                                                               \
			check(f made, #make);                                                                \
			check(g dropped, #drop);                                                             \
		}                                                                                            \
	}

typedef unsigned int U;
typedef void *P;
#define SHAPE 1, 1, 1, 32, 1, 1, 0

static CUlaunchConfig config = {1, 1, 1, 32, 1, 1, 0, NULL, NULL, 0};
static const dim3 one = {1, 1, 1};

KIND(launch, driver, cuLaunchKernel, (P, U, U, U, U, U, U, U, P, P, P), function, SHAPE, stream, NULL, NULL)
KIND(launch_ptsz, driver, cuLaunchKernel_ptsz, (P, U, U, U, U, U, U, U, P, P, P), function, SHAPE, stream, NULL, NULL)
KIND(launch_ex, driver, cuLaunchKernelEx, (const CUlaunchConfig *, P, P, P), &config, function, NULL, NULL)
KIND(launch_cooperative, driver, cuLaunchCooperativeKernel, (P, U, U, U, U, U, U, U, P, P), function, SHAPE, stream,
     NULL)
KIND(graph, driver, cuGraphLaunch, (P, P), exec_, stream)
KIND(h2d_async, driver, cuMemcpyHtoDAsync_v2, (P, P, size_t, P), device_memory, pinned, 256, stream)
KIND(d2h_async, driver, cuMemcpyDtoHAsync_v2, (P, P, size_t, P), pinned, device_memory, 256, stream)
KIND(h2d, driver, cuMemcpyHtoD_v2, (P, P, size_t), device_memory, pageable, 256)
KIND(d2h, driver, cuMemcpyDtoH_v2, (P, P, size_t), pageable, device_memory, 256)
KIND(d2d_async, driver, cuMemcpyDtoDAsync_v2, (P, P, size_t, P), device_memory, device_memory, 256, stream)
KIND(memset, driver, cuMemsetD8Async, (P, unsigned char, size_t, P), device_memory, 0, 256, stream)
KIND(stream_sync, driver, cuStreamSynchronize, (P), stream)
KIND(event_sync, driver, cuEventSynchronize, (P), event)
KIND(context_sync, driver, cuCtxSynchronize, (void))
KIND(stream_query, driver, cuStreamQuery, (P), stream)
KIND(event_record, driver, cuEventRecord, (P, P), event, stream)
KIND(rt_launch, runtime, cudaLaunchKernel, (P, dim3, dim3, P, size_t, P), host_function, one, one, NULL, 0, stream)
KIND(rt_stream_sync, runtime, cudaStreamSynchronize, (P), stream)
KIND(rt_copy_async, runtime, cudaMemcpyAsync, (P, P, size_t, int, P), device_memory, pinned, 256, 1, stream)
KIND(rt_copy, runtime, cudaMemcpy, (P, P, size_t, int), pageable, device_memory, 256, 2)
PAIR(alloc, cuMemAlloc_v2, (P *, size_t), cuMemFree_v2, (P), (&at, 4096), (at))
PAIR(alloc_async, cuMemAllocAsync, (P *, size_t, P), cuMemFreeAsync, (P, P), (&at, 4096, stream), (at, stream))
PAIR(host_alloc, cuMemHostAlloc, (P *, size_t, U), cuMemFreeHost, (P), (&at, 4096, 0), (at))
PAIR(module, cuModuleLoadData, (P *, const void *), cuModuleUnload, (P), (&at, "\x7f" "ELF"), (at))

static const struct kind {
	const char *name;
	void (*run)(long);
	long usual;
} kinds[] = {
#define K(name, n) {#name, run_##name, n},
	K(launch, 1009) K(launch_ptsz, 1013) K(launch_ex, 1019) K(launch_cooperative, 1021) K(graph, 503)
	K(h2d_async, 1031) K(d2h_async, 1033) K(h2d, 211) K(d2h, 223) K(d2d_async, 1039) K(memset, 1049)
	K(stream_sync, 227) K(event_sync, 229) K(context_sync, 233) K(stream_query, 1051) K(event_record, 1061)
	K(alloc, 101) K(alloc_async, 239) K(host_alloc, 103) K(module, 107)
	K(rt_launch, 1063) K(rt_stream_sync, 241) K(rt_copy_async, 1069) K(rt_copy, 251)
};
#define KINDS (sizeof(kinds) / sizeof(*kinds))

static void set_up(void)
{
	void *context, *module, *graph, **fat;
	struct {
		int magic, version;
		const void *data;
		void *file;
	} wrapper = {0x466243b1, 1, "\x7f" "ELF", NULL};

	driver = dlopen("libcuda.so.1", RTLD_NOW);
#ifdef STATIC_RUNTIME /* as programs have it that nvcc links: the runtime is in this file */
	runtime = dlopen(NULL, RTLD_NOW);
#else
	runtime = dlopen("libcudart.so.13", RTLD_NOW);
#endif
	if (!driver || !runtime) {
		fprintf(stderr, "%s\n", dlerror());
		exit(2);
	}
	check(DRIVER(cuInit, (U))(0), "cuInit");
	check(DRIVER(cuDevicePrimaryCtxRetain, (void **, int))(&context, 0), "cuDevicePrimaryCtxRetain");
	check(DRIVER(cuCtxSetCurrent, (void *))(context), "cuCtxSetCurrent");
	check(DRIVER(cuModuleLoadData, (void **, const void *))(&module, "\x7f" "ELF"), "cuModuleLoadData");
	check(DRIVER(cuModuleGetFunction, (CUfunction *, void *, const char *))(&function, module, "_Z5calls1kv"),
	      "cuModuleGetFunction");
	check(DRIVER(cuStreamCreate, (void **, U))(&stream, 1), "cuStreamCreate");
	config.hStream = stream;
	check(DRIVER(cuEventCreate, (void **, U))(&event, 0), "cuEventCreate");
	check(DRIVER(cuMemAlloc_v2, (void **, size_t))(&device_memory, 4096), "cuMemAlloc_v2");
	check(DRIVER(cuMemHostAlloc, (void **, size_t, U))(&pinned, 4096, 0), "cuMemHostAlloc");
	check(DRIVER(cuStreamBeginCapture_v2, (void *, int))(stream, 0), "cuStreamBeginCapture_v2");
	for (int i = 0; i < 50; i++)
		check(DRIVER(cuLaunchKernel, (CUfunction, U, U, U, U, U, U, U, void *, void **, void **))(
			      function, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL),
		      "cuLaunchKernel");
	check(DRIVER(cuStreamEndCapture, (void *, void **))(stream, &graph), "cuStreamEndCapture");
	check(DRIVER(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long))(&exec_, graph, 0),
	      "cuGraphInstantiateWithFlags");
	fat = ((void **(*)(void *))need(runtime, "__cudaRegisterFatBinary"))(&wrapper);
	((void (*)(void **, const void *, const char *, const char *, int, void *, void *, void *, void *, int *))need(
		runtime, "__cudaRegisterFunction"))(fat, host_function, "k", "_Z5calls2kv", -1, NULL, NULL, NULL, NULL, NULL);
	check(RUNTIME(cudaFree, (void *))(NULL), "cudaFree");
}

static void run(const struct kind *k, long n)
{
	uint64_t begin = now();

	k->run(n);
	printf("%s %ld %llu\n", k->name, n, (unsigned long long)(now() - begin));
	fflush(stdout);
}

/* `--wait`: set up, say so with a line, and begin when a line comes. */
int main(int argc, char **argv)
{
	int first = 1, ran = 0;
	char line[8];

	set_up();
	if (argc > 1 && !strcmp(argv[1], "--wait")) {
		printf("ready %d\n", getpid());
		fflush(stdout);
		if (!fgets(line, sizeof(line), stdin))
			return 1;
		first++;
	}
	for (int i = first; i < argc; i++) {
		const char *equals = strchr(argv[i], '=');

		for (size_t k = 0; equals && k < KINDS; k++)
			if (strlen(kinds[k].name) == (size_t)(equals - argv[i]) &&
			    !strncmp(kinds[k].name, argv[i], (size_t)(equals - argv[i])))
				run(&kinds[k], atol(equals + 1)), ran++;
	}
	if (ran < argc - first) {
		fprintf(stderr, "usage: calls [--wait] [KIND=COUNT ...]; kinds:");
		for (size_t k = 0; k < KINDS; k++)
			fprintf(stderr, " %s", kinds[k].name);
		fprintf(stderr, "\n");
		return 2;
	}
	for (size_t k = 0; first == argc && k < KINDS; k++)
		run(&kinds[k], kinds[k].usual);
	return 0;
}
