// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * block_io: latency of block requests, with device and issuer, and whose dirty data the kernel writes back.
 *
 * Hooks block_rq_issue and block_rq_complete. A request is recorded when a watched process issued it, or when
 * it took longer than a threshold whoever issued it: a busy neighbour on the same disk must be nameable.
 * Write-back is issued by kworkers and shows as theirs. Whose data that was tell, where the kernel has them,
 * writeback_single_inode and jbd2_submit_inode_data (a file, once for some MB of it) and balance_dirty_pages
 * (a process that is made to wait because it dirties more than is written). Cost: about 0.2 us per request of
 * the host; the others come a few times a second on a busy disk. A file's name is read without a lock: of one
 * that is renamed at that moment it may be wrong.
 */
#include "whyspan.bpf.h"

WHYSPAN_KINDS(block_io, KIND_block_done, KIND_file_flush, KIND_dirty_pause);

struct block_io_cfg {
	__u64 slow_ns;	   /* unwatched requests at least this slow are recorded; default 1 ms; 0 = all */
	__u64 flush_pages; /* files of which fewer pages are written back are not; default 64 */
};
const volatile struct block_io_cfg cfg = { .slow_ns = 1000000, .flush_pages = 64 };

struct block_done {
	struct whyspan_head
		head; /* subject: the issuer; aux: 1 write, 2 sync, 4 flush, 8 issued by a kernel thread */
	__u64 sector;
	__u64 issue_ns;
	__u64 latency_ns;
	__u32 dev; /* major << 20 | minor */
	__u32 bytes;
};
WHYSPAN_EVENT(block_done);

struct file_flush {
	struct whyspan_head
		head; /* subject: who wrote it; aux: 1 by the journal's commit, 2 by a kernel thread */
	__u64 inode;
	__u32 pages;   /* written this time; 0 not known */
	__u32 dev;     /* of the file system */
	char file[16]; /* its name, cut */
};
WHYSPAN_EVENT(file_flush);

struct dirty_pause {
	struct whyspan_head head; /* subject: who is made to wait */
	__u32 dev;		  /* of the disk */
	__u32 pages;		  /* that it dirtied since its last pause */
	char comm[16];
	__u64 _pad;
};
WHYSPAN_EVENT(dirty_pause);

/* include/linux/blk_types.h; macros, not in BTF */
#define REQ_OP_MASK 0xff
#define REQ_OP_WRITE 1
#define REQ_OP_FLUSH 2
#define REQ_SYNC (1u << 11)

struct issue {
	__u64 ts_ns;
	__u32 tid;
	__u32 tgid;
	__u32 bytes;
	__u16 watched;
	__u16 kthread;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, struct issue);
} block_io_inflight SEC(".maps");

static __always_inline int on_issue(const bool raw, struct request *rq)
{
	__u64 id = bpf_get_current_pid_tgid(), key = whyspan_key(rq);
	struct task_struct *task;
	struct issue issue = {
		.ts_ns = bpf_ktime_get_ns(),
		.tid = id,
		.tgid = id >> 32,
		.bytes = BPF_CORE_READ(rq, __data_len),
	};

	issue.watched = whyspan_is_watched(issue.tgid);
	task = raw ? (struct task_struct *)bpf_get_current_task() : bpf_get_current_task_btf();
	issue.kthread = !!(WHYSPAN_FIELD(raw, task, flags) & PF_KTHREAD);
	bpf_map_update_elem(&block_io_inflight, &key, &issue, BPF_ANY);
	return 0;
}

static __always_inline int on_complete(struct request *rq)
{
	__u64 key = whyspan_key(rq), now, latency;
	struct issue *found, issue;
	struct block_done *e;
	struct gendisk *disk;
	__u32 flags, aux;

	found = bpf_map_lookup_elem(&block_io_inflight, &key);
	if (!found)
		return 0;
	issue = *found;
	bpf_map_delete_elem(&block_io_inflight, &key);
	now = bpf_ktime_get_ns();
	latency = now - issue.ts_ns;
	if (!issue.watched && latency < cfg.slow_ns)
		return 0;
	flags = BPF_CORE_READ(rq, cmd_flags);
	aux = ((flags & REQ_OP_MASK) == REQ_OP_WRITE ? 1 : 0) | (flags & REQ_SYNC ? 2 : 0) |
	      ((flags & REQ_OP_MASK) == REQ_OP_FLUSH ? 4 : 0) | (issue.kthread ? 8 : 0);
	e = whyspan_reserve(KIND_block_done, now, issue.tid, issue.tgid, aux);
	if (!e)
		return 0;
	disk = BPF_CORE_READ(rq, q, disk);
	e->sector = BPF_CORE_READ(rq, __sector);
	e->issue_ns = issue.ts_ns;
	e->latency_ns = latency;
	e->dev = disk ? (__u32)BPF_CORE_READ(disk, major) << 20 | BPF_CORE_READ(disk, first_minor) : 0;
	e->bytes = issue.bytes;
	whyspan_submit(e);
	return 0;
}

