// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * faults: page faults that sleep: which page of which file the thread waits for, or that it is swapped
 * memory.
 *
 * Hooks mm_filemap_add_to_page_cache (a folio enters the page cache in the context of the thread that reads
 * it) and mm_filemap_fault (a fault on a mapped file that the page tables alone did not settle), and only
 * takes notes for a watched thread; sched_switch makes the one record per sleep, in D state. Nothing happens
 * in page faults that find what they want. Reads kernel memory only. Cost: about 0.1 us for each folio read
 * from storage or fault taken in a watched process, 0.4 us for each record, a look-up for those of others.
 *
 * Not seen: zram, and other swap that is read on the CPU without sleeping; faults that io workers take.
 * Without mm_filemap_fault a fault on a page that another thread is reading already has no file, and looks
 * like swap in a process that has any there: those records lack FLAG_FILE.
 */
#include "whyspan.bpf.h"

WHYSPAN_KINDS(faults, KIND_page_wait);

#define FLAG_FAULT 1u /* on a mapped file, for sure */
#define FLAG_READ 2u  /* the thread itself has the pages read */
#define FLAG_AGAIN 4u /* the same fault or read sleeps once more */
#define FLAG_SWAP 8u  /* a fault on no file, asleep for I/O, in a process with memory in swap */

#define UNINTERRUPTIBLE 0x2u /* TASK_UNINTERRUPTIBLE; also in TASK_KILLABLE */
#define STOPPED_STATES 0xcu  /* __TASK_STOPPED | __TASK_TRACED */
#define MM_SWAPENTS 2	     /* include/linux/mm_types_task.h, an enum without a name */
#define MODE_TYPE 0xf000
#define MODE_BLOCK 0x6000

struct faults_cfg {
	__u64 fresh_ns; /* from the note to the sleep it explains; default 2 ms */
	__u64 again_ns; /* time on the CPU between two sleeps of one fault; default 0.1 ms */
};
const volatile struct faults_cfg cfg = { .fresh_ns = 2000000, .again_ns = 100000 };

struct page_wait {
	struct whyspan_head head; /* aux = FLAG_* */
	__u64 inode;
	__u64 index;
	__u32 pages;
	__u32 dev; /* major << 20 | minor */
	__s32 syscall_nr;
	__u32 swapped; /* pages of the process in swap, to some tens; saturates */
};
WHYSPAN_EVENT(page_wait);

/* Fields that other kernels have elsewhere. */
struct folio___nr_pages {
	unsigned int _nr_pages; /* "mm: let _folio_nr_pages overlay memcg_data in first tail page" (6.15) */
} __attribute__((preserve_access_index));

struct folio___folio_nr_pages {
	unsigned int _folio_nr_pages; /* its name before */
} __attribute__((preserve_access_index));

struct page___mapping {
	struct address_space *mapping; /* before struct folio: "mm: Introduce struct folio" (5.16) */
	unsigned long index;
} __attribute__((preserve_access_index));

struct mm_rss_stat___counts {
	atomic_long_t count[4];
} __attribute__((preserve_access_index));

struct mm_struct___counts {
	struct mm_rss_stat___counts rss_stat; /* "mm: convert mm's rss stats into percpu_counter" (6.2) */
} __attribute__((preserve_access_index));

/* What a watched thread touched last. nvcsw is its count of sleeps then: it tells one stretch from the next.
 */
struct note {
	__u64 inode;
	__u64 index;
	__u64 ts_ns;
	__u64 nvcsw;
	__u64 slept_nvcsw;  /* of the sleep reported last */
	__u64 slept_run_ns; /* CPU time of the thread at it */
	__u32 pages;
	__u32 dev;
	__s32 slept_nr;
	__u32 flags;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct note);
} faults_notes SEC(".maps");

