/* libcuda: streams and events. */
#include "cuda_api.h"

#include <stdlib.h>

static CUresult create(CUstream *out, unsigned int flags, int priority)
{
	struct context *ctx;

	TRY(context_now(&ctx));
	pthread_mutex_lock(&sim_lock);
	*out = stream_new(ctx, flags, priority, false);
	pthread_mutex_unlock(&sim_lock);
	return CUDA_SUCCESS;
}

/* Returns at once; what is queued still runs. */
static CUresult destroy(CUstream handle)
{
	struct stream *s;

	if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD)
		return CUDA_ERROR_INVALID_HANDLE;
	TRY(stream_now(handle, &s));
	s->dead = true;
	return CUDA_SUCCESS;
}

static CUresult uncaptured(struct stream *s)
{
	if (!s->capture)
		return CUDA_SUCCESS;
	s->capture->invalid = true;
	return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

static CUresult synchronize(CUstream handle)
{
	struct stream *s;

	TRY(stream_now(handle, &s));
	TRY(uncaptured(s));
	wait_for_stream(s, wait_mode_of(s->ctx));
	return (CUresult)gpu_of(s->ctx)->error;
}

static CUresult query(CUstream handle)
{
	struct stream *s;
	bool ready;

	TRY(stream_now(handle, &s));
	TRY(uncaptured(s));
	pthread_mutex_lock(&sim_lock);
	progress();
	ready = !s->waiting && s->end_ns <= now_ns();
	pthread_mutex_unlock(&sim_lock);
	return ready ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult wait_event(CUstream handle, CUevent e)
{
	struct stream *s;

	TRY(stream_now(handle, &s));
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&sim_lock);
	if (e->capture) {
		s->capture = e->capture; /* the stream joins the capture */
	} else if (e->ticket) {
		burn_ns(region->control.call_host_ns);
		enqueue_ticket(s, e->ticket);
	}
	pthread_mutex_unlock(&sim_lock);
	return CUDA_SUCCESS;
}

static CUresult flags_of(CUstream handle, unsigned int *flags)
{
	struct stream *s;

	TRY(stream_now(handle, &s));
	*flags = s->flags;
	return CUDA_SUCCESS;
}

static CUresult priority_of(CUstream handle, int *priority)
{
	struct stream *s;

	TRY(stream_now(handle, &s));
	*priority = s->priority;
	return CUDA_SUCCESS;
}

static CUresult id_of(CUstream handle, unsigned long long *id)
{
	struct stream *s;

	TRY(stream_now(handle, &s));
	*id = s->number;
	return CUDA_SUCCESS;
}

static CUresult context_of(CUstream handle, CUcontext *ctx)
{
	struct stream *s;

	TRY(stream_now(handle, &s));
	*ctx = s->ctx;
	return CUDA_SUCCESS;
}

API(cuStreamCreate, (CUstream * out, unsigned int flags), create(out, flags, 0))
API(cuStreamCreateWithPriority, (CUstream * out, unsigned int flags, int priority), create(out, flags, priority))
API(cuStreamDestroy_v2, (CUstream stream), destroy(stream))
API_BOTH(cuStreamSynchronize, _ptsz, (CUstream stream), synchronize(STREAM(stream)))
API_BOTH(cuStreamQuery, _ptsz, (CUstream stream), query(STREAM(stream)))
API_BOTH(cuStreamWaitEvent, _ptsz, (CUstream stream, CUevent event, unsigned int flags),
	 ((void)flags, wait_event(STREAM(stream), event)))
API_BOTH(cuStreamGetFlags, _ptsz, (CUstream stream, unsigned int *flags), flags_of(STREAM(stream), flags))
API_BOTH(cuStreamGetPriority, _ptsz, (CUstream stream, int *priority), priority_of(STREAM(stream), priority))
API_BOTH(cuStreamGetId, _ptsz, (CUstream stream, unsigned long long *id), id_of(STREAM(stream), id))
API_BOTH(cuStreamGetCtx, _ptsz, (CUstream stream, CUcontext *ctx), context_of(STREAM(stream), ctx))

/* -- events -- */

static CUresult event_create(CUevent *out, unsigned int flags)
{
	struct context *ctx;

	TRY(context_now(&ctx));
	*out = calloc(1, sizeof(**out));
	(*out)->flags = flags;
	return CUDA_SUCCESS;
}

static CUresult event_destroy(CUevent e)
{
	TRY(usable());
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&sim_lock);
	if (e->ticket)
		ticket_drop(e->ticket);
	pthread_mutex_unlock(&sim_lock);
	free(e);
	return CUDA_SUCCESS;
}

static CUresult record(CUevent e, CUstream handle)
{
	struct stream *s;

	TRY(stream_now(handle, &s));
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&sim_lock);
	e->capture = s->capture;
	if (!s->capture) {
		burn_ns(region->control.call_host_ns);
		enqueue_record(s, e);
	}
	pthread_mutex_unlock(&sim_lock);
	return CUDA_SUCCESS;
}

static CUresult event_synchronize(CUevent e)
{
	struct context *ctx;

	TRY(context_now(&ctx));
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	if (e->capture)
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	if (e->ticket)
		wait_for_ticket(e->ticket, e->flags & CU_EVENT_BLOCKING_SYNC ? WAIT_BLOCK : wait_mode_of(ctx));
	return (CUresult)gpu_of(ctx)->error;
}

static CUresult event_query(CUevent e)
{
	struct context *ctx;
	bool ready;

	TRY(context_now(&ctx));
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&sim_lock);
	progress();
	ready = !e->ticket || (e->ticket->done && e->ticket->ns <= now_ns());
	pthread_mutex_unlock(&sim_lock);
	return ready ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult elapsed(float *ms, CUevent begin, CUevent end)
{
	u64 now = now_ns();

	TRY(usable());
	if (!begin || !end || !begin->ticket || !end->ticket ||
	    ((begin->flags | end->flags) & CU_EVENT_DISABLE_TIMING))
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&sim_lock);
	progress();
	pthread_mutex_unlock(&sim_lock);
	if (!begin->ticket->done || !end->ticket->done || begin->ticket->ns > now || end->ticket->ns > now)
		return CUDA_ERROR_NOT_READY;
	*ms = (float)((f64)(i64)(end->ticket->ns - begin->ticket->ns) / 1e6);
	return CUDA_SUCCESS;
}

API(cuEventCreate, (CUevent * out, unsigned int flags), event_create(out, flags))
API(cuEventDestroy_v2, (CUevent event), event_destroy(event))
API_BOTH(cuEventRecord, _ptsz, (CUevent event, CUstream stream), record(event, STREAM(stream)))
API_BOTH(cuEventRecordWithFlags, _ptsz, (CUevent event, CUstream stream, unsigned int flags),
	 ((void)flags, record(event, STREAM(stream))))
API(cuEventSynchronize, (CUevent event), event_synchronize(event))
API(cuEventQuery, (CUevent event), event_query(event))
API(cuEventElapsedTime, (float *ms, CUevent begin, CUevent end), elapsed(ms, begin, end))
API(cuEventElapsedTime_v2, (float *ms, CUevent begin, CUevent end), elapsed(ms, begin, end))
