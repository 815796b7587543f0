// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * stalls: what TCP held back of a send, holes in what was received, and messages to and from resolvers.
 *
 * Hooks sock_recv_length and sock_send_length (6.3+), or the functions of transfers.bpf.h, for watched
 * processes. Nearly all calls leave after two loads of fields that the call itself has just touched. A send
 * is recorded when it left a small tail that only Nagle's algorithm keeps (something is in flight, and
 * TCP_NODELAY is off): at the next receive on that connection, with the time at which the tail left, which
 * the kernel keeps (first_tx_mstamp). A receive is recorded when segments came out of order since the one
 * before. Of datagrams, those to and from port 53 on connected sockets are: glibc, c-ares, Go and systemd
 * connect theirs; musl does not, and is not seen. Nothing of any message is read. Cost: 0.3 us per send or
 * receive.
 */
#include "whyspan.bpf.h"
#include "inet.bpf.h"
#include "transfers.bpf.h"

WHYSPAN_KINDS(stalls, KIND_sock_held, KIND_sock_hole, KIND_dns_message);

struct stalls_cfg {
	__u32 resolver_port; /* default 53 */
	__u32 _pad;
};
const volatile struct stalls_cfg cfg = { .resolver_port = 53 };

#define MSG_MORE 0x8000
#define DNS_QUERY 1u
#define DNS_ANSWER 2u
#define DNS_LOCAL 4u
#define FORGET_NS 10000000000ull

struct sock_held {
	struct whyspan_head head; /* subject: whoever received next */
	__u64 cookie;
	__u64 held_ns;
	__u64 left_ns;
	__u32 bytes;
	__u16 lport;
	__u16 rport;
};
WHYSPAN_EVENT(sock_held);

struct sock_hole {
	struct whyspan_head head;
	__u64 cookie;
	__u64 _pad;
	__u32 packets;
	__u32 total;
	__u32 srtt_us;
	__u16 lport;
	__u16 rport;
};
WHYSPAN_EVENT(sock_hole);

struct dns_message {
	struct whyspan_head head; /* aux: 1 query, 2 answer, 4 the resolver is on this host */
	__u64 cookie;
	__u64 _pad[2];
	__u32 bytes;
	__u16 lport;
	__u16 rport;
};
WHYSPAN_EVENT(dns_message);

/* What is remembered of a connection that had trouble; others have no entry. */
struct trouble {
	__u64 held_ns; /* the first tail held back since the last receive; 0 none */
	__u32 held_bytes;
	__u32 ooo; /* segments out of order, as of the last receive */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, struct trouble);
} stalls_trouble SEC(".maps");

/* When any tail was held back last: without one in a while, a receive looks nothing up. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} stalls_last_held SEC(".maps");

/* Whether a message of this socket is one to or from a resolver. */
static __always_inline bool to_resolver(const bool raw, struct sock *sk)
{
	return bpf_ntohs(WHYSPAN_FIELD(raw, sk, __sk_common.skc_dport)) == cfg.resolver_port;
}

static __always_inline int on_dns(const bool raw, struct sock *sk, int bytes, __u64 id, __u32 aux)
{
	__u64 cookie = whyspan_named(raw, sk);
	struct dns_message *e;

	e = whyspan_reserve(KIND_dns_message, bpf_ktime_get_ns(), (__u32)id, id >> 32,
			    aux | (whyspan_is_local(sk) ? DNS_LOCAL : 0));
	if (!e)
		return 0;
	e->cookie = cookie;
	e->_pad[0] = e->_pad[1] = 0;
	e->bytes = bytes;
	e->lport = BPF_CORE_READ(sk, __sk_common.skc_num);
	e->rport = cfg.resolver_port;
	whyspan_submit(e);
	return 0;
}

/* The socket as TCP's, or NULL. The cast of `raw` is good for probe reads only. */
static __always_inline struct tcp_sock *tcp_of(const bool raw, struct sock *sk)
{
	if (!raw)
		return bpf_skc_to_tcp_sock(sk);
	return BPF_CORE_READ(sk, sk_protocol) == IPPROTO_TCP ? (struct tcp_sock *)sk : NULL;
}

/* How many bytes of what was sent only Nagle's algorithm keeps. Cork, window and congestion are other
 * reasons. */
static __always_inline __u32 nagled(const bool raw, struct tcp_sock *tcp)
{
	__u32 end = WHYSPAN_FIELD(raw, tcp, write_seq);
	__u32 unsent = end - WHYSPAN_FIELD(raw, tcp, snd_nxt);
	__u32 in_flight;

	if (!unsent)
		return 0;
	in_flight = WHYSPAN_FIELD(raw, tcp, packets_out);
	if (!in_flight || unsent >= WHYSPAN_FIELD(raw, tcp, mss_cache) ||
	    in_flight >= WHYSPAN_FIELD(raw, tcp, snd_cwnd))
		return 0;
	if ((__s32)(WHYSPAN_FIELD(raw, tcp, snd_una) + WHYSPAN_FIELD(raw, tcp, snd_wnd) - end) < 0)
		return 0;
	/* 1 off, 2 cork, 4 push */
	return BPF_CORE_READ_BITFIELD_PROBED(tcp, nonagle) ? 0 : unsent;
}

