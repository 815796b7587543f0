// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * descriptors: calls that failed because the process, or the host, has no descriptor left (EMFILE, ENFILE).
 *
 * The kernel has no tracepoint where a descriptor is refused, so the exits of the calls that make one are
 * hooked, each on its own: by fexit (other calls of the host pay nothing), or else by tracepoint (they pay
 * 12 ns, these 64 ns, one comparison if they succeed), or else by kretprobe, which may lose returns.
 * A loop that tries again and again is told once in quiet_us and call, with the number of refusals between.
 * Reads kernel memory only: the limit. What io_uring opens or accepts is not seen.
 */
#include "whyspan.bpf.h"

WHYSPAN_KINDS(descriptors, KIND_descriptor_refused);

struct descriptors_cfg {
	__u32 quiet_us; /* refusals of a process by the same call are told so far apart; default 10000 */
	__u32 _pad;
};
const volatile struct descriptors_cfg cfg = { .quiet_us = 10000 };

#define ENFILE 23
#define EMFILE 24
#define RLIMIT_NOFILE 7 /* include/uapi/asm-generic/resource.h */

struct descriptor_refused {
	struct whyspan_head head; /* aux = errno */
	__u64 limit;
	__s32 syscall_nr;
	__u32 times;
	__u64 _pad[2];
};
WHYSPAN_EVENT(descriptor_refused);

struct told {
	__u64 ts_ns;
	__u32 untold;
	__u32 _pad;
};

/* By process and call: when it was last told. A lost entry is told once too often. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, __u64);
	__type(value, struct told);
} descriptors_told SEC(".maps");

static __noinline int refused(__s32 error, __s32 nr)
{
	__u64 id = bpf_get_current_pid_tgid(), now, key;
	struct descriptor_refused *e;
	struct told fresh = {}, *told;
	__u32 tgid = id >> 32, times = 1;

	if (!whyspan_is_watched(tgid))
		return 0;
	now = bpf_ktime_get_ns();
	key = (__u64)tgid << 32 | (__u32)nr;
	told = bpf_map_lookup_elem(&descriptors_told, &key);
	if (told && now - told->ts_ns < cfg.quiet_us * 1000ULL) {
		__sync_fetch_and_add(&told->untold, 1);
		return 0;
	}
	if (told)
		times += told->untold;
	fresh.ts_ns = now;
	bpf_map_update_elem(&descriptors_told, &key, &fresh, BPF_ANY);
	e = whyspan_reserve(KIND_descriptor_refused, now, (__u32)id, tgid, error);
	if (!e)
		return 0;
	e->limit = BPF_CORE_READ(whyspan_current(), signal, rlim[RLIMIT_NOFILE].rlim_cur);
	e->syscall_nr = nr;
	e->times = times;
	e->_pad[0] = e->_pad[1] = 0;
	whyspan_submit(e);
	return 0;
}

static __always_inline int on_exit(long ret, __s32 nr)
{
	return ret == -EMFILE || ret == -ENFILE ? refused(-ret, nr) : 0;
}

#define EXIT(call, number)                                                                                   \
	SEC("tracepoint/syscalls/sys_exit_" #call)                                                           \
	int descriptors_exit_##call(struct trace_event_raw_sys_exit *ctx)                                    \
	{                                                                                                    \
		return on_exit(ctx->ret, ctx->id);                                                           \
	}                                                                                                    \
	SEC("fexit/" WHYSPAN_SYSCALL #call)                                                                  \
	int BPF_PROG(descriptors_fexit_##call, struct pt_regs *regs, long ret)                               \
	{                                                                                                    \
		return on_exit(ret, number);                                                                 \
	}                                                                                                    \
	SEC("kretsyscall/" #call)                                                                            \
	int descriptors_kretsyscall_##call(struct pt_regs *ctx)                                              \
	{                                                                                                    \
		return on_exit(PT_REGS_RC(ctx), number);                                                     \
	}

EXIT(accept, NR_ACCEPT)
EXIT(accept4, NR_ACCEPT4)
EXIT(socket, NR_SOCKET)
EXIT(openat, NR_OPENAT)
EXIT(pipe2, NR_PIPE2)
EXIT(eventfd2, NR_EVENTFD2)
EXIT(epoll_create1, NR_EPOLL_CREATE1)

char LICENSE[] SEC("license") = "Dual BSD/GPL";
