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
#define NR_SCHED_YIELD 24
#define NR_SENDFILE 40
#define NR_SOCKET 41
#define NR_ACCEPT 43
#define NR_SENDTO 44
#define NR_RECVFROM 45
#define NR_SENDMSG 46
#define NR_RECVMSG 47
#define NR_FSYNC 74
#define NR_FDATASYNC 75
#define NR_RESTART_SYSCALL 219
#define NR_OPENAT 257
#define NR_ACCEPT4 288
#define NR_EVENTFD2 290
#define NR_EPOLL_CREATE1 291
#define NR_PIPE2 293
#define TS_COMPAT 0x0002 /* arch/x86/include/asm/thread_info.h */
#define USER_CS 0x33	 /* arch/x86/include/asm/segment.h: __USER_CS, __USER_DS */
#define USER_DS 0x2b
#elif defined(__TARGET_ARCH_arm64)
#define NR_EVENTFD2 19
#define NR_EPOLL_CREATE1 20
#define NR_OPENAT 56
#define NR_PIPE2 59
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
#define NR_SCHED_YIELD 124
#define NR_RESTART_SYSCALL 128
#define NR_SOCKET 198
#define NR_ACCEPT 202
#define NR_SENDTO 206
#define NR_RECVFROM 207
#define NR_SENDMSG 211
#define NR_RECVMSG 212
#define NR_ACCEPT4 242
#define PSTATE_MODE 0xf /* 0 = a program's. arch/arm64/include/uapi/asm/ptrace.h: PSR_MODE_MASK */
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

#define WHYSPAN_STACK_BYTES 16384 /* THREAD_SIZE without KASAN; with 4 KiB pages on arm64 */

/*
 * The same without the kernel's own BTF, hence without bpf_task_pt_regs and without trusted pointers: the
 * registers lie at the top of the kernel stack. There they must look like those of a program, or the call
 * stays -2, unknown.
 */
static __always_inline void whyspan_find_call(struct task_struct *task, struct whyspan_call *call)
{
	void *stack = BPF_CORE_READ(task, stack);
	struct pt_regs *regs = stack + WHYSPAN_STACK_BYTES - bpf_core_type_size(struct pt_regs);

	call->nr = -2;
	if (!stack)
		return;
#if defined(__TARGET_ARCH_x86)
	if (BPF_CORE_READ(task, thread_info.status) & TS_COMPAT)
		return;
	/* "x86/fred: Reserve space for the FRED stack frame" (6.9): the registers lie 16 bytes lower there.
	 */
	if ((__u16)BPF_CORE_READ(regs, cs) != USER_CS || (__u16)BPF_CORE_READ(regs, ss) != USER_DS)
		regs = (void *)regs - 16;
	if ((__u16)BPF_CORE_READ(regs, cs) != USER_CS || (__u16)BPF_CORE_READ(regs, ss) != USER_DS)
		return;
	call->nr = (__s32)BPF_CORE_READ(regs, orig_ax);
	call->arg[0] = BPF_CORE_READ(regs, di);
	call->arg[1] = BPF_CORE_READ(regs, si);
	call->arg[2] = BPF_CORE_READ(regs, dx);
	call->arg[3] = BPF_CORE_READ(regs, r10);
#else
	if (BPF_CORE_READ(regs, pstate) & PSTATE_MODE)
		return;
	call->nr = BPF_CORE_READ(regs, syscallno);
	call->arg[0] = BPF_CORE_READ(regs, orig_x0);
	call->arg[1] = BPF_CORE_READ(regs, regs[1]);
	call->arg[2] = BPF_CORE_READ(regs, regs[2]);
	call->arg[3] = BPF_CORE_READ(regs, regs[3]);
#endif
}
