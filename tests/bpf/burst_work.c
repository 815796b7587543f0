// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Work whose calls are counted, for the bursts. Threads a0, a1, ... each read one line of orders in turn: the
 * main thread reads "THREAD WHAT COUNT SIZE" from its input and answers "done" when that thread has done it.
 * WHAT: malloc (and free, of SIZE), calloc, realloc, aligned, free; getppid; sleep (COUNT times SIZE us);
 * fight: COUNT threads allocate, touch and free SIZE bytes in one arena until "SECONDS" are over.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define THREADS 8

static struct order {
	pthread_mutex_t lock;
	pthread_cond_t given;
	pthread_cond_t taken;
	char what[16];
	long count;
	long size;
	int full;
} orders[THREADS];

static void *volatile kept;

static void nap(long us)
{
	struct timespec t = { us / 1000000, us % 1000000 * 1000 };

	nanosleep(&t, NULL);
}

__attribute__((noinline)) static void obey(const char *what, long count, long size)
{
	long i;

	for (i = 0; i < count; i++) {
		if (!strcmp(what, "malloc")) {
			kept = malloc(size);
			free(kept);
		} else if (!strcmp(what, "calloc")) {
			kept = calloc(size, 1);
			free(kept);
		} else if (!strcmp(what, "realloc")) {
			kept = NULL;
			kept = realloc(kept, size); /* goes on to malloc */
			kept = realloc(kept, size * 3);
			free(kept);
		} else if (!strcmp(what, "aligned")) {
			void *p = NULL;

			if (!posix_memalign(&p, 64, size))
				free(p);
		} else if (!strcmp(what, "getppid")) {
			syscall(SYS_getppid);
		} else if (!strcmp(what, "sleep")) {
			nap(size);
		}
	}
}

static void *fight(void *argument)
{
	struct order *o = argument;
	struct timespec now, end;

	clock_gettime(CLOCK_MONOTONIC, &end);
	end.tv_sec += o->count;
	do {
		void *held[64];
		int i, k;

		for (k = 0; k < 64; k++) {
			for (i = 0; i < 64; i++)
				held[i] = malloc(o->size + i * 16);
			for (i = 0; i < 64; i++)
				free(held[i]);
		}
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec < end.tv_sec || (now.tv_sec == end.tv_sec && now.tv_nsec < end.tv_nsec));
	return NULL;
}

static void *work(void *argument)
{
	struct order *o = argument;

	pthread_mutex_lock(&o->lock);
	for (;;) {
		while (!o->full)
			pthread_cond_wait(&o->given, &o->lock);
		if (!strcmp(o->what, "fight"))
			fight(o);
		else
			obey(o->what, o->count, o->size);
		o->full = 0;
		pthread_cond_signal(&o->taken);
	}
	return NULL;
}

int main(void)
{
	char line[128], name[16];
	pthread_t t[THREADS];
	int i;

	for (i = 0; i < THREADS; i++) {
		pthread_mutex_init(&orders[i].lock, NULL);
		pthread_cond_init(&orders[i].given, NULL);
		pthread_cond_init(&orders[i].taken, NULL);
		pthread_create(&t[i], NULL, work, &orders[i]);
		snprintf(name, sizeof(name), "a%d", i);
		pthread_setname_np(t[i], name);
	}
	setvbuf(stdout, NULL, _IONBF, 0);
	printf("ready\n");
	while (fgets(line, sizeof(line), stdin)) {
		char what[16];
		long count, size;
		int first, last;

		if (sscanf(line, "%d-%d %15s %ld %ld", &first, &last, what, &count, &size) != 5 ||
		    first < 0 || last >= THREADS)
			return 1;
		for (i = first; i <= last; i++) {
			struct order *o = &orders[i];

			pthread_mutex_lock(&o->lock);
			strcpy(o->what, what);
			o->count = count;
			o->size = size;
			o->full = 1;
			pthread_cond_signal(&o->given);
			pthread_mutex_unlock(&o->lock);
		}
		for (i = first; i <= last; i++) {
			pthread_mutex_lock(&orders[i].lock);
			while (orders[i].full)
				pthread_cond_wait(&orders[i].taken, &orders[i].lock);
			pthread_mutex_unlock(&orders[i].lock);
		}
		printf("done\n");
	}
	return 0;
}
