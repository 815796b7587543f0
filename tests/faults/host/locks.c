/*
 * What the faults of locks do in native code: keep the interpreter's lock, a mutex, the allocator's lock, or that of
 * the map of memory. Times are in seconds.
 */
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static void *volatile kept; /* so that no compiler leaves an allocation out */

/* What a request does between two uses of a lock, here asleep. */
static void between(void)
{
	struct timespec rest = { 0, 300000 };

	nanosleep(&rest, NULL);
}

/* Be on a CPU. Called by ctypes.PyDLL, nobody else of the process runs Python meanwhile. */
void locks_spin(double seconds)
{
	double end = now() + seconds;

	while (now() < end)
		;
}

/* Have the mutex, on a CPU for half of the time and asleep for the rest. */
void locks_hold(double seconds)
{
	struct timespec rest = { 0, (long)(seconds * 0.5e9) };

	pthread_mutex_lock(&mutex);
	locks_spin(seconds * 0.5);
	nanosleep(&rest, NULL);
	pthread_mutex_unlock(&mutex);
}

/* Take the mutex and let it go; return how long that took. */
double locks_take(void)
{
	double begin = now();

	pthread_mutex_lock(&mutex);
	pthread_mutex_unlock(&mutex);
	return now() - begin;
}

/* Leave many free blocks of more than a page in the heap, between others that are kept. */
void locks_litter(int count)
{
	void **block = calloc(count, sizeof(*block));

	for (int i = 0; block && i < count; i++) {
		block[i] = malloc(12000);
		kept = malloc(24);
	}
	for (int i = 0; block && i < count; i++)
		free(block[i]);
	free(block);
}

/* Give free memory back again and again: the arena is locked while each free block is looked at. */
void locks_trim(double seconds)
{
	double end = now() + seconds;

	while (now() < end)
		malloc_trim(0);
}

/* Allocate and free blocks too large for the thread's own cache, with rests; return how long that took. */
double locks_allocate(int times)
{
	double begin = now();

	for (int i = 0; i < times; i++) {
		kept = malloc(5000);
		free(kept);
		between();
	}
	return now() - begin;
}

/* Map memory, all of it there, to be protected. */
void *locks_map(size_t bytes)
{
	char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (at == MAP_FAILED)
		return NULL;
	madvise(at, bytes, MADV_NOHUGEPAGE);
	memset(at, 1, bytes);
	return at;
}

/* Change the protection of that memory again and again: the map is locked while its page tables are walked. */
void locks_protect(void *at, size_t bytes, double seconds)
{
	double end = now() + seconds;

	while (now() < end) {
		mprotect(at, bytes, PROT_READ);
		mprotect(at, bytes, PROT_READ | PROT_WRITE);
	}
}

void locks_unmap(void *at, size_t bytes)
{
	munmap(at, bytes);
}

/* Map, touch and unmap small pieces, with rests; return how long that took. */
double locks_touch(int times)
{
	double begin = now();

	for (int i = 0; i < times; i++) {
		char *at = mmap(NULL, 1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (at == MAP_FAILED)
			break;
		memset(at, 1, 1 << 16);
		munmap(at, 1 << 16);
		between();
	}
	return now() - begin;
}

/* Sleep. */
void locks_rest(double seconds)
{
	struct timespec rest = { 0, (long)(seconds * 1e9) };

	nanosleep(&rest, NULL);
}

/* Return where the mutex is. */
void *locks_address(void)
{
	return &mutex;
}

/* Return when somebody has the mutex. */
void locks_wait_held(void)
{
	struct timespec rest = { 0, 100000 };

	while (!pthread_mutex_trylock(&mutex)) {
		pthread_mutex_unlock(&mutex);
		nanosleep(&rest, NULL);
	}
}
