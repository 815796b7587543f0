/* The part of NVML's ABI that the stub speaks. */
#pragma once
#include "stub.h"

#include <stdio.h>
#include <string.h>

typedef int nvmlReturn_t;
typedef struct gpu *nvmlDevice_t;

enum {
	NVML_SUCCESS = 0,
	NVML_UNINITIALIZED = 1,
	NVML_INVALID_ARGUMENT = 2,
	NVML_NOT_SUPPORTED = 3,
	NVML_NOT_FOUND = 6,
	NVML_INSUFFICIENT_SIZE = 7,
	NVML_DRIVER_NOT_LOADED = 9,
	NVML_TIMEOUT = 10,
	NVML_GPU_IS_LOST = 15,
	NVML_ARGUMENT_VERSION_MISMATCH = 25,
	NVML_UNKNOWN = 999,
};

nvmlReturn_t nvml_ready(void);
/* Whether a handle is a device that answers. */
nvmlReturn_t nvml_device(nvmlDevice_t device);
int nvml_index(const struct gpu *gpu);

u64 busy_between(const struct gpu *gpu, u64 from, u64 to); /* ns with work on the device */
u64 busy_so_far(const struct gpu *gpu);
bool nvml_alive(const struct proc *p);
bool nvml_on_device(const struct proc *p, int d);
bool in_use(const struct gpu *gpu); /* a process has it open */
bool waits_for_ranks(const struct gpu *gpu);
u32 utilisation(const struct gpu *gpu);
u32 power_mw(const struct gpu *gpu);

#define OUT(pointer, value) (!(pointer) ? NVML_INVALID_ARGUMENT : (*(pointer) = (value), NVML_SUCCESS))

/* A function of NVML; `ready` says what it needs first. */
#define NVML(name, params, ready, what)                                                                      \
	EXPORT nvmlReturn_t name params                                                                      \
	{                                                                                                    \
		nvmlReturn_t r_;                                                                             \
		ENTER(#name);                                                                                \
		r_ = here.forced;                                                                            \
		if (!r_)                                                                                     \
			r_ = (ready);                                                                        \
		if (!r_)                                                                                     \
			r_ = (what);                                                                         \
		return call_end(r_, NVML_TIMEOUT);                                                           \
	}
/* One that reads values of a device. */
#define OF_DEVICE(name, params, what) NVML(name, params, nvml_device(device), what)
