// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * edges: which thread wrote what another read, through an eventfd or a pipe.
 *
 * Hooks the entry and exit of write and writev, and the exit of read and readv, one tracepoint per call:
 * other calls of the host pay 12 ns for it, these 64 ns. Writes are stamped at entry, reads at exit, so that
 * an edge never points backwards. A write to an eventfd is reported at its entry, as if it could not fail.
 * Reads kernel memory only: no data.
 */
#include "whyspan.bpf.h"
#include "files.bpf.h"

WHYSPAN_KINDS(edges, KIND_edge_write, KIND_edge_read);

struct edges_cfg {
	__u32 pipes; /* 1 = pipes too, not only eventfds; default 1 */
	__u32 _pad;
};
const volatile struct edges_cfg cfg = { .pipes = 1 };

struct edge_write {
	struct whyspan_head head; /* aux: 1 eventfd, 2 pipe */
	__u64 key;
	__u64 duration_ns;
	__s64 bytes;
	__s32 fd;
	__s32 syscall_nr;
};
WHYSPAN_EVENT(edge_write);

struct edge_read {
	struct whyspan_head head;
	__u64 key;
	__u64 duration_ns;
	__s64 bytes;
	__s32 fd;
	__s32 syscall_nr;
};
WHYSPAN_EVENT(edge_read);

#define EDGE_EVENTFD 1
#define EDGE_PIPE 2

struct pending {
	__u64 key;
	__u64 ts_ns;
	__u32 type;
	__s32 fd;
};

/* Writes in progress by tid; the least recently used goes when a thread dies in its call. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, __u32);
	__type(value, struct pending);
} edges_pending SEC(".maps");

/* An eventfd's operations, learnt from the first one seen: one read then tells what five did. */
__u64 edges_eventfd_ops;

static __always_inline __u32 edge_of(__u32 fd, __u64 *key)
{
	struct file *file = whyspan_file_of(whyspan_current(), fd);
	struct inode *inode;
	__u64 ops;
	__u16 mode;

	if (!file)
		return 0;
	ops = (__u64)BPF_CORE_READ(file, f_op);
	if (!ops || ops != edges_eventfd_ops) {
		inode = BPF_CORE_READ(file, f_inode);
		mode = BPF_CORE_READ(inode, i_mode) & S_IFMT;
		if (mode == S_IFIFO && cfg.pipes) {
			*key = whyspan_key(BPF_CORE_READ(inode, i_pipe));
			return EDGE_PIPE;
		}
		if (mode || whyspan_anon_kind(file) != FILE_EVENTFD)
			return 0;
		edges_eventfd_ops = ops;
	}
	*key = whyspan_key(BPF_CORE_READ(file, private_data));
	return EDGE_EVENTFD;
}

static __always_inline void submit_write(const struct pending *write, __u64 id, __s64 bytes, __u64 end_ns,
					 __s32 nr)
{
	struct edge_write *e =
		whyspan_reserve(KIND_edge_write, write->ts_ns, (__u32)id, id >> 32, write->type);

	if (!e)
		return;
	e->key = write->key;
	e->duration_ns = end_ns - write->ts_ns;
	e->bytes = bytes;
	e->fd = write->fd;
	e->syscall_nr = nr;
	whyspan_submit(e);
}

static __noinline int enter_write(__u64 fd, __s32 nr)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tgid = id >> 32, tid = id;
	struct pending p = { .fd = fd };

	if (!whyspan_is_watched(tgid))
		return 0;
	p.type = edge_of(fd, &p.key);
	if (!p.type)
		return 0;
	p.ts_ns = bpf_ktime_get_ns();
	/* A write to an eventfd ends at once, unless 2^64 - 2 are in it: it need not be looked for at its
	 * exit. */
	if (p.type == EDGE_EVENTFD)
		submit_write(&p, id, 8, p.ts_ns, nr);
	else
		bpf_map_update_elem(&edges_pending, &tid, &p, BPF_ANY);
	return 0;
}

static __noinline int exit_write(long ret, __s32 nr)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tgid = id >> 32, tid = id;
	struct pending *p, write;

	if (!whyspan_is_watched(tgid))
		return 0;
	p = bpf_map_lookup_elem(&edges_pending, &tid);
	if (!p)
		return 0;
	write = *p;
	bpf_map_delete_elem(&edges_pending, &tid);
	if (ret > 0)
		submit_write(&write, id, ret, bpf_ktime_get_ns(), nr);
	return 0;
}

static __noinline int exit_read(long ret, __s32 nr)
{
	__u64 id = bpf_get_current_pid_tgid(), key = 0;
	struct whyspan_call call = { .nr = -2 };
	__u32 tgid = id >> 32, type;
	struct edge_read *e;

	if (ret <= 0 || !whyspan_is_watched(tgid))
		return 0;
	whyspan_current_call(&call);
	type = edge_of(call.arg[0], &key);
	if (!type)
		return 0;
	e = whyspan_reserve(KIND_edge_read, bpf_ktime_get_ns(), (__u32)id, tgid, type);
	if (!e)
		return 0;
	e->key = key;
	e->duration_ns = 0;
	e->bytes = ret;
	e->fd = call.arg[0];
	e->syscall_nr = nr;
	whyspan_submit(e);
	return 0;
}

#define ENTER_WRITE(call)                                                                                    \
	SEC("tracepoint/syscalls/sys_enter_" #call)                                                          \
	int edges_enter_##call(struct trace_event_raw_sys_enter *ctx)                                        \
	{                                                                                                    \
		return enter_write(ctx->args[0], ctx->id);                                                   \
	}
#define EXIT(call, function)                                                                                 \
	SEC("tracepoint/syscalls/sys_exit_" #call)                                                           \
	int edges_exit_##call(struct trace_event_raw_sys_exit *ctx)                                          \
	{                                                                                                    \
		return function(ctx->ret, ctx->id);                                                          \
	}

ENTER_WRITE(write)
ENTER_WRITE(writev)
EXIT(write, exit_write)
EXIT(writev, exit_write)
EXIT(read, exit_read)
EXIT(readv, exit_read)

char LICENSE[] SEC("license") = "Dual BSD/GPL";
