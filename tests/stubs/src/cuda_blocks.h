/*
 * libcuda: memory. The device's memory is granules that all processes share; an allocation is a run of them, the
 * first that fits, so the pool fragments; what is mapped piecewise (cuMemCreate, cuMemMap) needs no run. No contents.
 */
#pragma once
#include "cuda_api.h"

/* Nothing of a process lies here: between what Linux gives to programs and to libraries. */
#define DEVICE_BASE 0x300000000000ULL
#define DEVICE_STEP 0x010000000000ULL
#define MAPPED_BASE 0x3a0000000000ULL
#define SPILL_BASE  0x3f0000000000ULL

enum kind { PLAIN, POOLED, SPILLED, MANAGED, RESERVED, PHYSICAL, PINNED, REGISTERED };

struct block {
	u64 at, bytes, granules, first;
	enum kind kind;
	int device;
	u32 *list; /* granules of PHYSICAL */
};

/* What this process has; with sim_lock held. */
extern struct block *blocks;
extern u32 block_count;
struct block *block_of(u64 at); /* that an address lies in */
struct block *block_at(u64 at); /* that begins there */
void remember(struct block b);
void forget(struct block *b);

u64 total_granules(const struct gpu *gpu);
u64 granules_for(const struct gpu *gpu, u64 bytes);
i64 take_run(struct gpu *gpu, int d, u64 n);
void give_back(struct gpu *gpu, int d, u64 first, u64 n);
void in_driver(u64 ns);
