/* What libnccl tells libcuda of a kernel that meets other ranks. */
#pragma once
#include "region.h"

/* The ranks that a kernel of NCCL meets. */
struct meeting_arg {
	u64 key, bytes; /* that a rank has to move */
	u64 *counter; /* meetings of this key so far, in this process */
	u32 expected;
};

typedef void next_meetings(const struct meeting_arg *meetings, u32 n);

static inline u64 mixed(u64 x)
{
	x ^= x >> 30;
	x *= 0xbf58476d1ce4e5b9ULL;
	x ^= x >> 27;
	x *= 0x94d049bb133111ebULL;
	return (x ^ (x >> 31)) | 1;
}