SEC("tp_btf/block_rq_issue")
int BPF_PROG(block_io_issue_tp, struct request *rq)
{
	return on_issue(false, rq);
}

SEC("raw_tp/block_rq_issue")
int BPF_PROG(block_io_issue_raw, struct request *rq)
{
	return on_issue(true, rq);
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(block_io_complete_tp, struct request *rq)
{
	return on_complete(rq);
}

SEC("raw_tp/block_rq_complete")
int BPF_PROG(block_io_complete_raw, struct request *rq)
{
	return on_complete(rq);
}

static __always_inline int on_flush(struct inode *inode, __u64 pages, __u32 aux)
{
	__u64 id = bpf_get_current_pid_tgid(), first;
	struct task_struct *task = whyspan_current();
	const unsigned char *name = NULL;
	struct file_flush *e;
	__u64 ino = BPF_CORE_READ(inode, i_ino);
	__u32 dev = BPF_CORE_READ(inode, i_sb, s_dev);

	aux |= BPF_CORE_READ(task, flags) & PF_KTHREAD ? 2 : 0;
	e = whyspan_reserve(KIND_file_flush, bpf_ktime_get_ns(), (__u32)id, id >> 32, aux);
	if (!e)
		return 0;
	e->inode = ino;
	e->pages = pages > 0xffffffff ? 0xffffffff : pages;
	e->dev = dev;
	__builtin_memset(e->file, 0, sizeof(e->file));
	first = (__u64)BPF_CORE_READ(inode, i_dentry.first);
	if (first) {
		struct dentry *dentry = (void *)(first - bpf_core_field_offset(struct dentry, d_u.d_alias));

		name = BPF_CORE_READ(dentry, d_name.name);
		bpf_probe_read_kernel_str(e->file, sizeof(e->file), name);
	}
	whyspan_submit(e);
	return 0;
}

static __always_inline int on_ordered(struct inode *inode)
{
	if (BPF_CORE_READ(inode, i_mapping, nrpages) < cfg.flush_pages)
		return 0;
	return on_flush(inode, 0, 1);
}

static __always_inline int on_written(struct inode *inode, struct writeback_control *wbc, __u64 planned)
{
	__s64 left = BPF_CORE_READ(wbc, nr_to_write);

	if ((__s64)planned - left < (__s64)cfg.flush_pages)
		return 0;
	return on_flush(inode, planned - left, 0);
}

SEC("tp_btf/writeback_single_inode")
int BPF_PROG(block_io_written_tp, struct inode *inode, struct writeback_control *wbc, unsigned long planned)
{
	return on_written(inode, wbc, planned);
}

SEC("raw_tp/writeback_single_inode")
int BPF_PROG(block_io_written_raw, struct inode *inode, struct writeback_control *wbc, unsigned long planned)
{
	return on_written(inode, wbc, planned);
}

SEC("tp_btf/jbd2_submit_inode_data")
int BPF_PROG(block_io_ordered_tp, struct inode *inode)
{
	return on_ordered(inode);
}

SEC("raw_tp/jbd2_submit_inode_data")
int BPF_PROG(block_io_ordered_raw, struct inode *inode)
{
	return on_ordered(inode);
}

static __always_inline int on_pause(struct bdi_writeback *wb)
{
	struct device *device = BPF_CORE_READ(wb, bdi, dev);
	struct task_struct *task = whyspan_current();
	__u64 id = bpf_get_current_pid_tgid();
	struct dirty_pause *e;

	e = whyspan_reserve(KIND_dirty_pause, bpf_ktime_get_ns(), (__u32)id, id >> 32, 0);
	if (!e)
		return 0;
	e->dev = device ? BPF_CORE_READ(device, devt) : 0;
	e->pages = BPF_CORE_READ(task, nr_dirtied);
	bpf_core_read(e->comm, sizeof(e->comm), &task->comm);
	e->_pad = 0;
	whyspan_submit(e);
	return 0;
}

SEC("tp_btf/balance_dirty_pages")
int BPF_PROG(block_io_pause_tp, struct bdi_writeback *wb)
{
	return on_pause(wb);
}

SEC("raw_tp/balance_dirty_pages")
int BPF_PROG(block_io_pause_raw, struct bdi_writeback *wb)
{
	return on_pause(wb);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
