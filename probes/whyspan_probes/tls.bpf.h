/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * HTTPS: requests on TLS connections, read in the clear where the program does, at OpenSSL's SSL_read,
 * SSL_read_ex, SSL_write and SSL_write_ex, and how long handshakes took.
 *
 * Which connection an SSL object is of follows from the thread: what it decrypts it has just received. That
 * holds for sockets that OpenSSL reads itself and for memory BIOs (asyncio), where the program does. The
 * connection is then the same as everywhere else, named by the socket's cookie.
 *
 * What a call gave is known at its return, so these are return probes: not in every process, see
 * user_hooks.py and safety.py. A uprobe's program may be preempted: its scratch memory belongs to the thread,
 * not to the CPU. Cost: two traps, 2 to 3 us a call, in processes that use TLS; one look at a flag in all
 * others.
 */
#pragma once

#include "http_follow.bpf.h"

/* Numbers of sockets.py's cookies. */
enum tls_function { TLS_READ, TLS_READ_EX, TLS_WRITE, TLS_WRITE_EX };

/* 1 = a watched process has called OpenSSL: from now on it is noted which thread received from what. */
__u32 tls_seen;

struct tls_session {
	__u64 object; /* address of the SSL object */
	__u32 tgid;
	__u32 _pad;
};

struct tls_received {
	__u64 cookie;
	__u64 first_ns; /* when the bytes reached the socket: the first, and the last */
	__u64 last_ns;
	__u16 lport;
	__u16 rport;
	__u32 _pad;
};

/* What a thread received last, by tid. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct tls_received);
} tls_last SEC(".maps");

/* Whose data a session decrypts. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct tls_session);
	__type(value, struct tls_received);
} tls_sessions SEC(".maps");

struct tls_call {
	__u64 object;
	__u64 buffer;
	__u64 moved; /* address of the number of bytes moved; 0: the result is */
};

/* Calls in progress, by tid. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct tls_call);
} tls_calls SEC(".maps");

struct tls_begun {
	__u64 begin_ns;
	__u32 calls;
	__u32 _pad;
};

/* Handshakes begun and not ended. Those that never end are crowded out. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct tls_session);
	__type(value, struct tls_begun);
} tls_handshakes SEC(".maps");

/* The object of the handshake that a thread is in, by tid. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u64);
} tls_shaking SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 512);
	__type(key, __u32);
	__type(value, struct scan);
} tls_scans SEC(".maps");

const struct scan tls_blank = {};

/* Remember what a thread has just received; `s` knows when it arrived. */
static __always_inline void tls_note(const struct op *op, const struct scan *s, __u64 id)
{
	struct tls_received last = {
		.cookie = op->key,
		.first_ns = s->first_arrival,
		.last_ns = s->last_arrival,
		.lport = op->lport,
		.rport = op->rport,
	};
	__u32 tid = id;

	if (tls_seen)
		bpf_map_update_elem(&tls_last, &tid, &last, BPF_ANY);
}

static __always_inline struct scan *tls_scan(__u32 tid)
{
	struct scan *s = bpf_map_lookup_elem(&tls_scans, &tid);

	if (s)
		return s;
	bpf_map_update_elem(&tls_scans, &tid, &tls_blank, BPF_NOEXIST);
	return bpf_map_lookup_elem(&tls_scans, &tid);
}

static __always_inline int tls_enter(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), function = bpf_get_attach_cookie(ctx);
	bool ex = function == TLS_READ_EX || function == TLS_WRITE_EX;
	struct tls_call call = {
		.object = PT_REGS_PARM1(ctx),
		.buffer = PT_REGS_PARM2(ctx),
		.moved = ex ? PT_REGS_PARM4(ctx) : 0,
	};
	__u32 tid = id;

	if (!whyspan_is_watched(id >> 32))
		return 0;
	tls_seen = 1;
	bpf_map_update_elem(&tls_calls, &tid, &call, BPF_ANY);
	return 0;
}

/* How many bytes a call moved; 0 none. */
static __always_inline __u32 tls_moved(const struct tls_call *call, long result)
{
	__u64 bytes = 0;

	if ((__s32)result <= 0)
		return 0;
	if (!call->moved)
		return (__s32)result;
	if (bpf_probe_read_user(&bytes, sizeof(bytes), (const void *)call->moved) || bytes > 0x7fffffff)
		return 0;
	return bytes;
}

