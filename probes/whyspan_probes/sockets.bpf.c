// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * sockets: data in and out of the watched processes' sockets, and the HTTP/1.1 requests on them.
 *
 * Hooks sock_recv_length and sock_send_length (6.3+), which see every call on every socket whatever the
 * library, or else the functions that these families send and receive by (transfers.bpf.h), or else the exit
 * of nine system calls. Connections are named by the socket's cookie, so dup,
 * descriptor passing and other acceptors are right. Reads user memory only where HTTP framing must be: heads,
 * chunk sizes. Bodies are skipped unread. Only connections that began with a request are followed. Kernels
 * without BTF get the same as raw tracepoints.
 *
 * Under TLS the same is followed in the clear, at OpenSSL's functions: see tls.bpf.h.
 *
 * A request begins when its first byte reaches the socket (sk_data_ready), not when the server gets to
 * reading it: the wait of an accepted or still unaccepted connection is the server's. io_uring is not seen.
 * Cost: 0.6 us per operation in a hot loop, 1 to 3 us between other work; about 4 us more per request head.
 */
#include "whyspan.bpf.h"
#include "files.bpf.h"
#include "http_follow.bpf.h"
#include "tls.bpf.h"
#include "transfers.bpf.h"

#define AF_UNIX 1
#define AF_INET 2
#define AF_INET6 10

struct sockets_cfg {
	__u32 data; /* 1 = record every send and receive; default 1 */
	__u32 http; /* 1 = follow HTTP requests; default 1 */
};
const volatile struct sockets_cfg cfg = { .data = 1, .http = 1 };

static __always_inline void emit_data(const struct op *op, __u32 index, __u64 now, __u64 id)
{
	struct sock_recv *e; /* sock_send has the same layout */

	if (!cfg.data)
		return;
	e = whyspan_reserve(index, now, (__u32)id, id >> 32, op->family);
	if (!e)
		return;
	e->key = op->key;
	e->peer = op->peer;
	e->offset = op->offset;
	e->bytes = op->bytes;
	e->lport = op->lport;
	e->rport = op->rport;
	whyspan_submit(e);
}

/* Positions in a unix socket's streams, by inode; the kernel keeps none. */
struct streams {
	__u64 in_bytes;
	__u64 out_bytes;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, struct streams);
} sockets_streams SEC(".maps");

static __always_inline void count_stream(struct op *op, bool recv)
{
	struct streams *streams = bpf_map_lookup_elem(&sockets_streams, &op->key);

	if (!streams) {
		struct streams fresh = {};

		if (recv)
			fresh.in_bytes = op->bytes;
		else
			fresh.out_bytes = op->bytes;
		bpf_map_update_elem(&sockets_streams, &op->key, &fresh, BPF_ANY);
		return;
	}
	op->offset = recv ? streams->in_bytes : streams->out_bytes;
	if (recv)
		streams->in_bytes += op->bytes;
	else
		streams->out_bytes += op->bytes;
}

static __always_inline int on_data(struct op *op, __u64 id, bool recv)
{
	__u64 now = bpf_ktime_get_ns();
	struct scan *s;
	struct conn *c;

	if (op->family == AF_UNIX)
		count_stream(op, recv);
	emit_data(op, recv ? KIND_sock_recv : KIND_sock_send, now, id);
	if (op->family == AF_UNIX || !cfg.http)
		return 0;
	c = bpf_map_lookup_elem(&sockets_conns, &op->key);
	s = the_scan();
	if (!s)
		return 0;
	if (c && c->tls) {
		if (recv) {
			s->now = now;
			take_arrival(s, op->sock_key, op->left);
			tls_note(op, s, id);
		}
		return 0;
	}
	/* Requests that are read from a socket after its end have had theirs as unread ones. */
	if (recv && (c || !op->dead)) {
		http_recv(s, op, c, now, id);
		tls_note(op, s, id);
	} else if (!recv && c) {
		http_send(s, op, c, now, id);
	}
	return 0;
}

