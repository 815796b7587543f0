// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * sockets: data in and out of the watched processes' sockets, and the HTTP/1.1 requests on them.
 *
 * Hooks sock_recv_length and sock_send_length (6.3+), which see every call on every socket whatever the library,
 * or else the exit of eight system calls. Connections are named by the socket's cookie, so dup, descriptor
 * passing and other acceptors are right. Reads user memory only where HTTP framing must be: heads, chunk sizes.
 * Bodies are skipped unread. Only connections that began with a request are followed.
 *
 * A request begins when its first byte reaches the socket (sk_data_ready), not when the server gets to reading it:
 * the wait of an accepted or still unaccepted connection is the server's. io_uring is not seen. Cost: about 0.4 us per operation, 4 us per request head.
 */
#include "whyspan.bpf.h"
#include "files.bpf.h"
#include "http1.bpf.h"

WHYSPAN_KINDS(sockets, KIND_sock_recv, KIND_sock_send, KIND_http_response_head, KIND_http_response_end,
	      KIND_sock_state, KIND_http_head_lost);

#define AF_UNIX 1
#define AF_INET 2
#define AF_INET6 10
#define MSG_PEEK 2

#define WINDOW 512 /* bytes of head copied at a time */
#define MAX_STEPS 20000 /* bytes of framing examined per operation; more is a broken peer */

struct sockets_cfg {
	__u32 data; /* 1 = record every send and receive; default 1 */
	__u32 http; /* 1 = follow HTTP requests; default 1 */
};
const volatile struct sockets_cfg cfg = { .data = 1, .http = 1 };

struct sock_recv {
	struct whyspan_head head; /* aux = family; ts_ns = end of the operation */
	__u64 key;
	__u64 peer;
	__u64 offset;
	__u32 bytes;
	__u16 lport;
	__u16 rport;
};
WHYSPAN_EVENT(sock_recv);

struct sock_send {
	struct whyspan_head head;
	__u64 key;
	__u64 peer;
	__u64 offset;
	__u32 bytes;
	__u16 lport;
	__u16 rport;
};
WHYSPAN_EVENT(sock_send);

struct http_response_head {
	struct whyspan_head head; /* aux = HTTP status */
	__u64 cookie;
	__u64 offset;
	__u32 seq;
	__u32 bytes;
	__u64 _pad;
};
WHYSPAN_EVENT(http_response_head);

struct http_response_end {
	struct whyspan_head head; /* aux = HTTP status */
	__u64 cookie;
	__u64 first_body_ns;
	__u32 chunks;
	__u32 response_bytes;
	__u32 seq;
	__u32 flags;
};
WHYSPAN_EVENT(http_response_end);

#define END_BY_CLOSE 1u

struct sock_state {
	struct whyspan_head head; /* aux: 1 reset received, 2 reset sent, 0 state change */
	__u64 cookie;
	__u32 old_state;
	__u32 new_state;
	__u16 lport;
	__u16 rport;
	__u32 _pad;
	__u64 _pad2;
};
WHYSPAN_EVENT(sock_state);

/* A head that went past the limit or broke the grammar; the connection is left until its next request. */
struct http_head_lost {
	struct whyspan_head head; /* aux: 1 request, 2 response */
	__u64 cookie;
	__u32 seq;
	__u32 bytes;
	__u16 lport;
	__u16 rport;
	__u32 _pad;
	__u64 _pad2;
};
WHYSPAN_EVENT(http_head_lost);

/* A piece of a request head on the blob ring, followed by `bytes` bytes of text. */
struct http_piece {
	__u64 ts_ns;
	__u64 first_ns; /* when the head's first byte reached the socket */
	__u64 recv_ns; /* when the process read it */
	__u64 cookie;
	__u32 tid;
	__u32 tgid;
	__u32 seq;
	__u16 bytes;
	__u16 last; /* 1 = the head ends here */
	__u16 lport;
	__u16 rport;
	__u32 _pad;
};
_Static_assert(sizeof(struct http_piece) == 56, "read by user space");
struct http_piece *unused_http_piece __attribute__((unused));

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} whyspan_blobs SEC(".maps");

