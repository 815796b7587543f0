/*
 * The simulated device: one file, mapped by every process that uses the stubs and by tests/stubs/device.py.
 *
 * Each struct is a list of S(type, name) and A(type, name, count). The list declares the struct here, and describes it
 * to Python (layout.c prints names, types and offsets), so that nothing is written twice. Times are in ns of
 * CLOCK_MONOTONIC.
 */
#pragma once
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t i32;
typedef int64_t i64;
typedef double f64;

enum {
	MAX_DEVICES = 8,
	MAX_PROCESSES = 64,
	MAX_FUNCTIONS = 512,
	MAX_GRANULES = 65536,
	MAX_RULES = 64,
	MAX_FAILS = 32,
	MAX_XIDS = 64,
	MAX_MEETINGS = 4096,
	BUCKETS = 256,
	NVLINKS = 18,
};
#define REGION_MAGIC 0x57485950414e4750ULL /* "WHYPANGP" */
#define BUCKET_NS 20000000ULL

/* What a kernel takes: the first rule whose pattern is in its name; a leading ^ ties it to the beginning. */
#define RULE_FIELDS(S, A)                                                                                    \
	A(char, pattern, 96)                                                                                 \
	S(u64, ns)                                                                                           \
	S(u64, ns_per_block)

/* A function that fails with `code`: `left` more times, or always if negative. */
#define FAIL_FIELDS(S, A)                                                                                    \
	A(char, function, 64)                                                                                \
	S(i64, left)                                                                                         \
	S(i32, code)                                                                                         \
	S(u32, reserved)

/* What a test may change while programs run. *_ns: time; *_bps: bytes per second. */
#define CONTROL_FIELDS(S, A)                                                                                 \
	S(u64, generation) /* raised after a change of rules */                                              \
	S(u64, fails_set)  /* how many entries of fails are in use */                                        \
	S(u64, kernel_ns)  /* a kernel that no rule names */                                                 \
	S(u64, launch_host_ns)                                                                               \
	S(u64, graph_launch_host_ns)                                                                         \
	S(u64, call_host_ns)      /* other calls that only enqueue */                                        \
	S(u64, launch_latency_ns) /* from the call to the earliest start on the device */                    \
	S(u64, launch_queue)      /* launches that may be unfinished before a launch waits */                \
	S(u64, h2d_bps)                                                                                      \
	S(u64, d2h_bps)                                                                                      \
	S(u64, d2d_bps)                                                                                      \
	S(u64, pageable_bps) /* staging by the host's CPU */                                                 \
	S(u64, copy_latency_ns)                                                                              \
	S(u64, alloc_host_ns)                                                                                \
	S(u64, free_host_ns)                                                                                 \
	S(u64, pin_host_ns)                                                                                  \
	S(u64, pin_host_ns_per_mib)                                                                          \
	S(u64, module_load_ns)                                                                               \
	S(u64, jit_ns_per_kernel) /* PTX only */                                                             \
	S(u64, lazy_load_ns)      /* first use of a kernel */                                                \
	S(u64, graph_instantiate_ns)                                                                         \
	S(u64, graph_instantiate_ns_per_node)                                                                \
	S(u64, nccl_ns)                                                                                      \
	S(u64, nccl_bps)                                                                                     \
	S(u64, spill) /* 1: allocations beyond the device's memory succeed, in system memory */              \
	S(f64, spill_factor)                                                                                 \
	A(struct rule, rules, MAX_RULES)                                                                     \
	A(struct fail, fails, MAX_FAILS)

