/* libcuda: capture of streams, graphs and their launches. A graph's nodes run in the order of their capture. */
#include "cuda_api.h"

#include <stdlib.h>
#include <string.h>

static u32 captures; /* going on, in a mode that forbids what may synchronise */

bool capturing_anywhere(void)
{
	return __atomic_load_n(&captures, __ATOMIC_RELAXED) > 0;
}

struct node *graph_add(struct graph *g)
{
	if (g->count == g->room) {
		g->room = g->room ? 2 * g->room : 64;
		g->nodes = realloc(g->nodes, g->room * sizeof(*g->nodes));
	}
	return &g->nodes[g->count++];
}

static CUresult begin(CUstream handle, int mode)
{
	struct stream *s;

	TRY(stream_now(handle, &s));
	if (s->legacy || s->capture)
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	pthread_mutex_lock(&sim_lock);
	s->capture = calloc(1, sizeof(*s->capture));
	s->capture_origin = true;
	s->invalidated = mode == CU_STREAM_CAPTURE_MODE_RELAXED; /* kept for the end */
	if (mode != CU_STREAM_CAPTURE_MODE_RELAXED)
		__atomic_fetch_add(&captures, 1, __ATOMIC_RELAXED);
	pthread_mutex_unlock(&sim_lock);
	return CUDA_SUCCESS;
}

static CUresult end(CUstream handle, CUgraph *out)
{
	struct stream *s;
	struct graph *g;

	TRY(stream_now(handle, &s));
	if (!s->capture)
		return CUDA_ERROR_INVALID_VALUE;
	if (!s->capture_origin)
		return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
	pthread_mutex_lock(&sim_lock);
	g = s->capture;
	for (struct stream *o = all_streams; o; o = o->next)
		if (o->capture == g)
			o->capture = NULL;
	s->capture_origin = false;
	if (!s->invalidated)
		__atomic_fetch_sub(&captures, 1, __ATOMIC_RELAXED);
	pthread_mutex_unlock(&sim_lock);
	*out = g->invalid ? NULL : g;
	return g->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

static CUresult capture_status(CUstream handle, int *status, unsigned long long *id, CUgraph *graph)
{
	struct stream *s;

	TRY(stream_now(handle, &s));
	*status = !s->capture            ? CU_STREAM_CAPTURE_STATUS_NONE
		  : s->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
					: CU_STREAM_CAPTURE_STATUS_ACTIVE;
	if (id)
		*id = s->capture ? (unsigned long long)(size_t)s->capture : 0;
	if (graph)
		*graph = s->capture;
	return CUDA_SUCCESS;
}

static CUresult create(CUgraph *out)
{
	TRY(usable());
	*out = calloc(1, sizeof(**out));
	return CUDA_SUCCESS;
}

static CUresult instantiate(CUgraphExec *out, struct graph *g)
{
	const struct control *c = &region->control;
	struct graph_exec *e;

	TRY(usable());
	if (!g || !out)
		return CUDA_ERROR_INVALID_VALUE;
	e = calloc(1, sizeof(*e));
	e->count = g->count;
	e->nodes = malloc((g->count + 1) * sizeof(*e->nodes));
	if (g->count)
		memcpy(e->nodes, g->nodes, g->count * sizeof(*e->nodes));
	burn_ns(c->graph_instantiate_ns + c->graph_instantiate_ns_per_node * g->count);
	*out = e;
	return CUDA_SUCCESS;
}

static CUresult update(struct graph_exec *e, struct graph *g, CUgraphExecUpdateResultInfo *info)
{
	TRY(usable());
	if (!e || !g)
		return CUDA_ERROR_INVALID_VALUE;
	memset(info, 0, sizeof(*info));
	if (e->count != g->count) {
		info->result = 2; /* the topology changed */
		return 910;
	}
	memcpy(e->nodes, g->nodes, g->count * sizeof(*e->nodes));
	burn_ns(region->control.graph_instantiate_ns_per_node * g->count / 4);
	return CUDA_SUCCESS;
}

/* Kernels that follow each other are one piece of work on the device. */
static void run_nodes(struct stream *s, const struct graph_exec *e)
{
	u64 kernels = 0, sum = 0;

	for (u32 i = 0; i <= e->count; i++) {
		const struct node *n = i < e->count ? &e->nodes[i] : NULL;

		if (n && n->kind == NODE_KERNEL) {
			sum += kernel_ns(n->function, n->blocks);
			kernels++;
			continue;
		}
		if (sum)
			enqueue(s, (struct op){.kind = OP_WORK, .kernel = true, .ns = sum});
		sum = 0;
		if (n && n->kind == NODE_MEET) {
			for (u32 m = 0; m < n->meets; m++)
				enqueue_meeting(s, &n->meetings[m]);
			kernels++;
		} else if (n && n->kind == NODE_COPY) {
			count_copy(n->direction, n->pinned, 1, n->bytes);
			enqueue_copy(s, n->direction, n->bytes, n->engine);
		} else if (n) {
			enqueue_copy(s, 2, n->bytes, NO_ENGINE);
		}
	}
	count(&region->kernels, kernels);
	count(&region->graph_kernels, kernels);
}

static CUresult launch(struct graph_exec *e, CUstream handle)
{
	struct stream *s;

	TRY(stream_now(handle, &s));
	if (!e)
		return CUDA_ERROR_INVALID_VALUE;
	if (s->capture)
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	pthread_mutex_lock(&sim_lock);
	wait_for_room(s);
	burn_ns(region->control.graph_launch_host_ns);
	run_nodes(s, e);
	pthread_mutex_unlock(&sim_lock);
	return CUDA_SUCCESS;
}

static CUresult nodes(struct graph *g, CUgraphNode *out, size_t *n)
{
	if (!g || !n)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; out && i < *n && i < g->count; i++)
		out[i] = &g->nodes[i];
	if (!out || *n > g->count)
		*n = g->count;
	return CUDA_SUCCESS;
}

