// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * tcp: retransmits, connects of watched processes, and listen queues that are full.
 *
 * Hooks tcp_retransmit_skb and tcp_retransmit_synack, which fire when something was lost;
 * inet_sock_set_state, a few times per connection; and sk_data_ready (6.3+), of which only listening sockets
 * are looked at: it fires for one when a connection joins its queue. Retransmits and full queues are recorded
 * of the whole host, since a timer's interrupt does not know whose socket it is about, and no more than
 * `per_s` of them on a CPU.
 *
 * Only reads the kernel's memory. Sockets are named by cookie and ports; of addresses only whether the peer
 * is on this host. A retransmit of the other side is not seen unless that is on this host, too. A SYN that a
 * full queue refuses passes no tracepoint: the listener's count of drops shows it at the next one.
 * Cost: less than 0.1 us per arrival of data at any socket of the host, 0.3 us per change of a state, up to 3
 * us per retransmit.
 */
#include "whyspan.bpf.h"
#include "inet.bpf.h"

WHYSPAN_KINDS(tcp, KIND_tcp_retransmit, KIND_tcp_connect, KIND_tcp_synack, KIND_accept_queue);

struct tcp_cfg {
	__u32 per_s; /* retransmits and full queues recorded per second and CPU, at most; default 2000 */
	__u32 _pad;
};
const volatile struct tcp_cfg cfg = { .per_s = 2000 };

/* Why a segment was sent again; part of the record format. */
enum again {
	AGAIN_TIMEOUT = 1,
	AGAIN_FAST,
	AGAIN_PROBE,
	AGAIN_SYN,
};

struct tcp_retransmit {
	struct whyspan_head head; /* aux = enum again; whoever was interrupted is the subject */
	__u64 cookie;
	__u32 seq; /* of its first byte, as `offset` of sock_send */
	__u32 rto_us;
	__u32 srtt_us;
	__u32 total;
	__u16 lport;
	__u16 rport;
	__u16 state;
	__u16 timeouts;
};
WHYSPAN_EVENT(tcp_retransmit);

struct tcp_connect {
	struct whyspan_head head; /* ts_ns = its end; aux: 1 the peer is on this host */
	__u64 cookie;
	__u64 duration_ns;
	__u32 error;
	__u32 again;
	__u16 lport;
	__u16 rport;
	__u32 failed;
};
WHYSPAN_EVENT(tcp_connect);

struct tcp_synack {
	struct whyspan_head
		head; /* aux: 1 the client's ACK had come, and there was no room for the connection */
	__u64 cookie;
	__u32 again;
	__u32 backlog;
	__u32 limit;
	__u32 drops;
	__u16 lport;
	__u16 rport;
	__u32 _pad;
};
WHYSPAN_EVENT(tcp_synack);

struct accept_queue {
	struct whyspan_head head; /* aux unused; whoever was interrupted is the subject */
	__u64 cookie;
	__u64 _pad;
	__u32 backlog;
	__u32 limit;
	__u32 drops;
	__u16 lport;
	__u16 _pad2;
};
WHYSPAN_EVENT(accept_queue);

/* include/linux/tcp.h and include/net/inet_connection_sock.h; the first is an enum, the second a macro */
#define CA_LOSS 4
#define PENDING_LOSS_PROBE 5
#define FIRST_TIMEOUT_US 1000000
#define MAX_TIMEOUT_US 120000000ull /* TCP_RTO_MAX */
#define BUDGET_NS 100000000ull

struct budget {
	__u64 since_ns;
	__u64 spent;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct budget);
} tcp_budget SEC(".maps");

struct begun {
	__u64 ts_ns;
	__u32 tid;
	__u32 tgid;
};

/* Connects of watched processes in progress, by the socket's key. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct begun);
} tcp_connecting SEC(".maps");

/* False, and counted as dropped: too many on this CPU in the last 100 ms. */
static __always_inline bool affordable(__u32 index, __u64 now)
{
	__u32 zero = 0;
	struct budget *b = bpf_map_lookup_elem(&tcp_budget, &zero);

	if (!b)
		return false;
	if (now - b->since_ns >= BUDGET_NS) {
		b->since_ns = now;
		b->spent = 0;
	}
	if (b->spent++ < cfg.per_s / 10)
		return true;
	whyspan_drop(index);
	return false;
}