static __always_inline void take_note(const bool raw, struct address_space *mapping, __u64 index, __u32 pages,
				      __u32 flag)
{
	struct task_struct *task =
		raw ? (struct task_struct *)bpf_get_current_task() : bpf_get_current_task_btf();
	__u64 now = bpf_ktime_get_ns(), nvcsw = WHYSPAN_FIELD(raw, task, nvcsw);
	__u32 tid = bpf_get_current_pid_tgid();
	struct inode *host = BPF_CORE_READ(mapping, host);
	struct note *note, fresh = {};
	__u64 inode;
	__u32 dev;

	/* Blocks of a disk itself: the directories and tables of a file system. */
	if (!host || (BPF_CORE_READ(host, i_mode) & MODE_TYPE) == MODE_BLOCK)
		return;
	inode = BPF_CORE_READ(host, i_ino);
	dev = BPF_CORE_READ(host, i_sb, s_dev);
	note = bpf_map_lookup_elem(&faults_notes, &tid);
	if (!note) {
		if (bpf_map_update_elem(&faults_notes, &tid, &fresh, BPF_ANY))
			return;
		note = bpf_map_lookup_elem(&faults_notes, &tid);
		if (!note)
			return;
	}
	if (note->nvcsw != nvcsw || note->inode != inode || note->dev != dev) {
		note->nvcsw = nvcsw;
		note->inode = inode;
		note->dev = dev;
		note->pages = 0;
		note->flags = 0;
	}
	/* The page of the fault, else the first one read. */
	if (flag == FLAG_FAULT || !(note->flags & (FLAG_FAULT | FLAG_READ)))
		note->index = index;
	note->pages += pages;
	note->flags |= flag;
	note->ts_ns = now;
}

static __always_inline __u32 pages_of(void *folio)
{
	struct folio___nr_pages *young = folio;
	struct folio___folio_nr_pages *old = folio;
	unsigned long flags = 0;

	/* The first word of a folio or page are its flags. */
	bpf_probe_read_kernel(&flags, sizeof(flags), folio);
	if (!(flags >> bpf_core_enum_value(enum pageflags, PG_head) & 1))
		return 1;
	if (bpf_core_field_exists(young->_nr_pages))
		return BPF_CORE_READ(young, _nr_pages);
	if (bpf_core_field_exists(old->_folio_nr_pages))
		return BPF_CORE_READ(old, _folio_nr_pages);
	return 1;
}

static __always_inline int on_add(const bool raw, void *argument)
{
	struct page___mapping *page = argument;
	struct folio *folio = argument;
	struct address_space *mapping;
	__u64 index;

	if (!whyspan_is_watched(bpf_get_current_pid_tgid() >> 32))
		return 0;
	if (bpf_core_field_exists(folio->mapping)) {
		mapping = BPF_CORE_READ(folio, mapping);
		index = BPF_CORE_READ(folio, index);
	} else {
		mapping = BPF_CORE_READ(page, mapping);
		index = BPF_CORE_READ(page, index);
	}
	take_note(raw, mapping, index, pages_of(argument), FLAG_READ);
	return 0;
}

SEC("tp_btf/mm_filemap_add_to_page_cache")
int BPF_PROG(faults_add_tp, void *folio)
{
	return on_add(false, folio);
}

SEC("raw_tp/mm_filemap_add_to_page_cache")
int BPF_PROG(faults_add_raw, void *folio)
{
	return on_add(true, folio);
}

static __always_inline int on_fault(const bool raw, struct address_space *mapping, __u64 index)
{
	if (whyspan_is_watched(bpf_get_current_pid_tgid() >> 32))
		take_note(raw, mapping, index, 0, FLAG_FAULT);
	return 0;
}

SEC("tp_btf/mm_filemap_fault")
int BPF_PROG(faults_fault_tp, struct address_space *mapping, unsigned long index)
{
	return on_fault(false, mapping, index);
}

SEC("raw_tp/mm_filemap_fault")
int BPF_PROG(faults_fault_raw, struct address_space *mapping, unsigned long index)
{
	return on_fault(true, mapping, index);
}

/* The function that it is in, for kernels without (6.12). */
SEC("fentry/filemap_fault")
int BPF_PROG(faults_fault_fentry, struct vm_fault *vmf)
{
	return on_fault(false, vmf->vma->vm_file->f_mapping, vmf->pgoff);
}