/* One GPU. The first part is for tests to set, `state` is the stubs' own. */
#define GPU_FIELDS(S, A)                                                                                     \
	A(char, name, 64)                                                                                    \
	A(u8, uuid, 16)                                                                                      \
	A(char, pci, 16) /* 0000:41:00.0 */                                                                  \
	S(u64, memory_bytes)                                                                                 \
	S(u64, granule_bytes)                                                                                \
	S(f64, clock_factor) /* 1 = full speed; 0.5: kernels take twice as long */                           \
	S(f64, link_factor)  /* of the bandwidth between host and device */                                  \
	S(u64, throttle_reasons)                                                                             \
	S(u64, error)         /* sticky CUresult of every call that needs the device */                      \
	S(u64, stall_until_ns) /* nothing starts before */                                                   \
	S(u32, sm_clock_max_mhz)                                                                             \
	S(u32, mem_clock_max_mhz)                                                                            \
	S(u32, power_limit_mw)                                                                               \
	S(u32, power_idle_mw)                                                                                \
	S(u32, power_mw) /* 0: from use */                                                                   \
	S(u32, temperature_c)                                                                                \
	S(u32, pcie_gen)                                                                                     \
	S(u32, pcie_gen_max)                                                                                 \
	S(u32, pcie_width)                                                                                   \
	S(u32, pcie_width_max)                                                                               \
	S(u32, ecc_enabled)                                                                                  \
	S(u32, mig_mode)                                                                                     \
	S(u32, gpm_supported)                                                                                \
	S(u32, nvlinks)                                                                                      \
	S(u32, nvlinks_active) /* a bit each */                                                              \
	S(i32, sm_percent)     /* of GPM while busy; -1: 100 */                                              \
	A(u64, ecc_corrected, 2) /* volatile, aggregate */                                                   \
	A(u64, ecc_uncorrected, 2)                                                                           \
	S(u32, remapped_corrected)                                                                           \
	S(u32, remapped_uncorrected)                                                                         \
	S(u32, remap_pending)                                                                                \
	S(u32, remap_failed)                                                                                 \
	A(u64, nvlink_tx_kib, NVLINKS)                                                                       \
	A(u64, nvlink_rx_kib, NVLINKS)                                                                       \
	A(u64, nvlink_errors, NVLINKS)                                                                       \
	/* state */                                                                                          \
	S(u64, busy_ns)                                                                                      \
	S(u64, stretch_ns) /* the last stretch without a gap: from here ... */                               \
	S(u64, covered_ns) /* ... to here */                                                                 \
	A(u64, bucket, BUCKETS) /* number of the BUCKET_NS stretch in bucket_busy_ns */                      \
	A(u64, bucket_busy_ns, BUCKETS)                                                                      \
	A(u64, bucket_h2d_bytes, BUCKETS)                                                                    \
	A(u64, bucket_d2h_bytes, BUCKETS)                                                                    \
	A(u64, engine_end_ns, 2) /* copy engines: to the device, from it */                                  \
	A(u64, copied_bytes, 2)                                                                              \
	S(u64, used_granules)                                                                                \
	S(u64, spilled_bytes)                                                                                \
	A(u8, owner, MAX_GRANULES) /* 0 = free, else a process's slot + 1 */

/* A process that uses the device. */
#define PROC_FIELDS(S, A)                                                                                    \
	S(u32, pid)                                                                                          \
	S(u32, reserved)                                                                                     \
	A(u64, granules, MAX_DEVICES)                                                                        \
	A(u64, busy_until_ns, MAX_DEVICES)                                                                   \
	A(u64, busy_ns, MAX_DEVICES)                                                                         \
	A(u64, covered_ns, MAX_DEVICES)                                                                      \
	A(u64, window, MAX_DEVICES) /* number of the BUCKET_NS stretch that window_busy_ns is of */          \
	A(u64, window_busy_ns, MAX_DEVICES)                                                                  \
	A(u64, last_busy_ns, MAX_DEVICES) /* of the stretch before */                                        \
	A(u32, spinning, MAX_DEVICES) /* collectives that run and wait for other ranks */                    \
	S(u64, pinned_bytes)                                                                                 \
	S(u64, spilled_bytes)