struct conn {
	struct http_side in;
	struct http_side out;
	__u64 head_first_ns;
	__u64 head_recv_ns;
	__u64 body_first_ns;
	__u64 head_methods; /* bit seq % 64: that request was a HEAD, its response has no body */
	__u64 in_bytes; /* unix sockets: stream offsets */
	__u64 out_bytes;
	__u32 in_seq; /* requests begun */
	__u32 out_seq; /* responses ended */
	__u32 chunks;
	__u32 response_bytes;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct conn);
} sockets_conns SEC(".maps");

/* Local ports on which a request was seen: only their sockets' arrivals are noted. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, __u32);
} sockets_ports SEC(".maps");

/* When data reached a socket that nobody has read from since, by cookie. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, __u64);
} sockets_arrivals SEC(".maps");

/* One operation under examination; too large for the stack. */
struct scan {
	struct http_piece piece; /* with text[] after it: one contiguous output */
	char text[WINDOW];
	__u64 now;
	__u64 arrived; /* when the operation's first byte reached the socket */
	__u64 iov; /* user address of the next iovec */
	__u64 iov_left;
	__u64 base; /* of the current user buffer */
	__u64 base_at; /* offset of its first byte within the operation */
	__u64 base_bytes;
	__u32 pos; /* within the operation */
	__u32 end;
	__u32 window_at; /* text[] holds the bytes from here */
	__u32 window_bytes;
	__u32 body_bytes; /* of this operation */
	__u32 broken;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct scan);
} sockets_scan SEC(".maps");

struct walk {
	struct scan *scan;
	struct conn *conn;
};

static __always_inline struct scan *the_scan(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sockets_scan, &zero);
}

/* Move to the user buffer that holds `pos`. Returns false when there is none: the bytes cannot be read. */
static __always_inline bool seek_buffer(struct scan *s)
{
	struct {
		__u64 base;
		__u64 bytes;
	} iov;

	if (s->pos - s->base_at < s->base_bytes)
		return true;
	if (!s->iov_left)
		return false;
	if (bpf_probe_read_user(&iov, sizeof(iov), (void *)s->iov))
		return false;
	s->iov += sizeof(iov);
	s->iov_left--;
	s->base_at += s->base_bytes;
	s->base = iov.base;
	s->base_bytes = iov.bytes;
	return true;
}

/* Copy the bytes from `pos` on into text[]. */
static __always_inline bool fill_window(struct scan *s, __u32 want)
{
	__u64 bytes = s->base_bytes - (s->pos - s->base_at);

	if (bytes > s->end - s->pos)
		bytes = s->end - s->pos;
	if (bytes > want)
		bytes = want;
	barrier_var(bytes);
	if (!bytes || bytes > WINDOW)
		return false;
	if (bpf_probe_read_user(s->text, bytes, (void *)(s->base + (s->pos - s->base_at))))
		return false;
	s->window_at = s->pos;
	s->window_bytes = bytes;
	return true;
}

/* Send the head's text between window_at and pos to user space. */
static __always_inline void emit_piece(struct scan *s, struct conn *c, __u16 last)
{
	__u32 bytes = s->pos - s->window_at;
	__u64 total;

	if (bytes > WINDOW || (!bytes && !last))
		return;
	s->piece.ts_ns = s->now;
	s->piece.first_ns = c->head_first_ns;
	s->piece.recv_ns = c->head_recv_ns;
	s->piece.seq = c->in_seq;
	s->piece.bytes = bytes;
	s->piece.last = last;
	total = bytes;
	barrier_var(total); /* or clang folds the check below into one the verifier cannot follow */
	if (total <= WINDOW && bpf_ringbuf_output(&whyspan_blobs, s, sizeof(s->piece) + total, BPF_RB_NO_WAKEUP))
		whyspan_drop(KIND_http_head_lost);
	s->window_at = s->pos;
	s->window_bytes = 0;
}

