/*
 * A stand-in for the extension module `whyspan_inproc._marker`: the same two symbols and nothing else, for
 * tests that need a file of their own, or one that something is wrong with.
 */
#include <stdint.h>

#ifndef SEMAPHORE_TYPE
#define SEMAPHORE_TYPE unsigned short
#endif

__attribute__((visibility("default"))) void whyspan_mark_v1(uint32_t kind, uint32_t length,
							    const void *payload);

#ifdef NO_FUNCTION
#define whyspan_mark_v1 whyspan_mark_v2
#endif

#ifndef NO_SEMAPHORE
__attribute__((visibility("default"), section(".data"))) volatile SEMAPHORE_TYPE whyspan_mark_v1_semaphore;
#endif

__attribute__((noinline, visibility("default"))) void whyspan_mark_v1(uint32_t kind, uint32_t length,
								      const void *payload)
{
	asm volatile("nop" : : "r"(kind), "r"(length), "r"(payload) : "memory");
}
