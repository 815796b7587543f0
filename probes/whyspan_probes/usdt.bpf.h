/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Reads the first argument of a USDT note, where the cookie says that it is; the cookie is made by usdt.py.
 */
#pragma once

enum note_argument { ARGUMENT_NONE, ARGUMENT_CONSTANT, ARGUMENT_REGISTER, ARGUMENT_MEMORY };

/* Bits 0-7 of a cookie are the hook's own number. */
static __always_inline __u32 whyspan_note_number(__u64 cookie)
{
	return cookie & 0xff;
}

static __always_inline bool whyspan_note_argument(struct pt_regs *ctx, __u64 cookie, __s64 *value)
{
	__u32 kind = (cookie >> 8) & 3, bits = ((cookie >> 10) & 15) * 8, at = (cookie >> 16) & 0xffff;
	__s32 number = cookie >> 32;
	__u64 v = 0;

	if (kind == ARGUMENT_CONSTANT) {
		*value = number;
		return true;
	}
	if (kind == ARGUMENT_NONE || at > sizeof(*ctx) - sizeof(v) || !bits || bits > 64)
		return false;
	/* By a probe read: the verifier allows no variable offset into the context. As libbpf's usdt.bpf.h.
	 */
	if (bpf_probe_read_kernel(&v, sizeof(v), (void *)ctx + at))
		return false;
	if (kind == ARGUMENT_MEMORY && bpf_probe_read_user(&v, sizeof(v), (void *)(v + (__s64)number)))
		return false;
	v <<= 64 - bits;
	*value = (cookie >> 14) & 1 ? (__s64)v >> (64 - bits) : (__s64)(v >> (64 - bits));
	return true;
}
