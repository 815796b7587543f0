/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* How probes and bursts write their programs; no maps. */
#pragma once

/*
 * A field of a kernel object: a plain load where the verifier knows the pointer's type (an argument of
 * tp_btf), a probe read where it does not (raw_tp, the fall-back for kernels without BTF). `raw` must be a
 * constant, so that only one of the two is compiled.
 */
#define WHYSPAN_FIELD(raw, pointer, field)                                                                   \
	((raw) ? ({                                                                                          \
		typeof((pointer)->field) __value;                                                            \
		bpf_core_read(&__value, sizeof(__value), &(pointer)->field);                                 \
		__value;                                                                                     \
	}) :                                                                                                 \
		 (pointer)->field)

/* A user program at two kinds of hooks: one link for many places (6.6), or one for each; see user_hooks.py.
 */
#define WHYSPAN_USER_PROBE(name, at, call)                                                                   \
	SEC(at ".multi")                                                                                     \
	int name##_multi(struct pt_regs *ctx)                                                                \
	{                                                                                                    \
		return call;                                                                                 \
	}                                                                                                    \
	SEC(at)                                                                                              \
	int name##_perf(struct pt_regs *ctx)                                                                 \
	{                                                                                                    \
		return call;                                                                                 \
	}