#define FUNC_FIELDS(S, A)                                                                                    \
	A(char, name, 64)                                                                                    \
	S(u64, calls)                                                                                        \
	S(u64, errors) /* calls that returned neither success nor "not ready" */                             \
	S(u64, time_ns) /* from entry to return */                                                           \
	S(u64, wait_ns) /* of that, waiting for the device or for another process */

/* A call, in the ring. */
#define CALL_FIELDS(S, A)                                                                                    \
	S(u64, begin_ns)                                                                                     \
	S(u64, end_ns)                                                                                       \
	S(u64, bytes)                                                                                        \
	S(u64, stream) /* number of the stream; 1 = legacy, 2 = this thread's */                             \
	S(u32, tid)                                                                                          \
	S(u32, tgid)                                                                                         \
	S(i32, result)                                                                                       \
	S(u16, function)                                                                                     \
	S(u16, device)                                                                                       \
	S(u64, seq) /* 1 + its number among all calls; the last that is written */

#define XID_FIELDS(S, A)                                                                                     \
	S(u64, ts_ns)                                                                                        \
	S(u32, device)                                                                                       \
	S(u32, code)

/* Ranks that meet: a collective, or a send and its receive. */
#define MEETING_FIELDS(S, A)                                                                                 \
	S(u64, key) /* 0 = free */                                                                           \
	S(u64, latest_ns)                                                                                    \
	S(u32, expected)                                                                                     \
	S(u32, arrived)                                                                                      \
	S(u32, left)                                                                                         \
	S(u32, value)

#define REGION_FIELDS(S, A)                                                                                  \
	S(u64, magic)                                                                                        \
	S(u64, size)                                                                                         \
	S(u32, devices)                                                                                      \
	S(u32, ring_size) /* a power of two */                                                               \
	S(u32, lock)      /* tid that holds it */                                                            \
	S(u32, driver_lock)                                                                                  \
	S(u32, meeting_word) /* raised at each completed meeting; processes sleep on it */                   \
	S(u32, functions)                                                                                    \
	S(struct control, control)                                                                           \
	A(struct gpu, gpus, MAX_DEVICES)                                                                     \
	A(struct proc, procs, MAX_PROCESSES)                                                                 \
	A(struct func, funcs, MAX_FUNCTIONS)                                                                 \
	/* [to the device, from it, on it, on the host][pageable, pinned][synchronous, asynchronous] */       \
	A(u64, copies, 16)                                                                                   \
	A(u64, copy_bytes, 16)                                                                               \
	S(u64, kernels)        /* run, those of graphs included */                                           \
	S(u64, graph_kernels)  /* run by graphs */                                                           \
	S(u64, kernel_ns)      /* their time on the device */                                                \
	S(u64, collectives)    /* enqueued, one per rank */                                                  \
	S(u64, xid_count)                                                                                    \
	A(struct xid, xids, MAX_XIDS)                                                                        \
	A(struct meeting, meetings, MAX_MEETINGS)                                                            \
	S(u64, ring_next)

#define STRUCTS(X)                                                                                           \
	X(rule, RULE_FIELDS)                                                                                 \
	X(fail, FAIL_FIELDS)                                                                                 \
	X(control, CONTROL_FIELDS)                                                                           \
	X(gpu, GPU_FIELDS)                                                                                   \
	X(proc, PROC_FIELDS)                                                                                 \
	X(func, FUNC_FIELDS)                                                                                 \
	X(call, CALL_FIELDS)                                                                                 \
	X(xid, XID_FIELDS)                                                                                   \
	X(meeting, MEETING_FIELDS)                                                                           \
	X(region, REGION_FIELDS)

#define DECLARE_SCALAR(type, name) type name;
#define DECLARE_ARRAY(type, name, count) type name[count];
#define DECLARE(name, FIELDS)                                                                                \
	struct name {                                                                                        \
		FIELDS(DECLARE_SCALAR, DECLARE_ARRAY)                                                        \
	};
STRUCTS(DECLARE)
/* The ring of calls follows the region in the file. */
