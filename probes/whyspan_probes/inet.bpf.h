/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What may be said of an internet socket: its name, and whether its peer is on this host. Never an address.
 */
#pragma once

#include "files.bpf.h"

#define AF_INET 2
#define AF_INET6 10

static __always_inline bool whyspan_is_inet(__u16 family)
{
	return family == AF_INET || family == AF_INET6;
}

/* A socket's cookie, made at need where there is a helper for it. */
static __always_inline __u64 whyspan_named(const bool raw, struct sock *sk)
{
	return raw ? whyspan_cookie(sk) : bpf_get_socket_cookie(sk);
}

/* The peer is on this host: a loopback address, or the socket's own. */
static __always_inline bool whyspan_is_local(const struct sock *sk)
{
	__u32 there = BPF_CORE_READ(sk, __sk_common.skc_daddr);
	struct in6_addr far, near;

	if (BPF_CORE_READ(sk, __sk_common.skc_family) == AF_INET)
		return (bpf_ntohl(there) >> 24) == 127 ||
		       there == BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr);
	bpf_core_read(&far, sizeof(far), &sk->__sk_common.skc_v6_daddr);
	bpf_core_read(&near, sizeof(near), &sk->__sk_common.skc_v6_rcv_saddr);
	if (far.in6_u.u6_addr32[0] == near.in6_u.u6_addr32[0] &&
	    far.in6_u.u6_addr32[1] == near.in6_u.u6_addr32[1] &&
	    far.in6_u.u6_addr32[2] == near.in6_u.u6_addr32[2] &&
	    far.in6_u.u6_addr32[3] == near.in6_u.u6_addr32[3])
		return true;
	if (far.in6_u.u6_addr32[0] || far.in6_u.u6_addr32[1])
		return false;
	if (far.in6_u.u6_addr32[2] == bpf_htonl(0xffff)) /* an IPv4 address in IPv6's clothes */
		return (bpf_ntohl(far.in6_u.u6_addr32[3]) >> 24) == 127;
	return !far.in6_u.u6_addr32[2] && far.in6_u.u6_addr32[3] == bpf_htonl(1);
}
