// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * sockets: data in and out of the watched processes' sockets, and the HTTP/1.1 requests on them.
 *
 * Hooks sock_recv_length and sock_send_length (6.3+), which see every call on every socket whatever the
 * library, or else the exit of eight system calls. Connections are named by the socket's cookie, so dup,
 * descriptor passing and other acceptors are right. Reads user memory only where HTTP framing must be: heads,
 * chunk sizes. Bodies are skipped unread. Only connections that began with a request are followed.
 *
 * A request begins when its first byte reaches the socket (sk_data_ready), not when the server gets to
 * reading it: the wait of an accepted or still unaccepted connection is the server's. io_uring is not seen.
 * Cost: about 0.4 us per operation, 4 us per request head.
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

#define WINDOW 512	/* bytes of head copied at a time */
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
	__u64 recv_ns;	/* when the process read it */
	__u64 cookie;
	__u32 tid;
	__u32 tgid;
	__u32 seq;
	__u16 bytes;
	__u16 last; /* 1 = the head ends here */
	__u16 lport;
	__u16 rport;
	__u32 offset; /* of the text within the head: a gap shows that a piece was lost */
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
	__u64 in_bytes;	    /* unix sockets: stream offsets */
	__u64 out_bytes;
	__u32 in_seq;  /* requests begun */
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

/* Local ports on which a request was seen, one bit each: only their sockets' arrivals are noted. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u64);
} sockets_ports SEC(".maps");

struct arrival {
	__u64 first_ns;
	__u64 last_ns;
};

/* When data reached a socket that nobody has read from since, by the socket's key. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct arrival);
} sockets_arrivals SEC(".maps");

/* One operation under examination; too large for the stack. */
struct scan {
	struct http_piece piece; /* with text[] after it: one contiguous output */
	char text[WINDOW];
	__u64 now;
	__u64 first_arrival; /* when the operation's first byte reached the socket */
	__u64 last_arrival;  /* when its last bytes did, at the latest */
	__u64 iov;	     /* user address of the next iovec */
	__u64 iov_left;
	__u64 base;    /* of the current user buffer */
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
	s->piece.offset = c->in.head_bytes - bytes;
	s->piece.last = last;
	total = bytes;
	barrier_var(total); /* or clang folds the check below into one the verifier cannot follow */
	if (total <= WINDOW &&
	    bpf_ringbuf_output(&whyspan_blobs, s, sizeof(s->piece) + total, BPF_RB_NO_WAKEUP))
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
		c->head_first_ns = s->pos ? s->last_arrival : s->first_arrival;
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

/* Point `s` at the user buffers of the system call that the current task is in. False: they cannot be known.
 */
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

static __always_inline bool begins_with_method(struct scan *s)
{
	__u32 word = 0, mask = ~0u;
	__u64 bytes;

	for (int i = 0; i < 4 && !s->base_bytes; i++) /* the first buffers may be empty */
		if (!seek_buffer(s))
			return false;
	bytes = s->base_bytes < s->end ? s->base_bytes : s->end;
	if (bytes > sizeof(word))
		bytes = sizeof(word);
	barrier_var(bytes);
	if (!bytes || bytes > sizeof(word) || bpf_probe_read_user(&word, bytes, (void *)s->base))
		return false;
	if (bytes < sizeof(word)) /* the start of a method will do: http_head_byte() looks at the rest */
		mask = (1u << (8 * bytes)) - 1;
	return http_is_method(word, mask);
}

struct op {
	__u64 key;
	__u64 peer;
	__u64 sock_key; /* of an internet socket, beside its cookie */
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
}

static __always_inline void serve_port(__u16 port)
{
	__u32 word = port >> 6;
	__u64 *ports = bpf_map_lookup_elem(&sockets_ports, &word);

	if (ports)
		__sync_fetch_and_or(ports, 1ull << (port & 63));
}

static __always_inline bool is_served(__u16 port)
{
	__u32 word = port >> 6;
	__u64 *ports = bpf_map_lookup_elem(&sockets_ports, &word);
	__u64 bits = ports ? *ports : 0;

	return bits & (1ull << (port & 63));
}

static __always_inline void take_arrival(struct scan *s, __u64 sock_key)
{
	struct arrival *arrival = bpf_map_lookup_elem(&sockets_arrivals, &sock_key);

	s->first_arrival = s->last_arrival = s->now;
	if (!arrival)
		return;
	if (arrival->first_ns < s->now)
		s->first_arrival = arrival->first_ns;
	if (arrival->last_ns < s->now)
		s->last_arrival = arrival->last_ns;
	bpf_map_delete_elem(&sockets_arrivals, &sock_key);
}

static __always_inline void http_recv(const struct op *op, struct conn *c, __u64 now, __u64 id)
{
	struct scan *s = the_scan();
	struct walk w = { .scan = s, .conn = c };
	bool readable;

	if (!s)
		return;
	begin_scan(s, op, now, id);
	take_arrival(s, op->sock_key);
	readable = find_buffers(s);
	if (!c || c->in.state == HTTP_FOREIGN) {
		struct conn fresh = {};

		if (!readable || !begins_with_method(s))
			return;
		serve_port(op->lport);
		if (c) {
			fresh.in_seq = fresh.out_seq =
				c->in_seq + 1; /* never reuse a number of this connection */
		}
		fresh.in.state = fresh.out.state = HTTP_IDLE;
		bpf_map_update_elem(&sockets_conns, &op->key, &fresh, BPF_ANY);
		w.conn = c = bpf_map_lookup_elem(&sockets_conns, &op->key);
		if (!c)
			return;
	}
	bpf_loop(MAX_STEPS, request_step, &w, 0);
	if (s->pos < s->end || s->broken) {
		if (c->in_seq || c->in.head_bytes > 4) /* else it never was HTTP */
			emit_lost(s, c, 1);
		c->in.state = HTTP_FOREIGN;
	} else if (c->in.state == HTTP_HEAD) {
		emit_piece(s, c, 0);
	}
}

/*
 * The usual send of a stream is one whole chunk: its size line, its data, its CRLF. True when this was one,
 * read from 16 bytes of it; the general walk over every line of framing costs three times as much.
 */
static __always_inline bool whole_chunk(struct scan *s, struct conn *c)
{
	__u32 size = 0, digits = 0, i;
	char text[8] = {};

	if (c->out.state != HTTP_CHUNK_SIZE || c->out.length || s->end < 16 || !seek_buffer(s) ||
	    s->base_bytes < 8 || bpf_probe_read_user(text, sizeof(text), (void *)s->base))
		return false;
	for (i = 0; i < 6; i++) {
		__u8 ch = text[i], lower = ch | 0x20;

		if (ch == '\r')
			break;
		if (ch >= '0' && ch <= '9')
			size = size * 16 + (ch - '0');
		else if (lower >= 'a' && lower <= 'f')
			size = size * 16 + (lower - 'a' + 10);
		else
			return false;
		digits++;
	}
	if (!digits || digits == 6 || !size || s->end != digits + 2 + size + 2)
		return false;
	if (!c->body_first_ns)
		c->body_first_ns = s->now;
	s->body_bytes = size;
	s->pos = s->end;
	return true;
}

static __always_inline void http_send(const struct op *op, struct conn *c, __u64 now, __u64 id)
{
	struct scan *s = the_scan();
	struct walk w = { .scan = s, .conn = c };

	if (!s || c->out.state == HTTP_FOREIGN)
		return;
	begin_scan(s, op, now, id);
	find_buffers(s);
	if (!whole_chunk(s, c))
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
	struct conn *c;

	if (op->family == AF_UNIX)
		count_stream(op, recv);
	emit_data(op, recv ? KIND_sock_recv : KIND_sock_send, now, id);
	if (op->family == AF_UNIX || !cfg.http)
		return 0;
	c = bpf_map_lookup_elem(&sockets_conns, &op->key);
	if (recv)
		http_recv(op, c, now, id);
	else if (c)
		http_send(op, c, now, id);
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
		/* TCP's own sequence space: both ends agree on it. */
		op->offset = (__u32)((recv ? tcp->copied_seq : tcp->write_seq) - op->bytes);
		return true;
	}
	return false;
}

