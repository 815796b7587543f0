// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * edges: which thread wrote what another read, through an eventfd or a pipe.
 *
 * Hooks the entry and exit of write and writev, and the exit of read and readv, at the functions of these
 * calls (fentry, fexit: other calls pay nothing), or else by one tracepoint per call: other calls of the host
 * pay 12 ns for it, these 64 ns; or else by kprobes and kretprobes, which may lose returns: the kernel
 * follows a bounded number at a time, and whoever in the host waits in a read has one. One that is lost is
 * counted when its thread makes the next such call. Writes are stamped at entry, reads at exit, so that an
 * edge never points backwards. A write to an eventfd is reported at its entry, as if it could not fail. Reads
 * kernel memory only: no data.
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
	__u16 type;
	__u16 nr; /* a return is of the same call, or the call's own was lost */
	__s32 fd;
};

/* Calls in progress by tid: system calls do not nest. Reads are only where their exits may be lost. The least
 * recently used goes when a thread dies in its call. */
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

static __always_inline __u32 kind_of(__u16 nr)
{
	return nr == NR_READ || nr == NR_READV ? KIND_edge_read : KIND_edge_write;
}

/* Where returns may be lost: one that has not come by the next call never will. */
static __always_inline void count_lost(__u32 tid)
{
	struct pending *p = bpf_map_lookup_elem(&edges_pending, &tid);
	__u16 nr;

	if (!p)
		return;
	nr = p->nr;
	bpf_map_delete_elem(&edges_pending, &tid);
	whyspan_drop(kind_of(nr));
}

static __noinline int enter_write(__u64 fd, __s32 nr, bool lossy)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tgid = id >> 32, tid = id;
	struct pending p = { .fd = fd, .nr = nr };

	if (!whyspan_is_watched(tgid))
		return 0;
	if (lossy)
		count_lost(tid);
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
	if (!p || p->nr != nr)
		return 0;
	write = *p;
	bpf_map_delete_elem(&edges_pending, &tid);
	if (ret > 0)
		submit_write(&write, id, ret, bpf_ktime_get_ns(), nr);
	return 0;
}

static __always_inline void submit_read(__u64 id, __u32 type, __u64 key, __s64 bytes, __s32 fd, __s32 nr)
{
	struct edge_read *e = whyspan_reserve(KIND_edge_read, bpf_ktime_get_ns(), (__u32)id, id >> 32, type);

	if (!e)
		return;
	e->key = key;
	e->duration_ns = 0;
	e->bytes = bytes;
	e->fd = fd;
	e->syscall_nr = nr;
	whyspan_submit(e);
}

static __noinline int exit_read_of(__u64 fd, long ret, __s32 nr)
{
	__u64 id = bpf_get_current_pid_tgid(), key = 0;
	__u32 type;

	if (ret <= 0 || !whyspan_is_watched(id >> 32))
		return 0;
	type = edge_of(fd, &key);
	if (type)
		submit_read(id, type, key, ret, fd, nr);
	return 0;
}

static __noinline int exit_read(long ret, __s32 nr)
{
	struct whyspan_call call = { .nr = -2 };

	if (ret <= 0 || !whyspan_is_watched(bpf_get_current_pid_tgid() >> 32))
		return 0;
	whyspan_current_call(&call);
	return call.nr < 0 ? 0 : exit_read_of(call.arg[0], ret, nr);
}

/* By kprobes, a read is noted at its entry too: else nobody would know that its return was lost. */
static __noinline int enter_read_lossy(__u64 fd, __s32 nr)
{
	struct pending p = { .fd = fd, .nr = nr };
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tid = id;

	if (!whyspan_is_watched(id >> 32))
		return 0;
	count_lost(tid);
	p.type = edge_of(fd, &p.key);
	if (p.type)
		bpf_map_update_elem(&edges_pending, &tid, &p, BPF_ANY);
	return 0;
}

static __noinline int exit_read_lossy(long ret, __s32 nr)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct pending *p, read;
	__u32 tid = id;

	if (!whyspan_is_watched(id >> 32))
		return 0;
	p = bpf_map_lookup_elem(&edges_pending, &tid);
	if (!p || p->nr != nr)
		return 0;
	read = *p;
	bpf_map_delete_elem(&edges_pending, &tid);
	if (ret > 0)
		submit_read(id, read.type, read.key, ret, read.fd, nr);
	return 0;
}

#define WRITES(call, number)                                                                                 \
	SEC("tracepoint/syscalls/sys_enter_" #call)                                                          \
	int edges_enter_##call(struct trace_event_raw_sys_enter *ctx)                                        \
	{                                                                                                    \
		return enter_write(ctx->args[0], ctx->id, false);                                            \
	}                                                                                                    \
	SEC("tracepoint/syscalls/sys_exit_" #call)                                                           \
	int edges_exit_##call(struct trace_event_raw_sys_exit *ctx)                                          \
	{                                                                                                    \
		return exit_write(ctx->ret, ctx->id);                                                        \
	}                                                                                                    \
	SEC("fentry/" WHYSPAN_SYSCALL #call)                                                                 \
	int BPF_PROG(edges_fentry_##call, struct pt_regs *regs)                                              \
	{                                                                                                    \
		return enter_write(WHYSPAN_ARGUMENT1(regs), number, false);                                  \
	}                                                                                                    \
	SEC("fexit/" WHYSPAN_SYSCALL #call)                                                                  \
	int BPF_PROG(edges_fexit_##call, struct pt_regs *regs, long ret)                                     \
	{                                                                                                    \
		return exit_write(ret, number);                                                              \
	}                                                                                                    \
	SEC("ksyscall/" #call)                                                                               \
	int edges_ksyscall_##call(struct pt_regs *ctx)                                                       \
	{                                                                                                    \
		return enter_write(WHYSPAN_KSYSCALL_ARGUMENT1(ctx), number, true);                           \
	}                                                                                                    \
	SEC("kretsyscall/" #call)                                                                            \
	int edges_kretsyscall_##call(struct pt_regs *ctx)                                                    \
	{                                                                                                    \
		return exit_write(PT_REGS_RC(ctx), number);                                                  \
	}
#define READS(call, number)                                                                                  \
	SEC("tracepoint/syscalls/sys_exit_" #call)                                                           \
	int edges_exit_##call(struct trace_event_raw_sys_exit *ctx)                                          \
	{                                                                                                    \
		return exit_read(ctx->ret, ctx->id);                                                         \
	}                                                                                                    \
	SEC("fexit/" WHYSPAN_SYSCALL #call)                                                                  \
	int BPF_PROG(edges_fexit_##call, struct pt_regs *regs, long ret)                                     \
	{                                                                                                    \
		return exit_read_of(WHYSPAN_ARGUMENT1(regs), ret, number);                                   \
	}                                                                                                    \
	SEC("ksyscall/" #call)                                                                               \
	int edges_ksyscall_##call(struct pt_regs *ctx)                                                       \
	{                                                                                                    \
		return enter_read_lossy(WHYSPAN_KSYSCALL_ARGUMENT1(ctx), number);                            \
	}                                                                                                    \
	SEC("kretsyscall/" #call)                                                                            \
	int edges_kretsyscall_##call(struct pt_regs *ctx)                                                    \
	{                                                                                                    \
		return exit_read_lossy(PT_REGS_RC(ctx), number);                                             \
	}

WRITES(write, NR_WRITE)
WRITES(writev, NR_WRITEV)
READS(read, NR_READ)
READS(readv, NR_READV)

char LICENSE[] SEC("license") = "Dual BSD/GPL";