static __always_inline __u32 why_again(const struct sock *sk, __u8 state)
{
	struct inet_connection_sock *icsk = (struct inet_connection_sock *)sk;

	if (state == TCP_SYN_SENT || state == TCP_SYN_RECV)
		return AGAIN_SYN;
	if (BPF_CORE_READ(icsk, icsk_pending) == PENDING_LOSS_PROBE)
		return AGAIN_PROBE;
	/* What an ACK sets off after a time-out finds the count at 0 again. */
	return BPF_CORE_READ_BITFIELD_PROBED(icsk, icsk_ca_state) == CA_LOSS &&
			       BPF_CORE_READ(icsk, icsk_retransmits) ?
		       AGAIN_TIMEOUT :
		       AGAIN_FAST;
}

/* The time-out that has just passed, or would: the kernel's own is in ticks. */
static __always_inline __u64 timeout_us(const struct sock *sk)
{
	struct tcp_sock *tcp = (struct tcp_sock *)sk;
	__u32 srtt = BPF_CORE_READ(tcp, srtt_us) >> 3;
	__u8 backoff = BPF_CORE_READ((struct inet_connection_sock *)sk, icsk_backoff);
	__u64 base = srtt ? srtt + BPF_CORE_READ(tcp, rttvar_us) : FIRST_TIMEOUT_US;

	base <<= backoff & 15;
	return base < MAX_TIMEOUT_US ? base : MAX_TIMEOUT_US;
}

static __always_inline int on_retransmit(const bool raw, struct sock *sk, const struct sk_buff *skb)
{
	__u64 now = bpf_ktime_get_ns(), id = bpf_get_current_pid_tgid();
	const struct tcp_skb_cb *cb = (const struct tcp_skb_cb *)&skb->cb;
	__u8 state = BPF_CORE_READ(sk, __sk_common.skc_state);
	struct tcp_retransmit *e;
	__u64 cookie = whyspan_named(raw, sk);

	if (!affordable(KIND_tcp_retransmit, now))
		return 0;
	e = whyspan_reserve(KIND_tcp_retransmit, now, (__u32)id, id >> 32, why_again(sk, state));
	if (!e)
		return 0;
	e->cookie = cookie;
	e->seq = BPF_CORE_READ(cb, seq);
	e->rto_us = timeout_us(sk);
	e->srtt_us = BPF_CORE_READ((struct tcp_sock *)sk, srtt_us) >> 3;
	e->total = BPF_CORE_READ((struct tcp_sock *)sk, total_retrans);
	e->lport = BPF_CORE_READ(sk, __sk_common.skc_num);
	e->rport = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
	e->state = state;
	e->timeouts = BPF_CORE_READ((struct inet_connection_sock *)sk, icsk_retransmits);
	whyspan_submit(e);
	return 0;
}

/* "tcp: add tcp_retransmit_skb tracepoint's third argument" (6.16) does not change the first two. */
SEC("tp_btf/tcp_retransmit_skb")
int BPF_PROG(tcp_again_tp, struct sock *sk, struct sk_buff *skb)
{
	return on_retransmit(false, sk, skb);
}

SEC("raw_tp/tcp_retransmit_skb")
int BPF_PROG(tcp_again_raw, struct sock *sk, struct sk_buff *skb)
{
	return on_retransmit(true, sk, skb);
}

static __always_inline int on_synack(const bool raw, struct sock *sk, const struct request_sock *req)
{
	__u64 now = bpf_ktime_get_ns(), id = bpf_get_current_pid_tgid(), cookie = whyspan_named(raw, sk);
	const struct inet_request_sock *ireq = (const struct inet_request_sock *)req;
	struct tcp_synack *e;

	if (!affordable(KIND_tcp_synack, now))
		return 0;
	e = whyspan_reserve(KIND_tcp_synack, now, (__u32)id, id >> 32,
			    BPF_CORE_READ_BITFIELD_PROBED(ireq, acked));
	if (!e)
		return 0;
	e->cookie = cookie;
	e->again = BPF_CORE_READ(req, num_retrans) + 1;
	e->backlog = BPF_CORE_READ(sk, sk_ack_backlog);
	e->limit = BPF_CORE_READ(sk, sk_max_ack_backlog);
	e->drops = BPF_CORE_READ(sk, sk_drops.counter);
	e->lport = BPF_CORE_READ(sk, __sk_common.skc_num);
	e->rport = bpf_ntohs(BPF_CORE_READ(req, __req_common.skc_dport));
	e->_pad = 0;
	whyspan_submit(e);
	return 0;
}

SEC("tp_btf/tcp_retransmit_synack")
int BPF_PROG(tcp_synack_tp, struct sock *sk, struct request_sock *req)
{
	return on_synack(false, sk, req);
}