SEC("kprobe/filemap_fault")
int BPF_KPROBE(faults_fault_kprobe, struct vm_fault *vmf)
{
	return on_fault(true, BPF_CORE_READ(vmf, vma, vm_file, f_mapping), BPF_CORE_READ(vmf, pgoff));
}

static __always_inline __u32 swapped_pages(struct task_struct *task)
{
	struct mm_struct *mm = BPF_CORE_READ(task, mm);
	struct mm_struct___counts *old = (void *)mm;
	__s64 count;

	if (!mm)
		return 0;
	if (bpf_core_field_exists(old->rss_stat.count))
		count = BPF_CORE_READ(old, rss_stat.count[MM_SWAPENTS].counter);
	else
		count = BPF_CORE_READ(mm, rss_stat[MM_SWAPENTS].count);
	return count <= 0 ? 0 : count > 0xffffffff ? 0xffffffff : count;
}

static __always_inline bool waits_for_io(const bool raw, struct task_struct *task)
{
	return raw ? BPF_CORE_READ_BITFIELD_PROBED(task, in_iowait) : BPF_CORE_READ_BITFIELD(task, in_iowait);
}

static __always_inline int on_switch(const bool raw, bool preempt, struct task_struct *prev, __u32 prev_state)
{
	__u32 tid, tgid, flags = 0, swapped = 0;
	struct whyspan_call call = { .nr = -2 };
	__u64 now, nvcsw, run_ns;
	struct page_wait *e;
	struct note *note;

	if (!(prev_state & UNINTERRUPTIBLE) || (prev_state & STOPPED_STATES) || preempt ||
	    (WHYSPAN_FIELD(raw, prev, flags) & (PF_KTHREAD | PF_IO_WORKER | PF_USER_WORKER)))
		return 0;
	tgid = WHYSPAN_FIELD(raw, prev, tgid);
	if (!whyspan_is_watched(tgid))
		return 0;
	if (raw)
		whyspan_find_call(prev, &call);
	else
		whyspan_read_call(prev, &call);
	tid = WHYSPAN_FIELD(raw, prev, pid);
	now = bpf_ktime_get_ns();
	/* Both were brought up to date on the way here. */
	nvcsw = WHYSPAN_FIELD(raw, prev, nvcsw);
	run_ns = WHYSPAN_FIELD(raw, prev, se.sum_exec_runtime);
	note = bpf_map_lookup_elem(&faults_notes, &tid);
	if (note) {
		if (note->nvcsw + 1 == nvcsw && now - note->ts_ns < cfg.fresh_ns)
			flags = note->flags;
		else if (note->slept_nvcsw + 1 == nvcsw && note->slept_nr == call.nr && note->flags &&
			 run_ns - note->slept_run_ns < cfg.again_ns)
			flags = (note->flags & FLAG_FAULT) | FLAG_AGAIN;
	}
	if (!flags) {
		if (call.nr != -1 || !waits_for_io(raw, prev))
			return 0;
		swapped = swapped_pages(prev);
		if (!swapped)
			return 0;
		flags = FLAG_SWAP;
		note = NULL;
	} else if (note) {
		/* In a call, what it does itself may be all: only a fault that had to read is one for sure.
		 */
		if (call.nr != -1 && (!(flags & FLAG_FAULT) || !((flags | note->flags) & FLAG_READ)))
			return 0;
		swapped = swapped_pages(prev);
	}
	e = whyspan_reserve(KIND_page_wait, now, tid, tgid, flags);
	if (e) {
		e->inode = note ? note->inode : 0;
		e->index = note ? note->index : 0;
		e->pages = note && !(flags & FLAG_AGAIN) ? note->pages : 0;
		e->dev = note ? note->dev : 0;
		e->syscall_nr = call.nr;
		e->swapped = swapped;
		whyspan_submit(e);
	}
	if (note) {
		note->slept_nvcsw = nvcsw;
		note->slept_run_ns = run_ns;
		note->slept_nr = call.nr;
	}
	return 0;
}

WHYSPAN_ON_LEAVING(faults, on_switch)

char LICENSE[] SEC("license") = "Dual BSD/GPL";
