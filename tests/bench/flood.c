/* Calls getppid() at a steady rate and prints how often: flood RATE_PER_S SECONDS (rate 0: as fast as it can). */
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
	double rate = argc > 1 ? atof(argv[1]) : 0, seconds = argc > 2 ? atof(argv[2]) : 1, start = now(), t = start;
	long count = 0;

	while (t - start < seconds) {
		/* Small bursts, so that the clock is not read for every call. */
		if (!rate || count < (t - start) * rate)
			for (int i = 0; i < 100; i++, count++)
				syscall(SYS_getppid);
		t = now();
	}
	printf("%ld\n", count);
	return 0;
}
