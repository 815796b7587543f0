// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * futex: which lock a sleeping thread waits for.
 *
 * Hooks sched_switch: when a watched thread goes to sleep in futex(2), its address, operation, expected value
 * and instruction pointer are taken from the saved registers. A wait of glibc's low-level lock (FUTEX_WAIT of
 * the value 2) also reads the word where pthread_mutex_t keeps its owner, and 192 bytes of the user stack, of
 * which the first words that may be return addresses are told in a second record: libc has no frame pointers.
 * Hooks contention_begin for waits for the mmap_lock of the thread's own memory. Nothing happens on the fast
 * path of a lock, nor on calls that do not block. User memory is read without faulting. Cost: about 0.3 us
 * per such sleep; other locks of the kernel that are contended leave after one comparison.
 */
#include "whyspan.bpf.h"

WHYSPAN_KINDS(futex, KIND_futex_wait, KIND_futex_from, KIND_mmap_lock_wait);

struct futex_cfg {
	__u32 from; /* 1 = words of the stack of a thread that waits for a mutex; default 1 */
	__u32 _pad;
};
const volatile struct futex_cfg cfg = { .from = 1 };

struct futex_wait {
	struct whyspan_head head; /* aux = operation without flags | FLAG_ */
	__u64 uaddr;
	__u64 ip;
	__u32 val;
	__u32 owner; /* of a pthread_mutex_t, in its PID namespace; of other locks a stray word; 0 not read */
	__u64 _pad;
};
WHYSPAN_EVENT(futex_wait);

struct futex_from {
	struct whyspan_head head; /* aux = number of words */
	__u64 word0;
	__u64 word1;
	__u64 word2;
	__u64 word3;
};
WHYSPAN_EVENT(futex_from);

struct mmap_lock_wait {
	struct whyspan_head head; /* aux = 1 to read, 2 to write */
	__u32 owner_tid;	  /* writer that has it, or last reader; 0 none */
	__u32 owner_tgid;
	__u64 key;
	__u64 _pad[2];
};
WHYSPAN_EVENT(mmap_lock_wait);

/* include/uapi/linux/futex.h: macros, not in BTF. */
#define FUTEX_WAIT 0
#define FUTEX_LOCK_PI 6
#define FUTEX_CMD_MASK 0x7f
#define FLAG_TIMED 0x100
#define MUTEX_CONTENDED 2 /* glibc, nptl/lowlevellock.h */

#define LCB_F_READ 2		 /* include/trace/events/lock.h; alone: a rw_semaphore's reader */
#define LCB_F_WRITE 4		 /* or writer */
#define RWSEM_OWNER_FLAGS 0x7ULL /* kernel/locking/rwsem.c: RWSEM_OWNER_FLAGS_MASK and what is kept free */

#if defined(__TARGET_ARCH_x86)
#define NR_FUTEX 202
#define USER_IP ip
#else
#define NR_FUTEX 98
#define USER_IP pc
#endif

#define STACK_WORDS 24
#define SAME_LIBRARY (2ULL << 20) /* about libc's size: nearer words are its own */
#define SAME_STACK (64ULL << 20)

/* Between two programs of one CPU at sched_switch nothing else runs there: no other program shares this. */
struct futex_scratch {
	__u64 word[STACK_WORDS];
};
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct futex_scratch);
} futex_stack SEC(".maps");

static __always_inline __u64 apart(__u64 a, __u64 b)
{
	return a > b ? a - b : b - a;
}

/* The first words of the stack that may be return addresses outside the library that waits. */
static __always_inline void tell_from(__u64 now, __u32 tid, __u32 tgid, __u64 ip, __u64 sp)
{
	__u32 zero = 0, count = 0;
	struct futex_scratch *stack = bpf_map_lookup_elem(&futex_stack, &zero);
	struct futex_from *e;
	__u64 word;

	if (!stack || !sp || bpf_probe_read_user(stack, sizeof(*stack), (void *)sp))
		return;
	e = whyspan_reserve(KIND_futex_from, now, tid, tgid, 0);
	if (!e)
		return;
	e->word0 = e->word1 = e->word2 = e->word3 = 0;
#pragma unroll
	for (int i = 0; i < STACK_WORDS; i++) {
		word = stack->word[i];
		if (word < 0x400000 || word >> 47 || apart(word, sp) < SAME_STACK ||
		    apart(word, ip) < SAME_LIBRARY)
			continue;
		if (count == 0)
			e->word0 = word;
		else if (count == 1)
			e->word1 = word;
		else if (count == 2)
			e->word2 = word;
		else if (count == 3)
			e->word3 = word;
		count++;
	}
	e->head.aux = count < 4 ? count : 4;
	whyspan_submit(e);
}