static __always_inline void emit_lost(struct scan *s, struct conn *c, __u32 which)
{
	struct http_head_lost *e;

	e = whyspan_reserve(KIND_http_head_lost, s->now, s->piece.tid, s->piece.tgid, which);
	if (!e)
		return;
	e->cookie = s->piece.cookie;
	e->seq = which == 1 ? c->in_seq : c->out_seq;
	e->bytes = which == 1 ? c->in.head_bytes : c->out.head_bytes;
	e->lport = s->piece.lport;
	e->rport = s->piece.rport;
	e->_pad = 0;
	e->_pad2 = 0;
	whyspan_submit(e);
}

/* After a head: where does its body end? `bodyless` messages end with the head. */
static __always_inline bool begin_body(struct http_side *side, bool bodyless, bool until_close)
{
	if (!bodyless && (side->flags & HTTP_CHUNKED)) {
		http_chunk_begin(side);
		return false;
	}
	if (!bodyless && (side->flags & HTTP_HAS_LENGTH) && side->length) {
		side->left = side->length;
		side->state = HTTP_BODY;
		return false;
	}
	if (!bodyless && !(side->flags & HTTP_HAS_LENGTH) && until_close) {
		side->state = HTTP_UNTIL_CLOSE;
		return false;
	}
	side->state = HTTP_IDLE;
	return true;
}

/* Skip bytes of a body. Returns the number skipped; sets `ended` at its last byte. */
static __always_inline __u32 skip_body(struct http_side *side, __u32 available, bool *ended)
{
	__u32 bytes = available;

	*ended = false;
	if (side->state == HTTP_UNTIL_CLOSE)
		return bytes;
	if (bytes >= side->left) {
		bytes = side->left;
		if (side->state == HTTP_CHUNK_DATA) {
			side->state = HTTP_CHUNK_END;
		} else {
			side->state = HTTP_IDLE;
			*ended = true;
		}
	}
	side->left -= bytes;
	return bytes;
}

static __always_inline bool in_body(const struct http_side *side)
{
	return side->state == HTTP_BODY || side->state == HTTP_CHUNK_DATA || side->state == HTTP_UNTIL_CLOSE;
}

static long request_step(__u32 i, struct walk *w)
{
	struct scan *s = w->scan;
	struct conn *c = w->conn;
	bool ended;
	__u8 byte;

	if (s->pos >= s->end)
		return 1;
	if (in_body(&c->in)) {
		s->pos += skip_body(&c->in, s->end - s->pos, &ended);
		return 0;
	}
	if (s->pos - s->window_at >= s->window_bytes) {
		if (c->in.state == HTTP_HEAD)
			emit_piece(s, c, 0);
		if (s->pos - s->base_at >= s->base_bytes) {
			if (!seek_buffer(s)) {
				s->broken = 1;
				return 1;
			}
			return 0; /* the new buffer may be empty: look again */
		}
		if (!fill_window(s, WINDOW)) {
			s->broken = 1;
			return 1;
		}
	}
	byte = s->text[(s->pos - s->window_at) & (WINDOW - 1)];
	if (c->in.state == HTTP_IDLE) {
		if (byte == '\r' || byte == '\n') { /* tolerated between messages */
			s->pos++;
			return 0;
		}
		if (byte < 'A' || byte > 'Z') {
			s->broken = 1;
			return 1;
		}
		http_begin(&c->in);
		c->head_first_ns = s->arrived;
		c->head_recv_ns = s->now;
		/* A head's text starts at a window's start, so that pieces are contiguous. */
		if (s->window_at != s->pos && !fill_window(s, WINDOW)) {
			s->broken = 1;
			return 1;
		}
		if (byte == 'H')
			c->head_methods |= 1ull << (c->in_seq & 63);
		else
			c->head_methods &= ~(1ull << (c->in_seq & 63));
		return 0;
	}
	s->pos++;
	switch (http_byte(&c->in, byte)) {
	case STEP_HEAD_END:
		emit_piece(s, c, 1);
		c->in_seq++;
		begin_body(&c->in, false, false);
		return 0;
	case STEP_MESSAGE_END:
		c->in.state = HTTP_IDLE;
		return 0;
	case STEP_BROKEN:
		s->broken = 1;
		return 1;
	default:
		return 0;
	}
}