static __always_inline int tls_return(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), function = bpf_get_attach_cookie(ctx);
	bool recv = function == TLS_READ || function == TLS_READ_EX;
	struct tls_session session = { .tgid = id >> 32 };
	struct tls_call *found, call;
	struct tls_received *from;
	struct op op = {};
	__u32 tid = id;
	struct conn *c;
	struct scan *s;

	if (!whyspan_is_watched(id >> 32))
		return 0;
	found = bpf_map_lookup_elem(&tls_calls, &tid);
	if (!found)
		return 0;
	call = *found;
	bpf_map_delete_elem(&tls_calls, &tid);
	op.bytes = tls_moved(&call, PT_REGS_RC(ctx));
	if (!op.bytes)
		return 0;
	session.object = call.object;
	from = bpf_map_lookup_elem(&tls_sessions, &session);
	if (recv) {
		struct tls_received *last = bpf_map_lookup_elem(&tls_last, &tid);

		/* Its arrival is news; its connection only where that is not known yet. */
		if (last && (!from || from->cookie == last->cookie)) {
			bpf_map_update_elem(&tls_sessions, &session, last, BPF_ANY);
			from = bpf_map_lookup_elem(&tls_sessions, &session);
		}
	}
	if (!from)
		return 0;
	op.key = from->cookie;
	op.lport = from->lport;
	op.rport = from->rport;
	c = bpf_map_lookup_elem(&sockets_conns, &op.key);
	if (c && !c->tls)
		return 0;
	s = tls_scan(tid);
	if (!s)
		return 0;
	begin_scan(s, &op, bpf_ktime_get_ns(), id);
	s->tls = 1;
	s->first_arrival = from->first_ns ? from->first_ns : s->now;
	s->last_arrival = from->last_ns ? from->last_ns : s->now;
	s->iov = s->iov_left = s->base_at = 0;
	s->base = call.buffer;
	s->base_bytes = op.bytes;
	if (recv)
		follow_recv(s, &op, c, true);
	else if (c && c->out.state != HTTP_FOREIGN)
		follow_send(s, c);
	return 0;
}

static __always_inline int tls_shake(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), object = PT_REGS_PARM1(ctx);
	struct tls_session session = { .object = object, .tgid = id >> 32 };
	struct tls_begun *begun, fresh = { .begin_ns = bpf_ktime_get_ns(), .calls = 1 };
	__u32 tid = id;

	if (!whyspan_is_watched(id >> 32))
		return 0;
	tls_seen = 1;
	begun = bpf_map_lookup_elem(&tls_handshakes, &session);
	if (begun)
		begun->calls++;
	else
		bpf_map_update_elem(&tls_handshakes, &session, &fresh, BPF_ANY);
	bpf_map_update_elem(&tls_shaking, &tid, &object, BPF_ANY);
	return 0;
}

static __always_inline int tls_shaken(struct pt_regs *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), *object;
	struct tls_session session = { .tgid = id >> 32 };
	struct tls_received *last;
	struct tls_handshake *e;
	struct tls_begun *begun;
	__u32 tid = id;

	if (!whyspan_is_watched(id >> 32))
		return 0;
	object = bpf_map_lookup_elem(&tls_shaking, &tid);
	if (!object)
		return 0;
	session.object = *object;
	bpf_map_delete_elem(&tls_shaking, &tid);
	begun = bpf_map_lookup_elem(&tls_handshakes, &session);
	if (!begun || (__s32)PT_REGS_RC(ctx) != 1)
		return 0;
	/* The peer's last flight ended it: the connection is that of the thread's last receive. */
	last = bpf_map_lookup_elem(&tls_last, &tid);
	if (last)
		bpf_map_update_elem(&tls_sessions, &session, last, BPF_ANY);
	else /* an object's address comes again */
		bpf_map_delete_elem(&tls_sessions, &session);
	e = whyspan_reserve(KIND_tls_handshake, bpf_ktime_get_ns(), tid, id >> 32, 0);
	if (e) {
		e->begin_ns = begun->begin_ns;
		e->cookie = last ? last->cookie : 0;
		e->session = whyspan_key((const void *)session.object);
		e->calls = begun->calls;
		e->lport = last ? last->lport : 0;
		e->rport = last ? last->rport : 0;
		whyspan_submit(e);
	}
	bpf_map_delete_elem(&tls_handshakes, &session);
	return 0;
}

WHYSPAN_USER_PROBE(sockets_tls_entry, "uprobe", tls_enter(ctx))
WHYSPAN_USER_PROBE(sockets_tls_return, "uretprobe", tls_return(ctx))
WHYSPAN_USER_PROBE(sockets_tls_shake, "uprobe", tls_shake(ctx))
WHYSPAN_USER_PROBE(sockets_tls_shaken, "uretprobe", tls_shaken(ctx))