SEC("raw_tp/tcp_retransmit_synack")
int BPF_PROG(tcp_synack_raw, struct sock *sk, struct request_sock *req)
{
	return on_synack(true, sk, req);
}

static __always_inline int on_connected(const bool raw, struct sock *sk, int new_state, __u64 key)
{
	struct begun *found = bpf_map_lookup_elem(&tcp_connecting, &key), begun;
	__u64 now = bpf_ktime_get_ns(), cookie;
	struct tcp_connect *e;

	if (!found)
		return 0;
	begun = *found;
	bpf_map_delete_elem(&tcp_connecting, &key);
	cookie = whyspan_named(raw, sk);
	e = whyspan_reserve(KIND_tcp_connect, now, begun.tid, begun.tgid, whyspan_is_local(sk));
	if (!e)
		return 0;
	e->cookie = cookie;
	e->duration_ns = now - begun.ts_ns;
	e->error = new_state == TCP_CLOSE ? BPF_CORE_READ(sk, sk_err) : 0;
	e->again = BPF_CORE_READ((struct tcp_sock *)sk, total_retrans);
	/* skc_num has gone back to 0 by the time a socket is TCP_CLOSE */
	e->lport = bpf_ntohs(BPF_CORE_READ((const struct inet_sock *)sk, inet_sport));
	e->rport = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
	e->failed = new_state == TCP_CLOSE;
	whyspan_submit(e);
	return 0;
}

static __always_inline int on_state(const bool raw, struct sock *sk, int old_state, int new_state)
{
	__u64 key;

	if (old_state == TCP_SYN_SENT) {
		key = whyspan_key(sk);
		return on_connected(raw, sk, new_state, key);
	}
	if (new_state == TCP_SYN_SENT) {
		__u64 id = bpf_get_current_pid_tgid();
		struct begun begun = { .ts_ns = bpf_ktime_get_ns(), .tid = id, .tgid = id >> 32 };

		if (!whyspan_is_watched(begun.tgid))
			return 0;
		key = whyspan_key(sk);
		bpf_map_update_elem(&tcp_connecting, &key, &begun, BPF_ANY);
	}
	return 0;
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(tcp_state_tp, struct sock *sk, int old_state, int new_state)
{
	return on_state(false, sk, old_state, new_state);
}

SEC("raw_tp/inet_sock_set_state")
int BPF_PROG(tcp_state_raw, struct sock *sk, int old_state, int new_state)
{
	return on_state(true, sk, old_state, new_state);
}

/* For every socket of the host: all but listening ones leave at once. */
static __always_inline int on_ready(const bool raw, struct sock *sk)
{
	__u32 backlog, limit;
	struct accept_queue *e;
	__u64 now, id, cookie;
	__u8 state; /* volatile in the kernel: no WHYSPAN_FIELD */

	if (raw)
		bpf_core_read(&state, sizeof(state), &sk->__sk_common.skc_state);
	else
		state = sk->__sk_common.skc_state;
	/* Sockets of other families use the same number for other things. */
	if (state != TCP_LISTEN || !whyspan_is_inet(WHYSPAN_FIELD(raw, sk, __sk_common.skc_family)))
		return 0;
	backlog = WHYSPAN_FIELD(raw, sk, sk_ack_backlog);
	limit = WHYSPAN_FIELD(raw, sk, sk_max_ack_backlog);
	/* The kernel takes one more than the limit; with as many as the limit it is as good as full. */
	if (!backlog || backlog < limit)
		return 0;
	now = bpf_ktime_get_ns();
	id = bpf_get_current_pid_tgid();
	cookie = whyspan_named(raw, sk);
	if (!affordable(KIND_accept_queue, now))
		return 0;
	e = whyspan_reserve(KIND_accept_queue, now, (__u32)id, id >> 32, 0);
	if (!e)
		return 0;
	e->cookie = cookie;
	e->_pad = 0;
	e->backlog = backlog;
	e->limit = limit;
	e->drops = BPF_CORE_READ(sk, sk_drops.counter);
	e->lport = BPF_CORE_READ(sk, __sk_common.skc_num);
	e->_pad2 = 0;
	whyspan_submit(e);
	return 0;
}

SEC("tp_btf/sk_data_ready")
int BPF_PROG(tcp_ready_tp, struct sock *sk)
{
	return on_ready(false, sk);
}

SEC("raw_tp/sk_data_ready")
int BPF_PROG(tcp_ready_raw, struct sock *sk)
{
	return on_ready(true, sk);
}

WHYSPAN_ON_READY(tcp_ready, on_ready)

char LICENSE[] SEC("license") = "Dual BSD/GPL";
