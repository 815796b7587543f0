/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * How messages end: whole, or cut off with their connection. Each request gets its end, also one whose head
 * never came whole and one that nobody read.
 */
#pragma once

#include "http_scan.bpf.h"

#define HTTP_MIN_HEAD 4 /* bytes; with no more than these it need not be HTTP */
#define HTTP_REQUEST_LOST 1
#define HTTP_RESPONSE_LOST 2
#define HTTP_REQUEST_UNREAD 3

static __always_inline void end_response(struct conn *c, __u64 cookie, __u64 now, __u64 id, __u32 body_bytes,
					 __u32 flags)
{
	struct http_response_end *e;

	e = whyspan_reserve(KIND_http_response_end, now, (__u32)id, id >> 32, c->out.status);
	if (e) {
		e->cookie = cookie;
		e->first_body_ns = c->body_first_ns;
		e->chunks = c->chunks + (body_bytes ? 1 : 0);
		e->response_bytes = c->response_bytes + body_bytes;
		e->seq = c->out_seq;
		e->flags = flags;
		whyspan_submit(e);
	}
	c->out_seq++;
	c->out.state = HTTP_IDLE;
	c->chunks = 0;
	c->response_bytes = 0;
	c->body_first_ns = 0;
}

/*
 * Make a request of a head that will not come whole. Its text is in user space already: a last piece without
 * text says that there is no more.
 */
static __always_inline void cut_head(struct conn *c, __u64 cookie, __u16 lport, __u16 rport, __u64 now)
{
	struct http_piece piece = {
		.ts_ns = now,
		.first_ns = c->head_first_ns,
		.recv_ns = c->head_recv_ns,
		.cookie = cookie,
		.tid = (__u32)c->head_reader,
		.tgid = c->head_reader >> 32,
		.seq = c->in_seq,
		.last = 1,
		.lport = lport,
		.rport = rport,
		.offset = c->in.head_bytes,
	};

	if (c->in.state != HTTP_HEAD || c->in.head_bytes <= HTTP_MIN_HEAD)
		return;
	if (bpf_ringbuf_output(&whyspan_blobs, &piece, sizeof(piece), BPF_RB_NO_WAKEUP))
		whyspan_drop(KIND_http_head_lost);
	c->in_seq++;
	c->in.state = HTTP_FOREIGN;
}

/* Nothing more will be sent: what is in progress ends here. The thread may have nothing to do with it. */
static __always_inline void close_http(struct conn *c, __u64 cookie, __u16 lport, __u16 rport, __u64 now,
				       bool orderly)
{
	bool whole = orderly && c->out.state == HTTP_UNTIL_CLOSE;

	if (c->out.state > HTTP_HEAD)
		end_response(c, cookie, now, bpf_get_current_pid_tgid(), 0, whole ? END_BY_CLOSE : END_CUT);
	cut_head(c, cookie, lport, rport, now);
}

/*
 * A socket closes with bytes that nobody read: a request, unless they belong to one that is known. Returns
 * whether there was one.
 */
static __always_inline bool emit_unread(const struct sock *sk, struct conn *c, __u64 cookie, __u16 lport,
					__u16 rport, const struct arrival *arrival, __u64 now, __u64 id)
{
	const struct tcp_sock *tcp = (const struct tcp_sock *)sk;
	__u32 bytes = BPF_CORE_READ(tcp, rcv_nxt) - BPF_CORE_READ(tcp, copied_seq);
	struct http_head_lost *e;

	/* The peer's FIN counts as one. */
	if (bytes <= HTTP_MIN_HEAD || bytes >> 31)
		return false;
	/* After a whole request, or the first bytes of a connection: of another protocol some would be read.
	 */
	if (c ? c->in.state != HTTP_IDLE : BPF_CORE_READ(tcp, bytes_received) > bytes)
		return false;
	e = whyspan_reserve(KIND_http_head_lost, now, (__u32)id, id >> 32, HTTP_REQUEST_UNREAD);
	if (!e)
		return false;
	e->cookie = cookie;
	e->seq = c ? c->in_seq : 0;
	e->bytes = bytes;
	e->lport = lport;
	e->rport = rport;
	e->_pad = 0;
	e->first_ns = arrival->first_ns;
	whyspan_submit(e);
	return true;
}
