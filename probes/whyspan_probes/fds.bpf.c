// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * fds: what a blocked read, write, fsync or poll was on.
 *
 * Hooks sched_switch: when a watched thread goes to sleep inside a call that names a descriptor, its file is
 * looked up and described. Nothing happens on calls that do not block. Reads kernel memory, and for poll the
 * first pollfd of user memory (8 bytes). Cost: about 0.4 us per such block.
 */
#include "whyspan.bpf.h"
#include "files.bpf.h"

WHYSPAN_KINDS(fds, KIND_fd_block);

struct fds_cfg {
	__u32 poll; /* 1 = report the first descriptor of a blocked poll too; default 1 */
	__u32 _pad;
};
const volatile struct fds_cfg cfg = { .poll = 1 };

struct fd_block {
	struct whyspan_head head; /* aux = enum whyspan_file_kind */
	__u64 inode;
	__u64 key;
	__s32 fd;
	__s32 syscall_nr;
	__u32 dev;
	__u16 lport;
	__u16 rport;
};
WHYSPAN_EVENT(fd_block);

static __always_inline bool names_fd(__s32 nr)
{
	switch (nr) {
	case NR_READ:
	case NR_WRITE:
	case NR_PREAD64:
	case NR_PWRITE64:
	case NR_READV:
	case NR_WRITEV:
	case NR_SENDTO:
	case NR_RECVFROM:
	case NR_SENDMSG:
	case NR_RECVMSG:
	case NR_FSYNC:
	case NR_FDATASYNC:
		return true;
	default:
		return nr == NR_POLL && cfg.poll;
	}
}

/* The descriptor that the call names, or -1. */
static __always_inline __s32 fd_of(const struct whyspan_call *call)
{
	__s32 fd = -1;

	if (call->nr != NR_POLL)
		return call->arg[0];
	if (call->arg[1])
		bpf_probe_read_user(&fd, sizeof(fd), (void *)call->arg[0]);
	return fd;
}

static __always_inline int on_switch(const bool raw, bool preempt, struct task_struct *prev, __u32 prev_state)
{
	struct whyspan_call call = { .nr = -2 };
	struct whyspan_file what = {};
	__u32 tgid = WHYSPAN_FIELD(raw, prev, tgid);
	struct fd_block *e;
	struct file *file;
	__s32 fd;

	if (!(prev_state & 0x3) || (prev_state & 0xc) ||
	    (WHYSPAN_FIELD(raw, prev, flags) & (PF_KTHREAD | PF_IO_WORKER | PF_USER_WORKER)))
		return 0;
	/* Registers are nearer than the hash of watched processes, and most blocks are on no descriptor. */
	if (raw)
		whyspan_find_call(prev, &call);
	else
		whyspan_read_call(prev, &call);
	if (!names_fd(call.nr) || !whyspan_is_watched(tgid))
		return 0;
	fd = fd_of(&call);
	if (fd < 0)
		return 0;
	file = whyspan_file_of(prev, fd);
	if (!file)
		return 0;
	whyspan_describe_file(file, &what);
	e = whyspan_reserve(KIND_fd_block, bpf_ktime_get_ns(), WHYSPAN_FIELD(raw, prev, pid), tgid,
			    what.kind);
	if (!e)
		return 0;
	e->inode = what.inode;
	e->key = what.key;
	e->fd = fd;
	e->syscall_nr = call.nr;
	e->dev = what.dev;
	e->lport = what.lport;
	e->rport = what.rport;
	whyspan_submit(e);
	return 0;
}

WHYSPAN_ON_LEAVING(fds, on_switch)

char LICENSE[] SEC("license") = "Dual BSD/GPL";
