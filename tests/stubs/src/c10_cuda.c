/*
 * libc10_cuda.so: a caching allocator with the USDT notes of PyTorch's CUDA builds, `pytorch:malloc` (pointer, device,
 * size, stream) and `pytorch:free` (pointer), each behind its semaphore. On out of memory it empties its cache and
 * tries again, as PyTorch does; blocks are reused by rounded size and not split.
 */
#include "stub.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

/* The note of one probe: where it is, the base to relocate by, its semaphore, its name and its arguments. */
#define NOTE(name, arguments)                                                                                \
	"990: nop\n"                                                                                         \
	".pushsection .note.stapsdt,\"?\",\"note\"\n"                                                        \
	".balign 4\n"                                                                                        \
	".4byte 992f-991f, 994f-993f, 3\n"                                                                   \
	"991: .asciz \"stapsdt\"\n"                                                                          \
	"992: .balign 4\n"                                                                                   \
	"993: .8byte 990b\n"                                                                                 \
	".8byte _.stapsdt.base\n"                                                                            \
	".8byte pytorch_" name "_semaphore\n"                                                                \
	".asciz \"pytorch\"\n"                                                                               \
	".asciz \"" name "\"\n"                                                                              \
	".asciz \"" arguments "\"\n"                                                                         \
	"994: .balign 4\n"                                                                                   \
	".popsection\n"                                                                                      \
	".ifndef _.stapsdt.base\n"                                                                           \
	".pushsection .stapsdt.base,\"aG\",\"progbits\",.stapsdt.base,comdat\n"                              \
	".weak _.stapsdt.base\n"                                                                             \
	".hidden _.stapsdt.base\n"                                                                           \
	"_.stapsdt.base: .space 1\n"                                                                         \
	".size _.stapsdt.base, 1\n"                                                                          \
	".popsection\n"                                                                                      \
	".endif\n"

__attribute__((section(".probes"), visibility("hidden"), used)) volatile unsigned short pytorch_malloc_semaphore;
__attribute__((section(".probes"), visibility("hidden"), used)) volatile unsigned short pytorch_free_semaphore;

static void probe_malloc(const void *at, signed char device, u64 bytes, u64 stream)
{
	__asm__ volatile(NOTE("malloc", "-8@%[p] -1@%[d] -8@%[b] -8@%[s]")
			 :
			 : [p] "r"(at), [d] "r"(device), [b] "r"(bytes), [s] "r"(stream));
}

static void probe_free(const void *at)
{
	__asm__ volatile(NOTE("free", "-8@%[p]") : : [p] "r"(at));
}

struct block {
	struct block *next;
	void *at;
	u64 bytes;
	bool used;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;
static u64 retries, ooms, allocated, reserved;
static int (*cuda_malloc)(void **, size_t), (*cuda_free)(void *), (*clear_error)(void);

static bool load(void)
{
	void *handle = cuda_malloc ? NULL : dlopen("libcudart.so.13", RTLD_NOW);

	if (handle) {
		cuda_free = (int (*)(void *))dlsym(handle, "cudaFree");
		clear_error = (int (*)(void))dlsym(handle, "cudaGetLastError");
		cuda_malloc = (int (*)(void **, size_t))dlsym(handle, "cudaMalloc");
	}
	return cuda_malloc && cuda_free && clear_error;
}

static void empty_cache(void)
{
	for (struct block **at = &blocks, *b; (b = *at);) {
		if (b->used) {
			at = &b->next;
			continue;
		}
		cuda_free(b->at);
		reserved -= b->bytes;
		*at = b->next;
		free(b);
	}
}

/* Sizes are rounded to 512 bytes, and to 2 MiB above 1 MiB. */
static u64 rounded(u64 bytes)
{
	u64 unit = bytes > 1 << 20 ? 2 << 20 : 512;

	return (bytes + unit - 1) / unit * unit;
}

/* Allocate; return NULL when there is no memory even without the cache. */
EXPORT void *c10_cuda_malloc(size_t bytes, int device, void *stream)
{
	u64 size = rounded(bytes ? bytes : 1);
	struct block *b;

	pthread_mutex_lock(&lock);
	for (b = load() ? blocks : NULL; b && (b->used || b->bytes != size); b = b->next)
		;
	if (!b && cuda_malloc) {
		void *at = NULL;

		if (cuda_malloc(&at, size)) {
			clear_error();
			retries++;
			empty_cache();
			if (cuda_malloc(&at, size)) {
				clear_error();
				ooms++;
			}
		}
		if (at) {
			b = calloc(1, sizeof(*b));
			*b = (struct block){blocks, at, size, false};
			blocks = b;
			reserved += size;
		}
	}
	if (b) {
		b->used = true;
		allocated += size;
	}
	pthread_mutex_unlock(&lock);
	if (b && pytorch_malloc_semaphore)
		probe_malloc(b->at, (signed char)device, bytes, (u64)stream);
	return b ? b->at : NULL;
}

EXPORT void c10_cuda_free(void *at)
{
	if (at && pytorch_free_semaphore)
		probe_free(at);
	pthread_mutex_lock(&lock);
	for (struct block *b = blocks; b; b = b->next)
		if (b->at == at && b->used) {
			b->used = false;
			allocated -= b->bytes;
			break;
		}
	pthread_mutex_unlock(&lock);
}

EXPORT void c10_cuda_empty_cache(void)
{
	pthread_mutex_lock(&lock);
	if (load())
		empty_cache();
	pthread_mutex_unlock(&lock);
}

/* num_alloc_retries, num_ooms, allocated and reserved bytes, as torch.cuda.memory_stats() names them. */
EXPORT void c10_cuda_stats(u64 out[4])
{
	pthread_mutex_lock(&lock);
	out[0] = retries;
	out[1] = ooms;
	out[2] = allocated;
	out[3] = reserved;
	pthread_mutex_unlock(&lock);
}
