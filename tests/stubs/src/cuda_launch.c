/* libcuda: modules, libraries, kernels and launches. */
#include "cuda_api.h"

#include <ctype.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct function *function_new(struct module *m, const char *name, size_t length)
{
	struct function *f = calloc(1, sizeof(*f));

	f->module = m;
	if (length >= sizeof(f->name))
		length = sizeof(f->name) - 1;
	memcpy(f->name, name, length);
	f->next = m->functions;
	m->functions = f;
	return f;
}

/* PTX is text and names its kernels; any other image is taken to have whatever is asked for. */
static struct module *module_of(const char *image, u32 *kernels)
{
	struct module *m = calloc(1, sizeof(*m));
	const char *at;

	*kernels = 0;
	m->any_name = strncmp(image, ".version", 8) && strncmp(image, "//", 2);
	for (at = m->any_name ? NULL : strstr(image, ".entry"); at; at = strstr(at, ".entry")) {
		size_t length = 0;

		for (at += 6; isspace((unsigned char)*at); at++)
			;
		while (isalnum((unsigned char)at[length]) || at[length] == '_' || at[length] == '$')
			length++;
		if (length)
			function_new(m, at, length), ++*kernels;
	}
	return m;
}

static CUresult load(struct module **out, const void *image, bool now)
{
	struct context *ctx;
	u32 kernels;

	if (now)
		TRY(context_now(&ctx));
	else
		TRY(usable());
	if (!image || !out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = module_of(image, &kernels);
	if (!(*out)->any_name && !kernels)
		return CUDA_ERROR_INVALID_IMAGE;
	burn_ns(region->control.module_load_ns);
	if (now) /* a library is compiled for a context when it first runs there */
		burn_ns(region->control.jit_ns_per_kernel * kernels);
	return CUDA_SUCCESS;
}

static CUresult load_file(struct module **out, const char *path, bool now)
{
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	char *text;
	ssize_t got;
	CUresult result;

	if (fd < 0)
		return CUDA_ERROR_FILE_NOT_FOUND;
	text = calloc(1, 1 << 20);
	got = read(fd, text, (1 << 20) - 1);
	close(fd);
	result = got > 0 ? load(out, text, now) : CUDA_ERROR_INVALID_IMAGE;
	free(text);
	return result;
}

static CUresult find(struct function **out, struct module *m, const char *name)
{
	struct function *f;

	TRY(usable());
	if (!m || m->unloaded)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!name || !*name)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	for (f = m->functions; f && strcmp(f->name, name); f = f->next)
		;
	if (!f && m->any_name)
		f = function_new(m, name, strlen(name));
	pthread_mutex_unlock(&sim_lock);
	*out = f;
	return f ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* The first use of a kernel loads it: since CUDA 12.2 that is what programs get unless they decline. */
static void loaded(struct function *f, bool compile)
{
	if (f->loaded)
		return;
	f->loaded = true;
	burn_ns(region->control.lazy_load_ns);
	if (compile && !f->module->any_name)
		burn_ns(region->control.jit_ns_per_kernel);
}

static CUresult get_function(struct function **out, struct module *m, const char *name)
{
	TRY(find(out, m, name));
	loaded(*out, false);
	return CUDA_SUCCESS;
}

static CUresult kernel_function(struct function **out, struct function *kernel)
{
	struct context *ctx;

	TRY(context_now(&ctx));
	if (!kernel)
		return CUDA_ERROR_INVALID_HANDLE;
	loaded(kernel, true);
	*out = kernel;
	return CUDA_SUCCESS;
}

static CUresult name_of(const char **out, struct function *f)
{
	if (!f || !out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = f->name;
	return CUDA_SUCCESS;
}

static CUresult unload(struct module *m)
{
	TRY(usable());
	if (!m || m->unloaded)
		return CUDA_ERROR_INVALID_HANDLE;
	m->unloaded = true;
	return CUDA_SUCCESS;
}

static CUresult attribute(int *value, int which, struct function *f)
{
	if (!f || !value)
		return CUDA_ERROR_INVALID_VALUE;
	*value = which == 0 ? 1024 : which == 4 ? 32 : which == 5 || which == 6 ? 90 : 0;
	return CUDA_SUCCESS;
}

API(cuModuleLoad, (CUmodule * out, const char *path), load_file(out, path, true))
API(cuModuleLoadData, (CUmodule * out, const void *image), load(out, image, true))
API(cuModuleLoadDataEx, (CUmodule * out, const void *image, unsigned int n, int *options, void **values),
    ((void)n, (void)options, (void)values, load(out, image, true)))
API(cuModuleLoadFatBinary, (CUmodule * out, const void *image), load(out, image, true))
API(cuModuleUnload, (CUmodule module), unload(module))
API(cuModuleGetLoadingMode, (int *mode), (*mode = 2, CUDA_SUCCESS)) /* lazy */
API(cuModuleGetFunction, (CUfunction * out, CUmodule module, const char *name), get_function(out, module, name))
API(cuLibraryLoadData,
    (CUlibrary * out, const void *code, int *jit, void **jit_values, unsigned int jit_n, int *options,
     void **option_values, unsigned int options_n),
    ((void)jit, (void)jit_values, (void)jit_n, (void)options, (void)option_values, (void)options_n,
     load(out, code, false)))
API(cuLibraryLoadFromFile,
    (CUlibrary * out, const char *path, int *jit, void **jit_values, unsigned int jit_n, int *options,
     void **option_values, unsigned int options_n),
    ((void)jit, (void)jit_values, (void)jit_n, (void)options, (void)option_values, (void)options_n,
     load_file(out, path, false)))
API(cuLibraryUnload, (CUlibrary library), unload(library))
API(cuLibraryGetKernel, (CUkernel * out, CUlibrary library, const char *name), find(out, library, name))
API(cuLibraryGetModule, (CUmodule * out, CUlibrary library), (*out = library, usable()))
API(cuKernelGetFunction, (CUfunction * out, CUkernel kernel), kernel_function(out, kernel))
API(cuKernelGetLibrary, (CUlibrary * out, CUkernel kernel), (*out = kernel->module, usable()))
API(cuKernelGetName, (const char **out, CUkernel kernel), name_of(out, kernel))
API(cuKernelSetAttribute, (int which, int value, CUkernel kernel, CUdevice d),
    ((void)which, (void)value, (void)d, kernel ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE))
API(cuKernelGetAttribute, (int *value, int which, CUkernel kernel, CUdevice d),
    ((void)d, attribute(value, which, kernel)))
API(cuFuncGetName, (const char **out, CUfunction f), name_of(out, f))
API(cuFuncGetModule, (CUmodule * out, CUfunction f), (*out = f->module, usable()))
API(cuFuncGetAttribute, (int *value, int which, CUfunction f), attribute(value, which, f))
API(cuFuncSetAttribute, (CUfunction f, int which, int value),
    ((void)which, (void)value, f ? (loaded(f, true), CUDA_SUCCESS) : CUDA_ERROR_INVALID_HANDLE))
API(cuFuncSetCacheConfig, (CUfunction f, int which), ((void)which, f ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE))
API(cuFuncIsLoaded, (int *state, CUfunction f), (*state = f->loaded, usable()))
API(cuFuncLoad, (CUfunction f), f ? (loaded(f, true), CUDA_SUCCESS) : CUDA_ERROR_INVALID_HANDLE)

/* -- launches -- */

static __thread const struct meeting_arg *to_meet;
static __thread u32 to_meet_count;

/* How libnccl's stub says that the kernel it launches next, on this thread, meets other ranks. */
EXPORT void whyspan_stub_next_meetings(const struct meeting_arg *meetings, u32 n)
{
	to_meet = meetings;
	to_meet_count = n;
}

static void put_kernel(struct stream *s, struct function *f, u64 blocks, const struct meeting_arg *meetings, u32 n)
{
	if (!n)
		enqueue(s, (struct op){.kind = OP_WORK, .kernel = true, .ns = kernel_ns(f, blocks)});
	for (u32 i = 0; i < n; i++)
		enqueue_meeting(s, &meetings[i]);
	count(&region->kernels, 1);
}

static CUresult launch(struct function *f, u64 blocks, u64 threads, CUstream handle)
{
	const struct meeting_arg *meetings = to_meet;
	u32 n = to_meet_count;
	struct stream *s;

	to_meet_count = 0;
	TRY(stream_now(handle, &s));
	if (!f || f->module->unloaded)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!blocks || !threads || threads > 1024)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	loaded(f, true);
	if (s->capture) {
		struct node *node = graph_add(s->capture);

		*node = (struct node){.kind = n ? NODE_MEET : NODE_KERNEL, .function = f, .blocks = blocks, .meets = n};
		if (n) {
			node->meetings = malloc(n * sizeof(*meetings));
			memcpy(node->meetings, meetings, n * sizeof(*meetings));
		}
		burn_ns(region->control.call_host_ns);
	} else {
		wait_for_room(s);
		burn_ns(region->control.launch_host_ns);
		put_kernel(s, f, blocks, meetings, n);
	}
	pthread_mutex_unlock(&sim_lock);
	return CUDA_SUCCESS;
}

#define GRID unsigned int gx, unsigned int gy, unsigned int gz
#define BLOCK unsigned int bx, unsigned int by, unsigned int bz
#define BLOCKS ((u64)gx * gy * gz)
#define THREADS ((u64)bx * by * bz)

API_BOTH(cuLaunchKernel, _ptsz,
	 (CUfunction f, GRID, BLOCK, unsigned int shared, CUstream stream, void **params, void **extra),
	 ((void)shared, (void)params, (void)extra, launch(f, BLOCKS, THREADS, STREAM(stream))))
API_BOTH(cuLaunchKernelEx, _ptsz, (const CUlaunchConfig *c, CUfunction f, void **params, void **extra),
	 ((void)params, (void)extra, !c ? CUDA_ERROR_INVALID_VALUE
			  : launch(f, (u64)c->gridDimX * c->gridDimY * c->gridDimZ,
				   (u64)c->blockDimX * c->blockDimY * c->blockDimZ, STREAM(c->hStream))))
API_BOTH(cuLaunchCooperativeKernel, _ptsz,
	 (CUfunction f, GRID, BLOCK, unsigned int shared, CUstream stream, void **params),
	 ((void)shared, (void)params, launch(f, BLOCKS, THREADS, STREAM(stream))))
