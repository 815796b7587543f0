/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Follows the HTTP/1.1 messages of a connection: heads of requests are sent to user space, bodies are skipped
 * unread, responses are counted and their ends marked. Requests and responses are paired by number.
 */
#pragma once

#include "http_end.bpf.h"

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
	e->seq = which == HTTP_REQUEST_LOST ? c->in_seq : c->out_seq;
	e->bytes = which == HTTP_REQUEST_LOST ? c->in.head_bytes : c->out.head_bytes;
	e->lport = s->piece.lport;
	e->rport = s->piece.rport;
	e->_pad = 0;
	e->first_ns = 0;
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

enum refill {
	REFILL_READY,
	REFILL_AGAIN,  /* moved to the next user buffer, which may be empty */
	REFILL_FAILED, /* the bytes cannot be read: the message is broken */
};

/* Bring the byte at `pos` into text[], with up to `want` bytes after it. */
static __always_inline enum refill refill(struct scan *s, __u32 want)
{
	if (s->pos - s->base_at >= s->base_bytes) {
		s->broken = !seek_buffer(s);
		return s->broken ? REFILL_FAILED : REFILL_AGAIN;
	}
	s->broken = !fill_window(s, want);
	return s->broken ? REFILL_FAILED : REFILL_READY;
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
		switch (refill(s, WINDOW)) {
		case REFILL_AGAIN:
			return 0;
		case REFILL_FAILED:
			return 1;
		default:
			break;
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
		c->head_reader = scan_id(s);
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

static __always_inline void response_done(struct scan *s, struct conn *c)
{
	end_response(c, s->piece.cookie, s->now, scan_id(s), s->body_bytes, 0);
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
		response_done(s, c);
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
			response_done(s, c);
		return 0;
	}
	if (s->pos - s->window_at >= s->window_bytes) {
		/* A chunk's size line is short; a head is not. */
		switch (refill(s, c->out.state == HTTP_IDLE || c->out.state == HTTP_HEAD ? 256 : 16)) {
		case REFILL_AGAIN:
			return 0;
		case REFILL_FAILED:
			return 1;
		default:
			break;
		}
	}
	byte = s->text[(s->pos - s->window_at) & (WINDOW - 1)];
	if (c->out.state == HTTP_IDLE) {
		/* An answer before the head was whole: it was refused, or given up. */
		if (byte == 'H' && c->out_seq == c->in_seq)
			cut_head(c, s->piece.cookie, s->piece.lport, s->piece.rport, s->now);
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
		response_done(s, c);
		return 0;
	case STEP_BROKEN:
		s->broken = 1;
		return 1;
	default:
		return 0;
	}
}

/* Follow a receive whose buffers and arrival `s` knows; `readable`: its bytes can be read. */
static __always_inline void follow_recv(struct scan *s, const struct op *op, struct conn *c, bool readable)
{
	struct walk w = { .scan = s, .conn = c };

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
		fresh.tls = s->tls;
		bpf_map_update_elem(&sockets_conns, &op->key, &fresh, BPF_ANY);
		w.conn = c = bpf_map_lookup_elem(&sockets_conns, &op->key);
		if (!c)
			return;
	}
	bpf_loop(MAX_STEPS, request_step, &w, 0);
	if (s->pos < s->end || s->broken) {
		if (c->in_seq || c->in.head_bytes > HTTP_MIN_HEAD) /* else it never was HTTP */
			emit_lost(s, c, HTTP_REQUEST_LOST);
		if (c->in.state == HTTP_HEAD && c->in.head_bytes > HTTP_MIN_HEAD) {
			/* Too long, or against the grammar: a request all the same, which will be refused. */
			emit_piece(s, c, 1);
			c->in_seq++;
		}
		c->in.state = HTTP_FOREIGN;
	} else if (c->in.state == HTTP_HEAD) {
		emit_piece(s, c, 0);
	}
}

static __always_inline void http_recv(struct scan *s, const struct op *op, struct conn *c, __u64 now,
				      __u64 id)
{
	begin_scan(s, op, now, id);
	take_arrival(s, op->sock_key, op->left);
	follow_recv(s, op, c, find_buffers(s));
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

/* Follow a send whose buffers `s` knows. */
static __always_inline void follow_send(struct scan *s, struct conn *c)
{
	struct walk w = { .scan = s, .conn = c };

	if (!whole_chunk(s, c))
		bpf_loop(MAX_STEPS, response_step, &w, 0);
	if (s->body_bytes) {
		c->chunks++;
		c->response_bytes += s->body_bytes;
	}
	if (s->pos < s->end || s->broken) {
		if (c->out_seq != c->in_seq)
			emit_lost(s, c, HTTP_RESPONSE_LOST);
		c->out.state = HTTP_FOREIGN;
		c->in.state = HTTP_FOREIGN;
	}
}

static __always_inline void http_send(struct scan *s, const struct op *op, struct conn *c, __u64 now,
				      __u64 id)
{
	if (c->out.state == HTTP_FOREIGN)
		return;
	begin_scan(s, op, now, id);
	find_buffers(s);
	follow_send(s, c);
}
