/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * One send or receive under examination: its user buffers, read a window at a time, and the connection that
 * it belongs to.
 */
#pragma once

#include "sockets_events.bpf.h"
#include "http1.bpf.h"

#define WINDOW 512	/* bytes of head copied at a time */
#define MAX_STEPS 20000 /* bytes of framing examined per operation; more is a broken peer */

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} whyspan_blobs SEC(".maps");

struct conn {
	struct http_side in;
	struct http_side out;
	__u64 head_first_ns;
	__u64 head_recv_ns;
	__u64 head_reader; /* tgid and tid that read its first byte */
	__u64 body_first_ns;
	__u64 head_methods; /* bit seq % 64: that request was a HEAD, its response has no body */
	__u32 in_seq;	    /* requests begun */
	__u32 out_seq;	    /* responses ended */
	__u32 chunks;
	__u32 response_bytes;
	__u32 tls; /* 1 = followed where it is in the clear, at the TLS library */
	__u32 _pad;
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
	__u16 broken;
	__u16 tls; /* 1 = from the TLS library */
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

struct op {
	__u64 key;
	__u64 peer;
	__u64 sock_key; /* of an internet socket, beside its cookie */
	__u64 offset;
	__u32 bytes;
	__u32 family;
	__u16 lport;
	__u16 rport;
	__u32 left; /* bytes that a receive left in the socket */
	__u32 dead; /* 1 = the connection has ended; what is read was left in the socket */
	__u32 _pad;
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

/* Point `s` at the user buffers of the system call that the current task is in. False: they cannot be known.
 */
static __always_inline bool find_buffers(struct scan *s)
{
	struct whyspan_call call = { .nr = -2 };

	s->iov = s->iov_left = s->base = s->base_at = s->base_bytes = 0;
	whyspan_current_call(&call);
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

static __always_inline void begin_scan(struct scan *s, const struct op *op, __u64 now, __u64 id)
{
	s->now = now;
	s->pos = 0;
	s->end = op->bytes;
	s->window_at = s->window_bytes = s->body_bytes = s->broken = s->tls = 0;
	s->piece.cookie = op->key;
	s->piece.tid = (__u32)id;
	s->piece.tgid = id >> 32;
	s->piece.lport = op->lport;
	s->piece.rport = op->rport;
}

/* Who made the operation under examination, as the kernel has it: tgid and tid. */
static __always_inline __u64 scan_id(const struct scan *s)
{
	return (__u64)s->piece.tgid << 32 | s->piece.tid;
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

static __always_inline void take_arrival(struct scan *s, __u64 sock_key, __u32 left)
{
	struct arrival *arrival = bpf_map_lookup_elem(&sockets_arrivals, &sock_key);

	s->first_arrival = s->last_arrival = s->now;
	if (!arrival)
		return;
	if (arrival->first_ns < s->now)
		s->first_arrival = arrival->first_ns;
	if (arrival->last_ns < s->now)
		s->last_arrival = arrival->last_ns;
	if (left > 1 && !(left >> 31)) /* more than a FIN, which counts as one */
		arrival->first_ns = arrival->last_ns;
	else
		bpf_map_delete_elem(&sockets_arrivals, &sock_key);
}
