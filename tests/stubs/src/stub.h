/* What all stub libraries share: the mapped device, exact accounts of each call, time, locks and ways to wait. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

#include "region.h"

#define EXPORT __attribute__((visibility("default"), noinline))
#define unlikely(x) __builtin_expect(!!(x), 0)
#if defined(__x86_64__)
#define cpu_relax() __builtin_ia32_pause()
#else
#define cpu_relax() __asm__ volatile("" ::: "memory")
#endif

/* A call that runs on this thread; calls of one library do not nest. */
struct running {
	u64 begin_ns, wait_ns, bytes, stream;
	u32 function;
	u16 device;
	i32 forced; /* what the test wants it to fail with */
};

extern struct region *region; /* NULL: no device, as on a machine without the driver */
extern __thread struct running here;

bool stub_attach(void);
u32 stub_tid(void);
u64 now_ns(void);
void burn_ns(u64 ns);
void burn_until(u64 end_ns);

void call_begin(u32 *id, const char *name);
i32 call_end(i32 result, i32 not_ready);
void count(u64 *counter, u64 by);

void lock_word(u32 *word);
void unlock_word(u32 *word);

enum wait_mode { WAIT_SPIN, WAIT_YIELD, WAIT_BLOCK };
void wait_until(u64 end_ns, enum wait_mode mode);

/* The entry of an exported function. */
#define ENTER(name)                                                                                          \
	static u32 id_;                                                                                      \
	call_begin(&id_, name)
