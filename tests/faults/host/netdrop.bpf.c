// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Loses packets of IPv4 TCP at one port, for tests: PERCENT of those with data, or, with SYNS, the first SYNs
 * of each connection. Compiled with -DPORT, -DPERCENT and -DSYNS. Attached by tc as a direct action.
 */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

#define ETH_P_IP 0x0800
#define TC_ACT_OK 0
#define TC_ACT_STOLEN 4 /* not SHOT: on the way out TCP would be told, and would not have sent it */

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u32);
} seen SEC(".maps");

static __always_inline int lose_syn(const struct tcphdr *tcp)
{
	__u32 key = (__u32)tcp->source << 16 | tcp->dest, one = 1;
	__u32 *count = bpf_map_lookup_elem(&seen, &key);

	if (!tcp->syn || tcp->ack)
		return TC_ACT_OK;
	if (!count) {
		bpf_map_update_elem(&seen, &key, &one, BPF_ANY);
		return TC_ACT_STOLEN;
	}
	return (*count)++ < SYNS ? TC_ACT_STOLEN : TC_ACT_OK;
}

SEC("tc")
int drop(struct __sk_buff *skb)
{
	struct iphdr ip;
	struct tcphdr tcp;
	__u32 at = 14;

	if (skb->protocol != bpf_htons(ETH_P_IP) || bpf_skb_load_bytes(skb, at, &ip, sizeof(ip)) ||
	    ip.protocol != IPPROTO_TCP)
		return TC_ACT_OK;
	at += ip.ihl * 4;
	if (bpf_skb_load_bytes(skb, at, &tcp, sizeof(tcp)))
		return TC_ACT_OK;
	if (tcp.source != bpf_htons(PORT) && tcp.dest != bpf_htons(PORT))
		return TC_ACT_OK;
	if (SYNS)
		return lose_syn(&tcp);
	if (skb->len <= at + tcp.doff * 4 || bpf_get_prandom_u32() % 100 >= PERCENT)
		return TC_ACT_OK;
	return TC_ACT_STOLEN;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
