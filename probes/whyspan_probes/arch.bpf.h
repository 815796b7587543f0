/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What differs between CPU architectures: where a blocked task keeps its system call, and the numbers of the
 * calls that we read. x86-64 is built and tested; arm64 is designed from its headers only.
 */
#pragma once

struct whyspan_call {
	__s32 nr; /* >= 0 system call; -1 page fault; -2 not applicable */
	__u32 _pad;
	__u64 arg[4];
};

#if defined(__TARGET_ARCH_x86)
#define NR_READ 0
#define NR_WRITE 1
#define NR_POLL 7
#define NR_PREAD64 17
#define NR_PWRITE64 18
#define NR_READV 19
#define NR_WRITEV 20
#define NR_SENDFILE 40
#define NR_SENDTO 44
#define NR_RECVFROM 45
#define NR_SENDMSG 46
#define NR_RECVMSG 47
#define NR_FSYNC 74
#define NR_FDATASYNC 75
#define NR_RESTART_SYSCALL 219
#define TS_COMPAT 0x0002 /* arch/x86/include/asm/thread_info.h */
#elif defined(__TARGET_ARCH_arm64)
#define NR_READ 63
#define NR_WRITE 64
#define NR_READV 65
#define NR_WRITEV 66
#define NR_PREAD64 67
#define NR_PWRITE64 68
#define NR_SENDFILE 71
#define NR_POLL 73
#define NR_FSYNC 82
#define NR_FDATASYNC 83
#define NR_RESTART_SYSCALL 128
#define NR_SENDTO 206
#define NR_RECVFROM 207
#define NR_SENDMSG 211
#define NR_RECVMSG 212
#else
#error "unsupported architecture"
#endif

/*
 * Read the system call that `task` is in from its saved registers. Sound only for a task inside the kernel.
 * `task` must be a pointer that the verifier trusts: its fields are then plain loads, a tenth of the cost of
 * a probe read.
 */
static __always_inline void whyspan_read_call(struct task_struct *task, struct whyspan_call *call)
{
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(task);

#if defined(__TARGET_ARCH_x86)
	if (task->thread_info.status & TS_COMPAT) {
		call->nr = -2;
		return;
	}
	call->nr = (__s32)regs->orig_ax;
	call->arg[0] = regs->di;
	call->arg[1] = regs->si;
	call->arg[2] = regs->dx;
	call->arg[3] = regs->r10;
#else
	call->nr = regs->syscallno;
	call->arg[0] = regs->orig_x0;
	call->arg[1] = regs->regs[1];
	call->arg[2] = regs->regs[2];
	call->arg[3] = regs->regs[3];
#endif
}