static __always_inline void end_response(struct scan *s, struct conn *c, __u32 flags)
{
	struct http_response_end *e;

	e = whyspan_reserve(KIND_http_response_end, s->now, s->piece.tid, s->piece.tgid, c->out.status);
	if (e) {
		e->cookie = s->piece.cookie;
		e->first_body_ns = c->body_first_ns;
		e->chunks = c->chunks + (s->body_bytes ? 1 : 0);
		e->response_bytes = c->response_bytes + s->body_bytes;
		e->seq = c->out_seq;
		e->flags = flags;
		whyspan_submit(e);
	}
	c->out_seq++;
	c->out.state = HTTP_IDLE;
	c->chunks = 0;
	c->response_bytes = 0;
	c->body_first_ns = 0;
	s->body_bytes = 0;
}

static __always_inline void end_response_head(struct scan *s, struct conn *c)
{
	bool is_head = c->head_methods & (1ull << (c->out_seq & 63));
	__u16 status = c->out.status;
	struct http_response_head *e;

	if (status >= 100 && status < 200 && status != 101) { /* interim: the response is still to come */
		c->out.state = HTTP_IDLE;
		return;
	}
	e = whyspan_reserve(KIND_http_response_head, s->now, s->piece.tid, s->piece.tgid, status);
	if (e) {
		e->cookie = s->piece.cookie;
		e->offset = 0;
		e->seq = c->out_seq;
		e->bytes = c->out.head_bytes;
		e->_pad = 0;
		whyspan_submit(e);
	}
	if (begin_body(&c->out, is_head || status == 101 || status == 204 || status == 304, true))
		end_response(s, c, 0);
	if (status == 101)
		c->in.state = c->out.state = HTTP_FOREIGN;
}

static long response_step(__u32 i, struct walk *w)
{
	struct scan *s = w->scan;
	struct conn *c = w->conn;
	bool ended;
	__u8 byte;

	if (s->pos >= s->end)
		return 1;
	if (in_body(&c->out)) {
		__u32 bytes = skip_body(&c->out, s->end - s->pos, &ended);

		if (!c->body_first_ns)
			c->body_first_ns = s->now;
		s->body_bytes += bytes;
		s->pos += bytes;
		if (ended)
			end_response(s, c, 0);
		return 0;
	}
	if (s->pos - s->window_at >= s->window_bytes) {
		if (s->pos - s->base_at >= s->base_bytes) {
			if (!seek_buffer(s)) {
				s->broken = 1;
				return 1;
			}
			return 0;
		}
		/* A chunk's size line is short; a head is not. */
		if (!fill_window(s, c->out.state == HTTP_IDLE || c->out.state == HTTP_HEAD ? 256 : 16)) {
			s->broken = 1;
			return 1;
		}
	}
	byte = s->text[(s->pos - s->window_at) & (WINDOW - 1)];
	if (c->out.state == HTTP_IDLE) {
		if (byte != 'H' || c->out_seq == c->in_seq) {
			s->broken = 1;
			return 1;
		}
		http_begin(&c->out);
		return 0;
	}
	s->pos++;
	switch (http_byte(&c->out, byte)) {
	case STEP_HEAD_END:
		end_response_head(s, c);
		return 0;
	case STEP_MESSAGE_END:
		end_response(s, c, 0);
		return 0;
	case STEP_BROKEN:
		s->broken = 1;
		return 1;
	default:
		return 0;
	}
}