/* Describe the operation from a socket that the verifier trusts: plain loads. False: of no interest. */
static __always_inline bool describe(struct sock *sk, int bytes, bool recv, struct op *op)
{
	op->family = sk->__sk_common.skc_family;
	op->bytes = bytes;
	if (op->family == AF_UNIX) {
		struct unix_sock *unix_sock = bpf_skc_to_unix_sock(sk);

		if (!unix_sock)
			return false;
		op->key = sk->sk_socket->file->f_inode->i_ino;
		op->peer = unix_sock->peer->sk_socket->file->f_inode->i_ino;
		return true;
	}
	if (op->family == AF_INET || op->family == AF_INET6) {
		struct tcp_sock *tcp = bpf_skc_to_tcp_sock(sk);

		if (!tcp)
			return false;
		op->key = bpf_get_socket_cookie(sk);
		op->sock_key = recv ? whyspan_key(sk) : 0;
		op->lport = sk->__sk_common.skc_num;
		op->rport = bpf_ntohs(sk->__sk_common.skc_dport);
		op->left = tcp->rcv_nxt - tcp->copied_seq;
		op->dead = sk->__sk_common.skc_state == TCP_CLOSE;
		/* TCP's own sequence space: both ends agree on it. */
		op->offset = (__u32)((recv ? tcp->copied_seq : tcp->write_seq) - op->bytes);
		return true;
	}
	return false;
}

/*
 * The name that a connection goes by. Where no program of ours makes its cookie, its address stands in;
 * should somebody else ask for the cookie meanwhile (`ss` does, of every socket), the connection keeps the
 * name that it has.
 */
static __always_inline __u64 name_of(const struct sock *sk)
{
	__u64 cookie = whyspan_cookie(sk), key = whyspan_key(sk);

	return cookie != key && !bpf_map_lookup_elem(&sockets_conns, &cookie) &&
			       bpf_map_lookup_elem(&sockets_conns, &key) ?
		       key :
		       cookie;
}

/* The same from a socket found through a descriptor, which must be read with care. */
static __always_inline bool describe_untrusted(struct sock *sk, int bytes, bool recv, struct op *op)
{
	op->family = BPF_CORE_READ(sk, __sk_common.skc_family);
	op->bytes = bytes;
	if (op->family == AF_UNIX) {
		op->key = BPF_CORE_READ(sk, sk_socket, file, f_inode, i_ino);
		op->peer = BPF_CORE_READ((struct unix_sock *)sk, peer, sk_socket, file, f_inode, i_ino);
		return true;
	}
	if ((op->family == AF_INET || op->family == AF_INET6) && BPF_CORE_READ(sk, sk_type) == SOCK_STREAM) {
		struct tcp_sock *tcp = (struct tcp_sock *)sk;

		op->key = name_of(sk);
		op->sock_key = whyspan_key(sk);
		op->lport = BPF_CORE_READ(sk, __sk_common.skc_num);
		op->rport = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
		op->left = BPF_CORE_READ(tcp, rcv_nxt) - BPF_CORE_READ(tcp, copied_seq);
		op->dead = BPF_CORE_READ(sk, __sk_common.skc_state) == TCP_CLOSE;
		op->offset = (__u32)((recv ? BPF_CORE_READ(tcp, copied_seq) : BPF_CORE_READ(tcp, write_seq)) -
				     op->bytes);
		return true;
	}
	return false;
}

static __always_inline int on_recv(const bool raw, struct sock *sk, int ret, int flags)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct op op = {};

	if (ret <= 0 || (flags & MSG_PEEK) || !whyspan_is_watched(id >> 32))
		return 0;
	if (raw)
		return describe_untrusted(sk, ret, true, &op) ? on_data(&op, id, true) : 0;
	return describe(sk, ret, true, &op) ? on_data(&op, id, true) : 0;
}

static __always_inline int on_send(const bool raw, struct sock *sk, int ret, int flags)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct op op = {};

	if (ret <= 0 || !whyspan_is_watched(id >> 32))
		return 0;
	if (raw)
		return describe_untrusted(sk, ret, false, &op) ? on_data(&op, id, false) : 0;
	return describe(sk, ret, false, &op) ? on_data(&op, id, false) : 0;
}

