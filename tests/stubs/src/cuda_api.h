/* How the exported functions of libcuda are made: an account around what they do, once per variant of the name. */
#pragma once
#include "sim.h"

#define API(name, params, what)                                                                              \
	EXPORT CUresult name params                                                                          \
	{                                                                                                    \
		ENTER(#name);                                                                                \
		return call_end(here.forced ? here.forced : (what), CUDA_ERROR_NOT_READY);                   \
	}

/* Both variants of a function that takes a stream: stream 0 is the legacy one, or (suffix) this thread's. */
#define API_BOTH(name, suffix, params, what)                                                                 \
	EXPORT CUresult name params                                                                          \
	{                                                                                                    \
		const CUstream null_ = CU_STREAM_LEGACY;                                                     \
		ENTER(#name);                                                                                \
		return call_end(here.forced ? here.forced : (what), CUDA_ERROR_NOT_READY);                   \
	}                                                                                                    \
	EXPORT CUresult name##suffix params                                                                  \
	{                                                                                                    \
		const CUstream null_ = CU_STREAM_PER_THREAD;                                                 \
		ENTER(#name #suffix);                                                                        \
		return call_end(here.forced ? here.forced : (what), CUDA_ERROR_NOT_READY);                   \
	}
#define STREAM(h) ((h) ? (h) : null_)

/* Return the error of an expression, if it has one. */
#define TRY(expression)                                                                                      \
	do {                                                                                                 \
		CUresult r_ = (expression);                                                                  \
		if (r_)                                                                                      \
			return r_;                                                                           \
	} while (0)

/* The stream that a handle means, in a context that works. */
static inline CUresult stream_now(CUstream handle, struct stream **s)
{
	struct context *ctx;

	TRY(context_now(&ctx));
	pthread_mutex_lock(&sim_lock);
	*s = stream_of(handle);
	pthread_mutex_unlock(&sim_lock);
	if (!*s)
		return CUDA_ERROR_INVALID_HANDLE;
	here.stream = (*s)->number;
	return CUDA_SUCCESS;
}