/* Point `s` at the user buffers of the system call that the current task is in. False: they cannot be known. */
static __always_inline bool find_buffers(struct scan *s)
{
	struct whyspan_call call = { .nr = -2 };

	s->iov = s->iov_left = s->base = s->base_at = s->base_bytes = 0;
	whyspan_read_call(bpf_get_current_task_btf(), &call);
	switch (call.nr) {
	case NR_READ:
	case NR_WRITE:
	case NR_RECVFROM:
	case NR_SENDTO:
		s->base = call.arg[1];
		s->base_bytes = call.arg[2];
		return true;
	case NR_READV:
	case NR_WRITEV:
		s->iov = call.arg[1];
		s->iov_left = call.arg[2];
		return true;
	case NR_RECVMSG:
	case NR_SENDMSG: {
		struct user_msghdr msg;

		if (bpf_probe_read_user(&msg, sizeof(msg), (void *)call.arg[1]))
			return false;
		s->iov = (__u64)msg.msg_iov;
		s->iov_left = msg.msg_iovlen;
		return true;
	}
	default:
		return false; /* sendfile, splice, io_uring: only bodies can be followed */
	}
}

#define FOUR(a, b, c, d) ((__u32)(a) | (__u32)(b) << 8 | (__u32)(c) << 16 | (__u32)(d) << 24)

static __always_inline bool begins_with_method(struct scan *s)
{
	__u64 word = 0;

	if (!seek_buffer(s) || bpf_probe_read_user(&word, sizeof(word), (void *)s->base))
		return false;
	switch ((__u32)word) { /* little-endian */
	case FOUR('G', 'E', 'T', ' '):
	case FOUR('P', 'U', 'T', ' '):
	case FOUR('P', 'O', 'S', 'T'):
	case FOUR('H', 'E', 'A', 'D'):
	case FOUR('P', 'A', 'T', 'C'):
	case FOUR('D', 'E', 'L', 'E'):
	case FOUR('O', 'P', 'T', 'I'):
		return true;
	default:
		return false;
	}
}

struct op {
	__u64 key;
	__u64 peer;
	__u64 offset;
	__u32 bytes;
	__u32 family;
	__u16 lport;
	__u16 rport;
	__u32 _pad;
};

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

static __always_inline void begin_scan(struct scan *s, const struct op *op, __u64 now, __u64 id)
{
	s->now = now;
	s->pos = 0;
	s->end = op->bytes;
	s->window_at = s->window_bytes = s->body_bytes = s->broken = 0;
	s->piece.cookie = op->key;
	s->piece.tid = (__u32)id;
	s->piece.tgid = id >> 32;
	s->piece.lport = op->lport;
	s->piece.rport = op->rport;
	s->piece._pad = 0;
}

static __always_inline __u64 take_arrival(__u64 cookie, __u64 now)
{
	__u64 *arrived = bpf_map_lookup_elem(&sockets_arrivals, &cookie), ts_ns;

	if (!arrived)
		return now;
	ts_ns = *arrived;
	bpf_map_delete_elem(&sockets_arrivals, &cookie);
	return ts_ns < now ? ts_ns : now;
}

static __always_inline void http_recv(const struct op *op, struct conn *c, __u64 now, __u64 id)
{
	struct scan *s = the_scan();
	struct walk w = { .scan = s, .conn = c };
	__u32 port = op->lport;
	bool readable;

	if (!s)
		return;
	begin_scan(s, op, now, id);
	s->arrived = take_arrival(op->key, now);
	readable = find_buffers(s);
	if (!c || c->in.state == HTTP_FOREIGN) {
		struct conn fresh = {};

		if (!readable || !begins_with_method(s))
			return;
		bpf_map_update_elem(&sockets_ports, &port, &port, BPF_ANY);
		if (c) {
			fresh.in_seq = fresh.out_seq = c->in_seq + 1; /* never reuse a number of this connection */
		}
		fresh.in.state = fresh.out.state = HTTP_IDLE;
		bpf_map_update_elem(&sockets_conns, &op->key, &fresh, BPF_ANY);
		w.conn = c = bpf_map_lookup_elem(&sockets_conns, &op->key);
		if (!c)
			return;
	}
	bpf_loop(MAX_STEPS, request_step, &w, 0);
	if (s->pos < s->end || s->broken) {
		emit_lost(s, c, 1);
		c->in.state = HTTP_FOREIGN;
	} else if (c->in.state == HTTP_HEAD) {
		emit_piece(s, c, 0);
	}
}