SEC("tp_btf/sock_recv_length")
int BPF_PROG(sockets_recv_tp, struct sock *sk, int ret, int flags)
{
	return on_recv(false, sk, ret, flags);
}

SEC("tp_btf/sock_send_length")
int BPF_PROG(sockets_send_tp, struct sock *sk, int ret, int flags)
{
	return on_send(false, sk, ret, flags);
}

SEC("raw_tp/sock_recv_length")
int BPF_PROG(sockets_recv_raw, struct sock *sk, int ret, int flags)
{
	return on_recv(true, sk, ret, flags);
}

SEC("raw_tp/sock_send_length")
int BPF_PROG(sockets_send_raw, struct sock *sk, int ret, int flags)
{
	return on_send(true, sk, ret, flags);
}

WHYSPAN_RECEIVES(sockets, inet_recvmsg, on_recv, KIND_sock_recv)
WHYSPAN_RECEIVES(sockets, inet6_recvmsg, on_recv, KIND_sock_recv)
WHYSPAN_RECEIVES(sockets, unix_stream_recvmsg, on_recv, KIND_sock_recv)
WHYSPAN_RECEIVES(sockets, unix_dgram_recvmsg, on_recv, KIND_sock_recv)
WHYSPAN_SENDS(sockets, inet_sendmsg, on_send, KIND_sock_send)
WHYSPAN_SENDS(sockets, inet6_sendmsg, on_send, KIND_sock_send)
WHYSPAN_SENDS(sockets, unix_stream_sendmsg, on_send, KIND_sock_send)
WHYSPAN_SENDS(sockets, unix_dgram_sendmsg, on_send, KIND_sock_send)
WHYSPAN_SENDS_PAGES(sockets, inet_sendpage, on_send, KIND_sock_send)
WHYSPAN_SENDS_PAGES(sockets, unix_stream_sendpage, on_send, KIND_sock_send)

/* The socket behind a descriptor of the current task, or NULL. */
static __always_inline struct sock *socket_of(__u32 fd)
{
	struct file *file = whyspan_file_of(whyspan_current(), fd);

	return file && (BPF_CORE_READ(file, f_inode, i_mode) & S_IFMT) == S_IFSOCK ? whyspan_sock_of(file) :
										     NULL;
}

static __noinline int on_call_exit(long ret, bool recv)
{
	struct whyspan_call call = { .nr = -2 };
	__u64 id = bpf_get_current_pid_tgid();
	struct op op = {};
	struct sock *sk;

	if (ret <= 0 || ret > 0x7fffffff || !whyspan_is_watched(id >> 32))
		return 0;
	whyspan_current_call(&call);
	if ((call.nr == NR_RECVFROM && (call.arg[3] & MSG_PEEK)) ||
	    (call.nr == NR_RECVMSG && (call.arg[2] & MSG_PEEK)))
		return 0;
	sk = socket_of(call.arg[0]);
	return sk && describe_untrusted(sk, ret, recv, &op) ? on_data(&op, id, recv) : 0;
}