static CUresult drop_graph(struct graph *g)
{
	if (!g)
		return CUDA_ERROR_INVALID_VALUE;
	free(g->nodes);
	free(g);
	return CUDA_SUCCESS;
}

static CUresult drop_exec(struct graph_exec *e)
{
	if (!e)
		return CUDA_ERROR_INVALID_VALUE;
	free(e->nodes);
	free(e);
	return CUDA_SUCCESS;
}

API_BOTH(cuStreamBeginCapture_v2, _ptsz, (CUstream stream, int mode), begin(STREAM(stream), mode))
API_BOTH(cuStreamEndCapture, _ptsz, (CUstream stream, CUgraph *out), end(STREAM(stream), out))
API_BOTH(cuStreamIsCapturing, _ptsz, (CUstream stream, int *status),
	 capture_status(STREAM(stream), status, NULL, NULL))
API_BOTH(cuStreamGetCaptureInfo_v2, _ptsz,
	 (CUstream stream, int *status, unsigned long long *id, CUgraph *graph, const CUgraphNode **deps, size_t *n),
	 ((void)deps, (void)n, capture_status(STREAM(stream), status, id, graph)))
API(cuGraphCreate, (CUgraph * out, unsigned int flags), ((void)flags, create(out)))
API(cuGraphInstantiateWithFlags, (CUgraphExec * out, CUgraph graph, unsigned long long flags),
    ((void)flags, instantiate(out, graph)))
API(cuGraphExecUpdate_v2, (CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info),
    update(exec, graph, info))
API(cuGraphGetNodes, (CUgraph graph, CUgraphNode * out, size_t *n), nodes(graph, out, n))
API_BOTH(cuGraphUpload, _ptsz, (CUgraphExec exec, CUstream stream),
	 ((void)stream, (void)null_, exec ? usable() : CUDA_ERROR_INVALID_VALUE))
API_BOTH(cuGraphLaunch, _ptsz, (CUgraphExec exec, CUstream stream), launch(exec, STREAM(stream)))
API(cuGraphDestroy, (CUgraph graph), drop_graph(graph))
API(cuGraphExecDestroy, (CUgraphExec exec), drop_exec(exec))
