/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Sends and receives on kernels without sock_send_length and sock_recv_length (6.3), at the functions by
 * which sockets of the internet's and of the unix families send and receive. Everything comes by there: read,
 * write, recv, send, their vectors, recvmmsg, sendmmsg, io_uring's. Not so at the functions above, in
 * net/socket.c: recvmmsg and sendmmsg pass sock_recvmsg and sock_sendmsg by, whose place in younger kernels
 * is taken by a static function (6.6). Before "splice, net: Remove the sendpage protocol op" (6.5), sendfile
 * has functions of its own.
 *
 * A probe gives `on_recv(raw, sk, result, flags)` and `on_send`, and gets the programs PROBE_fexit_FUNCTION,
 * or PROBE_enter_FUNCTION and PROBE_return_FUNCTION.
 */
#pragma once

#include "nested.bpf.h"

#ifndef MSG_PEEK
#define MSG_PEEK 2
#endif

enum whyspan_transfer { /* numbers of the frames' functions */
			TRANSFER_inet_recvmsg,
			TRANSFER_inet6_recvmsg,
			TRANSFER_unix_stream_recvmsg,
			TRANSFER_unix_dgram_recvmsg,
			TRANSFER_inet_sendmsg,
			TRANSFER_inet6_sendmsg,
			TRANSFER_unix_stream_sendmsg,
			TRANSFER_unix_dgram_sendmsg,
			TRANSFER_inet_sendpage,
			TRANSFER_unix_stream_sendpage,
};

#define WHYSPAN_RECEIVES(probe, function, on_recv, kind)                                                     \
	SEC("fexit/" #function)                                                                              \
	int BPF_PROG(probe##_fexit_##function, struct socket *socket, struct msghdr *msg, size_t size,       \
		     int flags, int ret)                                                                     \
	{                                                                                                    \
		return on_recv(false, socket->sk, ret, flags);                                               \
	}                                                                                                    \
	SEC("kprobe/" #function)                                                                             \
	int BPF_KPROBE(probe##_enter_##function, struct socket *socket, struct msghdr *msg, size_t size,     \
		       int flags)                                                                            \
	{                                                                                                    \
		if (whyspan_is_watched(bpf_get_current_pid_tgid() >> 32) && !(flags & MSG_PEEK))             \
			whyspan_push(ctx, TRANSFER_##function, BPF_CORE_READ(socket, sk), flags, kind);      \
		return 0;                                                                                    \
	}                                                                                                    \
	WHYSPAN_RETURNS(probe, function, on_recv, kind)

#define WHYSPAN_SENDS(probe, function, on_send, kind)                                                        \
	SEC("fexit/" #function)                                                                              \
	int BPF_PROG(probe##_fexit_##function, struct socket *socket, struct msghdr *msg, size_t size,       \
		     int ret)                                                                                \
	{                                                                                                    \
		return on_send(false, socket->sk, ret, msg->msg_flags);                                      \
	}                                                                                                    \
	SEC("kprobe/" #function)                                                                             \
	int BPF_KPROBE(probe##_enter_##function, struct socket *socket, struct msghdr *msg)                  \
	{                                                                                                    \
		if (whyspan_is_watched(bpf_get_current_pid_tgid() >> 32))                                    \
			whyspan_push(ctx, TRANSFER_##function, BPF_CORE_READ(socket, sk),                    \
				     BPF_CORE_READ(msg, msg_flags), kind);                                   \
		return 0;                                                                                    \
	}                                                                                                    \
	WHYSPAN_RETURNS(probe, function, on_send, kind)

#define WHYSPAN_SENDS_PAGES(probe, function, on_send, kind)                                                  \
	SEC("fexit/" #function)                                                                              \
	int BPF_PROG(probe##_fexit_##function, struct socket *socket, struct page *page, int offset,         \
		     size_t size, int flags, long ret)                                                       \
	{                                                                                                    \
		return on_send(false, socket->sk, ret, flags);                                               \
	}                                                                                                    \
	SEC("kprobe/" #function)                                                                             \
	int BPF_KPROBE(probe##_enter_##function, struct socket *socket, struct page *page, int offset,       \
		       size_t size, int flags)                                                               \
	{                                                                                                    \
		if (whyspan_is_watched(bpf_get_current_pid_tgid() >> 32))                                    \
			whyspan_push(ctx, TRANSFER_##function, BPF_CORE_READ(socket, sk), flags, kind);      \
		return 0;                                                                                    \
	}                                                                                                    \
	WHYSPAN_RETURNS(probe, function, on_send, kind)

#define WHYSPAN_RETURNS(probe, function, on, kind)                                                           \
	SEC("kretprobe/" #function)                                                                          \
	int probe##_return_##function(struct pt_regs *ctx)                                                   \
	{                                                                                                    \
		struct whyspan_frame frame;                                                                  \
                                                                                                             \
		if (!whyspan_is_watched(bpf_get_current_pid_tgid() >> 32) ||                                 \
		    !whyspan_pop(ctx, TRANSFER_##function, &frame, kind))                                    \
			return 0;                                                                            \
		return on(true, (struct sock *)frame.value, (int)PT_REGS_RC(ctx), frame.aux);                \
	}