static __always_inline int on_send(const bool raw, struct sock *sk, int sent, int flags)
{
	__u64 id = bpf_get_current_pid_tgid(), now, key;
	struct trouble *known, fresh = {};
	struct tcp_sock *tcp;
	__u32 zero = 0, bytes;

	if (sent <= 0 || !whyspan_is_inet(WHYSPAN_FIELD(raw, sk, __sk_common.skc_family)) ||
	    !whyspan_is_watched(id >> 32))
		return 0;
	tcp = tcp_of(raw, sk);
	if (!tcp)
		return to_resolver(raw, sk) ? on_dns(raw, sk, sent, id, DNS_QUERY) : 0;
	bytes = nagled(raw, tcp);
	if (!bytes || (flags & MSG_MORE))
		return 0;
	now = bpf_ktime_get_ns();
	key = whyspan_named(raw, sk);
	known = bpf_map_lookup_elem(&stalls_trouble, &key);
	if (known) {
		if (!known->held_ns)
			known->held_ns = now;
		known->held_bytes = bytes;
	} else {
		fresh.held_ns = now;
		fresh.held_bytes = bytes;
		bpf_map_update_elem(&stalls_trouble, &key, &fresh, BPF_ANY);
	}
	bpf_map_update_elem(&stalls_last_held, &zero, &now, BPF_ANY);
	return 0;
}

static __always_inline void emit_held(struct sock *sk, struct tcp_sock *tcp, __u64 cookie,
				      const struct trouble *t, __u64 now, __u64 id)
{
	/* When what was acknowledged last was sent: the tail, since nothing was sent after it. */
	__u64 left_ns = BPF_CORE_READ(tcp, first_tx_mstamp) * 1000;
	struct sock_held *e;

	e = whyspan_reserve(KIND_sock_held, now, (__u32)id, id >> 32, 0);
	if (!e)
		return;
	e->cookie = cookie;
	e->held_ns = t->held_ns;
	e->left_ns = left_ns < t->held_ns ? t->held_ns : left_ns < now ? left_ns : now;
	e->bytes = t->held_bytes;
	e->lport = BPF_CORE_READ(sk, __sk_common.skc_num);
	e->rport = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
	whyspan_submit(e);
}

static __always_inline void emit_hole(struct sock *sk, struct tcp_sock *tcp, __u64 cookie, __u32 total,
				      __u32 packets, __u64 now, __u64 id)
{
	struct sock_hole *e;

	e = whyspan_reserve(KIND_sock_hole, now, (__u32)id, id >> 32, 0);
	if (!e)
		return;
	e->cookie = cookie;
	e->_pad = 0;
	e->packets = packets;
	e->total = total;
	e->srtt_us = BPF_CORE_READ(tcp, srtt_us) >> 3;
	e->lport = BPF_CORE_READ(sk, __sk_common.skc_num);
	e->rport = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
	whyspan_submit(e);
}

static __always_inline int on_recv(const bool raw, struct sock *sk, int received, int flags)
{
	__u64 id = bpf_get_current_pid_tgid(), now, key, *last;
	struct trouble *known, fresh = {};
	__u32 zero = 0, ooo = 0, before;
	struct tcp_sock *tcp;

	if (received <= 0 || (flags & MSG_PEEK) ||
	    !whyspan_is_inet(WHYSPAN_FIELD(raw, sk, __sk_common.skc_family)) || !whyspan_is_watched(id >> 32))
		return 0;
	tcp = tcp_of(raw, sk);
	if (!tcp)
		return to_resolver(raw, sk) ? on_dns(raw, sk, received, id, DNS_ANSWER) : 0;
	ooo = WHYSPAN_FIELD(raw, tcp, rcv_ooopack);
	last = bpf_map_lookup_elem(&stalls_last_held, &zero);
	if (!last || (!ooo && !*last))
		return 0;
	now = bpf_ktime_get_ns();
	if (!ooo && now - *last > FORGET_NS)
		return 0;
	key = whyspan_named(raw, sk);
	known = bpf_map_lookup_elem(&stalls_trouble, &key);
	if (known && known->held_ns) {
		emit_held(sk, tcp, key, known, now, id);
		known->held_ns = 0;
	}
	before = known ? known->ooo : 0;
	if (ooo != before) {
		emit_hole(sk, tcp, key, ooo, ooo - before, now, id);
		fresh.ooo = ooo;
		if (known)
			known->ooo = ooo;
		else
			bpf_map_update_elem(&stalls_trouble, &key, &fresh, BPF_ANY);
	}
	return 0;
}

SEC("tp_btf/sock_recv_length")
int BPF_PROG(stalls_recv_tp, struct sock *sk, int ret, int flags)
{
	return on_recv(false, sk, ret, flags);
}

SEC("tp_btf/sock_send_length")
int BPF_PROG(stalls_send_tp, struct sock *sk, int ret, int flags)
{
	return on_send(false, sk, ret, flags);
}

SEC("raw_tp/sock_recv_length")
int BPF_PROG(stalls_recv_raw, struct sock *sk, int ret, int flags)
{
	return on_recv(true, sk, ret, flags);
}

SEC("raw_tp/sock_send_length")
int BPF_PROG(stalls_send_raw, struct sock *sk, int ret, int flags)
{
	return on_send(true, sk, ret, flags);
}

WHYSPAN_RECEIVES(stalls, inet_recvmsg, on_recv, KIND_sock_held)
WHYSPAN_RECEIVES(stalls, inet6_recvmsg, on_recv, KIND_sock_held)
WHYSPAN_SENDS(stalls, inet_sendmsg, on_send, KIND_sock_held)
WHYSPAN_SENDS(stalls, inet6_sendmsg, on_send, KIND_sock_held)

char LICENSE[] SEC("license") = "Dual BSD/GPL";