static __always_inline void http_send(const struct op *op, struct conn *c, __u64 now, __u64 id)
{
	struct scan *s = the_scan();
	struct walk w = { .scan = s, .conn = c };

	if (!s || c->out.state == HTTP_FOREIGN)
		return;
	begin_scan(s, op, now, id);
	find_buffers(s);
	bpf_loop(MAX_STEPS, response_step, &w, 0);
	if (s->body_bytes) {
		c->chunks++;
		c->response_bytes += s->body_bytes;
	}
	if (s->pos < s->end || s->broken) {
		if (c->out_seq != c->in_seq)
			emit_lost(s, c, 2);
		c->out.state = HTTP_FOREIGN;
		c->in.state = HTTP_FOREIGN;
	}
}

static __always_inline int on_data(struct sock *sk, __u64 cookie, int bytes, bool recv)
{
	__u64 id = bpf_get_current_pid_tgid(), now;
	struct op op = {};
	struct conn *c;

	op.family = BPF_CORE_READ(sk, __sk_common.skc_family);
	if (op.family != AF_UNIX && op.family != AF_INET && op.family != AF_INET6)
		return 0;
	if (BPF_CORE_READ(sk, sk_type) != SOCK_STREAM && op.family != AF_UNIX)
		return 0;
	now = bpf_ktime_get_ns();
	op.bytes = bytes;
	if (op.family == AF_UNIX) {
		op.key = whyspan_key(sk);
		op.peer = whyspan_key(BPF_CORE_READ((struct unix_sock *)sk, peer));
		c = bpf_map_lookup_elem(&sockets_conns, &op.key);
		if (!c) {
			struct conn fresh = {};

			bpf_map_update_elem(&sockets_conns, &op.key, &fresh, BPF_ANY);
			c = bpf_map_lookup_elem(&sockets_conns, &op.key);
		}
		if (c) {
			op.offset = recv ? c->in_bytes : c->out_bytes;
			if (recv)
				c->in_bytes += op.bytes;
			else
				c->out_bytes += op.bytes;
		}
		emit_data(&op, recv ? KIND_sock_recv : KIND_sock_send, now, id);
		return 0;
	}
	op.key = cookie;
	op.lport = BPF_CORE_READ(sk, __sk_common.skc_num);
	op.rport = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
	/* TCP's own sequence space: both ends agree on it. */
	op.offset = (recv ? BPF_CORE_READ((struct tcp_sock *)sk, copied_seq) :
			    BPF_CORE_READ((struct tcp_sock *)sk, write_seq)) -
		    op.bytes;
	op.offset &= 0xffffffff;
	emit_data(&op, recv ? KIND_sock_recv : KIND_sock_send, now, id);
	if (!cfg.http)
		return 0;
	c = bpf_map_lookup_elem(&sockets_conns, &op.key);
	if (recv)
		http_recv(&op, c, now, id);
	else if (c)
		http_send(&op, c, now, id);
	return 0;
}

SEC("tp_btf/sock_recv_length")
int BPF_PROG(sockets_recv_tp, struct sock *sk, int ret, int flags)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32;

	if (!whyspan_is_watched(tgid) || ret <= 0 || (flags & MSG_PEEK))
		return 0;
	return on_data(sk, bpf_get_socket_cookie(sk), ret, true);
}

SEC("tp_btf/sock_send_length")
int BPF_PROG(sockets_send_tp, struct sock *sk, int ret, int flags)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32;

	if (!whyspan_is_watched(tgid) || ret <= 0)
		return 0;
	return on_data(sk, bpf_get_socket_cookie(sk), ret, false);
}

