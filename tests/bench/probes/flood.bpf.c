// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * flood: one record per system call of a given number, to measure how fast records can be taken in.
 *
 * For the bench only: a raw sys_enter hook taxes every system call of the host.
 */
#include "whyspan.bpf.h"

WHYSPAN_KINDS(flood, KIND_flood_call);

struct flood_cfg {
	__u64 nr; /* the system call's number */
};
const volatile struct flood_cfg cfg = { .nr = 0 };

struct flood_call {
	struct whyspan_head head;
	__u64 nr;
	__u64 count;
	__u64 _pad[2];
};
WHYSPAN_EVENT(flood_call);

SEC("tp_btf/sys_enter")
int BPF_PROG(flood_enter, struct pt_regs *regs, long nr)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tgid = id >> 32;
	struct flood_call *e;

	if (nr != cfg.nr || !whyspan_is_watched(tgid))
		return 0;
	e = whyspan_reserve(KIND_flood_call, bpf_ktime_get_ns(), (__u32)id, tgid, 0);
	if (!e)
		return 0;
	e->nr = nr;
	e->count = 1;
	e->_pad[0] = e->_pad[1] = 0;
	whyspan_submit(e);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