#define CALL_EXIT(call, recv)                                                                                \
	SEC("tracepoint/syscalls/sys_exit_" #call)                                                           \
	int sockets_exit_##call(struct trace_event_raw_sys_exit *ctx)                                        \
	{                                                                                                    \
		return on_call_exit(ctx->ret, recv);                                                         \
	}

CALL_EXIT(read, true)
CALL_EXIT(readv, true)
CALL_EXIT(recvfrom, true)
CALL_EXIT(recvmsg, true)
CALL_EXIT(write, false)
CALL_EXIT(writev, false)
CALL_EXIT(sendto, false)
CALL_EXIT(sendmsg, false)
CALL_EXIT(sendfile64, false)

static __always_inline int on_state(const struct sock *sk, int old_state, int new_state, __u32 reset)
{
	__u64 now = bpf_ktime_get_ns(), id = bpf_get_current_pid_tgid(), cookie = name_of(sk);
	struct conn *c = bpf_map_lookup_elem(&sockets_conns, &cookie);
	/* skc_num has gone back to 0 by the time a socket is TCP_CLOSE */
	__u16 lport = bpf_ntohs(BPF_CORE_READ((const struct inet_sock *)sk, inet_sport));
	__u16 rport = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
	bool closed = reset || new_state == TCP_CLOSE, known = c != NULL;
	bool orderly = new_state == TCP_FIN_WAIT1 || new_state == TCP_LAST_ACK;
	struct sock_state *e;

	if ((new_state == TCP_CLOSE || new_state == TCP_ESTABLISHED) && is_served(lport)) {
		__u64 key = whyspan_key(sk);
		struct arrival *arrival = bpf_map_lookup_elem(&sockets_arrivals, &key);

		if (arrival && (old_state == TCP_ESTABLISHED || old_state == TCP_CLOSE_WAIT))
			known |= emit_unread(sk, c, cookie, lport, rport, arrival, now, id);
		if (arrival) /* else it would be taken for that of another socket at this address */
			bpf_map_delete_elem(&sockets_arrivals, &key);
	}
	if (!known)
		return 0;
	if (c && (closed || orderly))
		close_http(c, cookie, lport, rport, now, orderly);
	e = whyspan_reserve(KIND_sock_state, now, (__u32)id, id >> 32, reset);
	if (e) {
		e->cookie = cookie;
		e->old_state = old_state;
		e->new_state = new_state;
		e->lport = lport;
		e->rport = rport;
		e->error = BPF_CORE_READ(sk, sk_err);
		e->_pad = 0;
		whyspan_submit(e);
	}
	if (new_state == TCP_CLOSE)
		bpf_map_delete_elem(&sockets_conns, &cookie);
	return 0;
}

static __always_inline int on_reset(const struct sock *sk)
{
	return on_state(sk, BPF_CORE_READ(sk, __sk_common.skc_state), 0, 1);
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(sockets_state_tp, struct sock *sk, int old_state, int new_state)
{
	if (new_state ==
	    TCP_ESTABLISHED) /* every probe is to know it by the same name from its first byte on */
		bpf_get_socket_cookie(sk);
	return on_state(sk, old_state, new_state, 0);
}

SEC("raw_tp/inet_sock_set_state")
int BPF_PROG(sockets_state_raw, struct sock *sk, int old_state, int new_state)
{
	return on_state(sk, old_state, new_state, 0);
}

/* In a soft interrupt, for every socket of the host: sockets of other ports leave at the first look-up. */
static __always_inline int on_arrival(const bool raw, struct sock *sk)
{
	__u16 family = WHYSPAN_FIELD(raw, sk, __sk_common.skc_family);
	struct arrival *known, fresh;
	__u8 state; /* volatile in the kernel: no WHYSPAN_FIELD */
	__u64 key;

	if ((family != AF_INET && family != AF_INET6) ||
	    !is_served(WHYSPAN_FIELD(raw, sk, __sk_common.skc_num)))
		return 0;
	if (raw)
		bpf_core_read(&state, sizeof(state), &sk->__sk_common.skc_state);
	else
		state = sk->__sk_common.skc_state;
	if (state == TCP_LISTEN)
		return 0;
	key = whyspan_key(sk);
	fresh.first_ns = fresh.last_ns = bpf_ktime_get_ns();
	known = bpf_map_lookup_elem(&sockets_arrivals, &key);
	if (known)
		known->last_ns = fresh.last_ns;
	else
		bpf_map_update_elem(&sockets_arrivals, &key, &fresh, BPF_NOEXIST);
	return 0;
}

SEC("tp_btf/sk_data_ready")
int BPF_PROG(sockets_arrival_tp, struct sock *sk)
{
	return on_arrival(false, sk);
}

SEC("raw_tp/sk_data_ready")
int BPF_PROG(sockets_arrival_raw, struct sock *sk)
{
	return on_arrival(true, sk);
}

WHYSPAN_ON_READY(sockets_arrival, on_arrival)

SEC("tp_btf/tcp_receive_reset")
int BPF_PROG(sockets_reset_tp, struct sock *sk)
{
	return on_reset(sk);
}

SEC("raw_tp/tcp_receive_reset")
int BPF_PROG(sockets_reset_raw, struct sock *sk)
{
	return on_reset(sk);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