SEC("tp_btf/sock_recv_length")
int BPF_PROG(sockets_recv_tp, struct sock *sk, int ret, int flags)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct op op = {};

	if (ret <= 0 || (flags & MSG_PEEK) || !whyspan_is_watched(id >> 32))
		return 0;
	return describe(sk, ret, true, &op) ? on_data(&op, id, true) : 0;
}

SEC("tp_btf/sock_send_length")
int BPF_PROG(sockets_send_tp, struct sock *sk, int ret, int flags)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct op op = {};

	if (ret <= 0 || !whyspan_is_watched(id >> 32))
		return 0;
	return describe(sk, ret, false, &op) ? on_data(&op, id, false) : 0;
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

		op->key = whyspan_cookie(sk);
		op->sock_key = whyspan_key(sk);
		op->lport = BPF_CORE_READ(sk, __sk_common.skc_num);
		op->rport = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
		op->offset = (__u32)((recv ? BPF_CORE_READ(tcp, copied_seq) : BPF_CORE_READ(tcp, write_seq)) -
				     op->bytes);
		return true;
	}
	return false;
}

/* The socket behind a descriptor of the current task, or NULL. */
static __always_inline struct sock *socket_of(__u32 fd)
{
	struct file *file = whyspan_file_of(bpf_get_current_task_btf(), fd);

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
	whyspan_read_call(bpf_get_current_task_btf(), &call);
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

static __always_inline int on_state(const struct sock *sk, __u64 cookie, int old_state, int new_state,
				    __u32 reset)
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
	if ((new_state == TCP_CLOSE || new_state == TCP_ESTABLISHED) && is_served(sk->__sk_common.skc_num)) {
		__u64 key = whyspan_key(sk);

		bpf_map_delete_elem(&sockets_arrivals, &key); /* left by another socket at this address */
	}
	return on_state(sk, whyspan_cookie(sk), old_state, new_state, 0);
}

/* In a soft interrupt, for every socket of the host: sockets of other ports leave at the first look-up. */
SEC("tp_btf/sk_data_ready")
int BPF_PROG(sockets_arrival_tp, struct sock *sk)
{
	__u16 family = sk->__sk_common.skc_family;
	struct arrival *known, fresh;
	__u64 key;

	if ((family != AF_INET && family != AF_INET6) || !is_served(sk->__sk_common.skc_num) ||
	    sk->__sk_common.skc_state == TCP_LISTEN)
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

SEC("tp_btf/tcp_receive_reset")
int BPF_PROG(sockets_reset_tp, struct sock *sk)
{
	return on_state(sk, whyspan_cookie(sk), 0, 0, 1);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
