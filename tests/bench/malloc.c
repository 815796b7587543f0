/* Allocates and frees as fast as it can, for so long after each line of its input; prints pairs and nanoseconds. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static long long now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void *volatile kept; /* so that no compiler leaves the pair out */

int main(void)
{
	int ms;

	while (scanf("%d", &ms) == 1) {
		long long begin = now(), end = begin + ms * 1000000LL, pairs = 0, at;

		do {
			for (int i = 0; i < 1000; i++) {
				kept = malloc(64);
				free(kept);
			}
			pairs += 1000;
			at = now();
		} while (at < end);
		printf("%lld %lld\n", pairs, at - begin);
		fflush(stdout);
	}
	return 0;
}