/* The socket behind a descriptor of the current task, or NULL. */
static __always_inline struct sock *socket_of(__u32 fd)
{
	struct file *file = whyspan_file_of(bpf_get_current_task_btf(), fd);

	return file && (BPF_CORE_READ(file, f_inode, i_mode) & S_IFMT) == S_IFSOCK ? whyspan_sock_of(file) : NULL;
}

static __noinline int on_call_exit(long ret, bool recv)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32;
	struct whyspan_call call = { .nr = -2 };
	struct sock *sk;
	__u64 cookie;

	if (ret <= 0 || ret > 0x7fffffff || !whyspan_is_watched(tgid))
		return 0;
	whyspan_read_call(bpf_get_current_task_btf(), &call);
	sk = socket_of(call.arg[0]);
	if (!sk)
		return 0;
	cookie = BPF_CORE_READ(sk, __sk_common.skc_cookie.counter);
	/* A cookie is made when first asked for; before, the address stands in for it. */
	return on_data(sk, cookie ? cookie : whyspan_key(sk), ret, recv);
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

static __always_inline int on_state(const struct sock *sk, __u64 cookie, int old_state, int new_state, __u32 reset)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct sock_state *e;
	struct conn *c = bpf_map_lookup_elem(&sockets_conns, &cookie);
	struct scan *s = the_scan();

	if (!c || !s)
		return 0;
	if (c->out.state == HTTP_UNTIL_CLOSE && (new_state == TCP_FIN_WAIT1 || new_state == TCP_LAST_ACK)) {
		struct op op = { .key = cookie };

		begin_scan(s, &op, bpf_ktime_get_ns(), id);
		end_response(s, c, END_BY_CLOSE);
	}
	e = whyspan_reserve(KIND_sock_state, bpf_ktime_get_ns(), (__u32)id, id >> 32, reset);
	if (e) {
		e->cookie = cookie;
		e->old_state = old_state;
		e->new_state = new_state;
		e->lport = BPF_CORE_READ(sk, __sk_common.skc_num);
		e->rport = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
		e->_pad = 0;
		e->_pad2 = 0;
		whyspan_submit(e);
	}
	if (new_state == TCP_CLOSE)
		bpf_map_delete_elem(&sockets_conns, &cookie);
	return 0;
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(sockets_state_tp, struct sock *sk, int old_state, int new_state)
{
	__u64 cookie = BPF_CORE_READ(sk, __sk_common.skc_cookie.counter);

	return on_state(sk, cookie ? cookie : whyspan_key(sk), old_state, new_state, 0);
}

/* In a soft interrupt, for every socket of the host: sockets of other ports leave at the first look-up. */
SEC("tp_btf/sk_data_ready")
int BPF_PROG(sockets_arrival_tp, struct sock *sk)
{
	__u16 family = BPF_CORE_READ(sk, __sk_common.skc_family);
	__u32 port = BPF_CORE_READ(sk, __sk_common.skc_num), *known;
	__u64 cookie, now;

	if (family != AF_INET && family != AF_INET6)
		return 0;
	known = bpf_map_lookup_elem(&sockets_ports, &port);
	if (!known || BPF_CORE_READ(sk, __sk_common.skc_state) == TCP_LISTEN)
		return 0;
	cookie = bpf_get_socket_cookie(sk);
	now = bpf_ktime_get_ns();
	bpf_map_update_elem(&sockets_arrivals, &cookie, &now, BPF_NOEXIST);
	return 0;
}

SEC("tp_btf/tcp_receive_reset")
int BPF_PROG(sockets_reset_tp, struct sock *sk)
{
	__u64 cookie = BPF_CORE_READ(sk, __sk_common.skc_cookie.counter);

	return on_state(sk, cookie ? cookie : whyspan_key(sk), 0, 0, 1);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