static __always_inline void tell_wait(const bool raw, struct task_struct *prev,
				      const struct whyspan_call *call, __u64 ip, __u64 sp)
{
	__u32 tid = WHYSPAN_FIELD(raw, prev, pid), tgid = WHYSPAN_FIELD(raw, prev, tgid);
	__u32 op = call->arg[1] & FUTEX_CMD_MASK, val = call->arg[2], owner = 0;
	bool mutex = (op == FUTEX_WAIT && val == MUTEX_CONTENDED) || op == FUTEX_LOCK_PI;
	__u64 now = bpf_ktime_get_ns();
	struct futex_wait *e;

	if (mutex && bpf_probe_read_user(&owner, sizeof(owner), (void *)(call->arg[0] + 8)))
		owner = 0;
	e = whyspan_reserve(KIND_futex_wait, now, tid, tgid, op | (call->arg[3] ? FLAG_TIMED : 0));
	if (!e)
		return;
	e->uaddr = call->arg[0];
	e->ip = ip;
	e->val = val;
	e->owner = owner;
	e->_pad = 0;
	whyspan_submit(e);
	if (mutex && cfg.from)
		tell_from(now, tid, tgid, ip, sp);
}

static __always_inline int on_switch(const bool raw, bool preempt, struct task_struct *prev, __u32 prev_state)
{
	struct whyspan_call call = { .nr = -2 };

	if (!(prev_state & 0x1) || (prev_state & 0xc) ||
	    (WHYSPAN_FIELD(raw, prev, flags) & (PF_KTHREAD | PF_IO_WORKER | PF_USER_WORKER)))
		return 0;
	if (raw)
		whyspan_find_call(prev, &call);
	else
		whyspan_read_call(prev, &call);
	/* A wait with a time-out that a signal or a freezer interrupted goes on as restart_syscall, same
	 * arguments. */
	if ((call.nr != NR_FUTEX && call.nr != NR_RESTART_SYSCALL) ||
	    !whyspan_is_watched(WHYSPAN_FIELD(raw, prev, tgid)))
		return 0;
	if (raw) {
		/* They were found, or there would be no call. */
		struct pt_regs *regs =
			BPF_CORE_READ(prev, stack) + WHYSPAN_STACK_BYTES - bpf_core_type_size(struct pt_regs);

#if defined(__TARGET_ARCH_x86)
		if ((__u16)BPF_CORE_READ(regs, cs) != USER_CS)
			regs = (void *)regs - 16; /* as whyspan_find_call does */
#endif
		tell_wait(raw, prev, &call, BPF_CORE_READ(regs, USER_IP), BPF_CORE_READ(regs, sp));
	} else {
		struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(prev);

		tell_wait(raw, prev, &call, regs->USER_IP, regs->sp);
	}
	return 0;
}

WHYSPAN_ON_LEAVING(futex, on_switch)

static __always_inline int on_contention(const bool raw, __u64 lock, __u32 flags)
{
	struct task_struct *task, *owner;
	struct rw_semaphore *sem;
	struct mmap_lock_wait *e;
	struct mm_struct *mm;
	__u64 id, held;

	/* Spinning locks, mutexes and the rest have other flags: all but a few leave here. */
	if (flags != LCB_F_READ && flags != LCB_F_WRITE)
		return 0;
	id = bpf_get_current_pid_tgid();
	if (!whyspan_is_watched(id >> 32))
		return 0;
	task = (struct task_struct *)bpf_get_current_task();
	mm = BPF_CORE_READ(task, mm);
	if (!mm || lock != (__u64)mm + bpf_core_field_offset(struct mm_struct, mmap_lock))
		return 0;
	sem = (struct rw_semaphore *)lock;
	held = BPF_CORE_READ(sem, owner.counter) & ~RWSEM_OWNER_FLAGS;
	owner = (struct task_struct *)held;
	e = whyspan_reserve(KIND_mmap_lock_wait, bpf_ktime_get_ns(), (__u32)id, id >> 32, flags / LCB_F_READ);
	if (!e)
		return 0;
	e->owner_tid = owner ? BPF_CORE_READ(owner, pid) : 0;
	e->owner_tgid = owner ? BPF_CORE_READ(owner, tgid) : 0;
	e->key = whyspan_key(sem);
	e->_pad[0] = e->_pad[1] = 0;
	whyspan_submit(e);
	return 0;
}

/* "locking: Add lock contention tracepoints" (5.19) */
SEC("tp_btf/contention_begin")
int BPF_PROG(futex_contention_tp, void *lock, unsigned int flags)
{
	return on_contention(false, (__u64)lock, flags);
}

SEC("raw_tp/contention_begin")
int BPF_PROG(futex_contention_raw, void *lock, unsigned int flags)
{
	return on_contention(true, (__u64)lock, flags);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
