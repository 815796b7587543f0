/* SPDX-License-Identifier: Apache-2.0 */
/* Spins, or sleeps, below known functions: native_work spin, native_work sleep. With frame pointers. */
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

volatile unsigned long turns;

namespace lab
{
template <typename T> struct Spinner {
	__attribute__((noinline)) unsigned long turn(T n);
};

template <typename T> __attribute__((noinline)) unsigned long Spinner<T>::turn(T n)
{
	/* Long enough that samples fall on many instructions. */
	for (T i = 0; i < n; i++) {
		turns = turns + i * 3;
		turns = turns ^ i << 7;
		turns = turns + (turns >> 9);
		turns = turns - i * 5;
		turns = turns ^ i << 11;
		turns = turns + (turns >> 13);
	}
	return turns;
}
} // namespace lab

extern "C" {
__attribute__((noinline)) unsigned long lab_inner(int sleeps)
{
	lab::Spinner<unsigned long> spinner;
	struct timespec for_long = { .tv_sec = 1000, .tv_nsec = 0 };

	if (sleeps)
		return nanosleep(&for_long, NULL) + turns;
	return spinner.turn(1000000) + 1;
}

__attribute__((noinline)) unsigned long lab_outer(int sleeps)
{
	return lab_inner(sleeps) + 1;
}
}

int main(int argc, char **argv)
{
	int sleeps = argc > 1 && !strcmp(argv[1], "sleep");

	alarm(120);
	puts("ready");
	fflush(stdout);
	for (;;)
		lab_outer(sleeps);
}
