// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * A stub of an allocator, to be preloaded: the functions have the names of jemalloc's (mallctl tells it from
 * others) and do nothing well. Memory comes from one pool under one lock and is never given back.
 */
#include <pthread.h>
#include <stddef.h>
#include <string.h>

#define POOL (64 << 20)

static char pool[POOL] __attribute__((aligned(64)));
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *take(size_t size)
{
	void *p = NULL;

	pthread_mutex_lock(&lock);
	if (used + size + 80 < POOL) {
		used = (used + 16 + 63) & ~(size_t)63;
		p = pool + used;
		*(size_t *)((char *)p - 16) = size;
		used += size + 16;
	}
	pthread_mutex_unlock(&lock);
	return p;
}

void *malloc(size_t size)
{
	return take(size);
}

void *calloc(size_t n, size_t size)
{
	return take(n * size); /* the pool is all zeros and nothing is used twice */
}

void *realloc(void *old, size_t size)
{
	void *p = take(size);

	if (old && p) {
		size_t had = *(size_t *)((char *)old - 16);

		memcpy(p, old, had < size ? had : size);
	}
	return p;
}

void free(void *p)
{
	(void)p;
}

int posix_memalign(void **p, size_t alignment, size_t size)
{
	(void)alignment; /* at most 64 */
	*p = take(size);
	return *p ? 0 : 12;
}

int mallctl(const char *name, void *old, size_t *length, void *new, size_t size)
{
	(void)name, (void)old, (void)length, (void)new, (void)size;
	return 2;
}
