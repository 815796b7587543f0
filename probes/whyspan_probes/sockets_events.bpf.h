/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The records of the probe `sockets`: on the rings, and pieces of request heads on the blob ring. */
#pragma once

WHYSPAN_KINDS(sockets, KIND_sock_recv, KIND_sock_send, KIND_http_response_head, KIND_http_response_end,
	      KIND_sock_state, KIND_http_head_lost, KIND_tls_handshake);

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
#define END_CUT 2u /* the connection ended before the response did */

struct sock_state {
	struct whyspan_head head; /* aux: 1 reset received, 0 state change */
	__u64 cookie;
	__u32 old_state;
	__u32 new_state;
	__u16 lport;
	__u16 rport;
	__u32 error; /* errno of the socket */
	__u64 _pad;
};
WHYSPAN_EVENT(sock_state);

/*
 * A head that went past the limit or broke the grammar, the connection being left until its next request; or
 * bytes that nobody had read when their connection ended.
 */
struct http_head_lost {
	struct whyspan_head head; /* aux: 1 request, 2 response, 3 request never read */
	__u64 cookie;
	__u32 seq;
	__u32 bytes;
	__u16 lport;
	__u16 rport;
	__u32 _pad;
	__u64 first_ns; /* when its first byte reached the socket; only of the third */
};
WHYSPAN_EVENT(http_head_lost);

struct tls_handshake {
	struct whyspan_head head; /* ts_ns = its end */
	__u64 begin_ns;
	__u64 cookie;  /* of the connection whose data ended it; 0 not known */
	__u64 session; /* opaque name of the session's object */
	__u32 calls;   /* into the library: one if it blocks, else one for each flight */
	__u16 lport;
	__u16 rport;
};
WHYSPAN_EVENT(tls_handshake);

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
