/* libnvidia-ml: errors, links, MIG, field values, GPM and events. */
#include "nvml.h"

#include <stdlib.h>
#include <time.h>

/* -- errors -- */

static nvmlReturn_t ecc(const struct gpu *gpu, int type, int counter, unsigned long long *out)
{
	if (!out || type < 0 || type > 1 || counter < 0 || counter > 1)
		return NVML_INVALID_ARGUMENT;
	if (!gpu->ecc_enabled)
		return NVML_NOT_SUPPORTED;
	*out = type ? gpu->ecc_uncorrected[counter] : gpu->ecc_corrected[counter];
	return NVML_SUCCESS;
}

static nvmlReturn_t remapped(const struct gpu *gpu, unsigned int *corrected, unsigned int *uncorrected, unsigned int *p,
			     unsigned int *f)
{
	if (!corrected || !uncorrected || !p || !f)
		return NVML_INVALID_ARGUMENT;
	*corrected = gpu->remapped_corrected;
	*uncorrected = gpu->remapped_uncorrected;
	*p = gpu->remap_pending;
	*f = gpu->remap_failed;
	return NVML_SUCCESS;
}

OF_DEVICE(nvmlDeviceGetEccMode, (nvmlDevice_t device, int *current, int *pending),
	  (*current = *pending = (int)device->ecc_enabled, NVML_SUCCESS))
OF_DEVICE(nvmlDeviceGetTotalEccErrors, (nvmlDevice_t device, int type, int counter, unsigned long long *out),
	  ecc(device, type, counter, out))
OF_DEVICE(nvmlDeviceGetMemoryErrorCounter,
	  (nvmlDevice_t device, int type, int counter, int location, unsigned long long *out),
	  location == 2 ? ecc(device, type, counter, out) : NVML_NOT_SUPPORTED)
OF_DEVICE(nvmlDeviceGetRemappedRows,
	  (nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected, unsigned int *pending,
	   unsigned int *failed),
	  remapped(device, corrected, uncorrected, pending, failed))
OF_DEVICE(nvmlDeviceGetRetiredPagesPendingStatus, (nvmlDevice_t device, int *out), ((void)out, NVML_NOT_SUPPORTED))

/* -- links -- */

/* In KiB/s, over the last whole stretch of 20 ms, as the driver measures it. */
static nvmlReturn_t throughput(const struct gpu *gpu, int counter, unsigned int *out)
{
	u64 number = now_ns() / BUCKET_NS - 1;
	u32 i = (u32)(number % BUCKETS);
	u64 bytes = 0;

	if (!out || counter < 0 || counter > 1)
		return NVML_INVALID_ARGUMENT;
	if (gpu->bucket[i] == number)
		bytes = counter ? gpu->bucket_h2d_bytes[i] : gpu->bucket_d2h_bytes[i]; /* received : sent by the GPU */
	*out = (unsigned int)(bytes * (1000000000ULL / BUCKET_NS) / 1024);
	return NVML_SUCCESS;
}

static nvmlReturn_t a_link(const struct gpu *gpu, unsigned int link)
{
	return !gpu->nvlinks ? NVML_NOT_SUPPORTED : link < gpu->nvlinks ? NVML_SUCCESS : NVML_INVALID_ARGUMENT;
}

#define OF_LINK(name, params, what)                                                                          \
	NVML(name, params, nvml_device(device) ? nvml_device(device) : a_link(device, link), what)

OF_DEVICE(nvmlDeviceGetCurrPcieLinkGeneration, (nvmlDevice_t device, unsigned int *out), OUT(out, device->pcie_gen))
OF_DEVICE(nvmlDeviceGetMaxPcieLinkGeneration, (nvmlDevice_t device, unsigned int *out),
	  OUT(out, device->pcie_gen_max))
OF_DEVICE(nvmlDeviceGetGpuMaxPcieLinkGeneration, (nvmlDevice_t device, unsigned int *out),
	  OUT(out, device->pcie_gen_max))
OF_DEVICE(nvmlDeviceGetCurrPcieLinkWidth, (nvmlDevice_t device, unsigned int *out), OUT(out, device->pcie_width))
OF_DEVICE(nvmlDeviceGetMaxPcieLinkWidth, (nvmlDevice_t device, unsigned int *out), OUT(out, device->pcie_width_max))
OF_DEVICE(nvmlDeviceGetPcieReplayCounter, (nvmlDevice_t device, unsigned int *out), OUT(out, 0))
OF_DEVICE(nvmlDeviceGetPcieThroughput, (nvmlDevice_t device, int counter, unsigned int *out),
	  throughput(device, counter, out))
OF_LINK(nvmlDeviceGetNvLinkState, (nvmlDevice_t device, unsigned int link, int *out),
	OUT(out, (int)(device->nvlinks_active >> link & 1)))
OF_LINK(nvmlDeviceGetNvLinkVersion, (nvmlDevice_t device, unsigned int link, unsigned int *out), OUT(out, 5))
OF_LINK(nvmlDeviceGetNvLinkErrorCounter,
	(nvmlDevice_t device, unsigned int link, int counter, unsigned long long *out),
	counter < 0 || counter > 4 ? NVML_INVALID_ARGUMENT : OUT(out, counter ? 0 : device->nvlink_errors[link]))
/* Field values replace it on this generation. */
OF_LINK(nvmlDeviceGetNvLinkUtilizationCounter,
	(nvmlDevice_t device, unsigned int link, unsigned int counter, unsigned long long *rx, unsigned long long *tx),
	((void)counter, (void)rx, (void)tx, NVML_NOT_SUPPORTED))

/* -- MIG: a mode, without instances -- */

OF_DEVICE(nvmlDeviceGetMigMode, (nvmlDevice_t device, unsigned int *current, unsigned int *pending),
	  (*current = *pending = device->mig_mode, NVML_SUCCESS))
OF_DEVICE(nvmlDeviceGetMaxMigDeviceCount, (nvmlDevice_t device, unsigned int *out), OUT(out, 7))
OF_DEVICE(nvmlDeviceGetMigDeviceHandleByIndex, (nvmlDevice_t device, unsigned int i, nvmlDevice_t *out),
	  ((void)i, (void)out, NVML_NOT_FOUND))
OF_DEVICE(nvmlDeviceIsMigDeviceHandle, (nvmlDevice_t device, unsigned int *out), OUT(out, 0))

/* -- field values -- */

struct field {
	u32 id, scope;
	i64 ts_us, latency_us;
	int type, result;
	u64 value;
};

enum { TYPE_UINT = 1, TYPE_ULL = 3 };

static u64 over_links(const u64 *values, const struct gpu *gpu, u32 scope)
{
	u64 sum = 0;

	for (u32 i = 0; i < gpu->nvlinks; i++)
		if (scope == ~0U || scope == i)
			sum += values[i];
	return sum;
}

static void read_field(const struct gpu *gpu, struct field *f)
{
	f->result = NVML_SUCCESS;
	f->type = TYPE_ULL;
	switch (f->id) {
	case 1:
		f->value = gpu->ecc_enabled, f->type = TYPE_UINT;
		break;
	case 82:
		f->value = gpu->temperature_c + 8, f->type = TYPE_UINT;
		break;
	case 83:
		f->value = busy_so_far(gpu) / 1000000 * (gpu->power_limit_mw / 1000) / 1000;
		break;
	case 91:
		f->value = gpu->nvlinks, f->type = TYPE_UINT;
		break;
	case 138:
	case 140:
		f->value = over_links(gpu->nvlink_tx_kib, gpu, f->scope);
		break;
	case 139:
	case 141:
		f->value = over_links(gpu->nvlink_rx_kib, gpu, f->scope);
		break;
	case 142:
		f->value = gpu->remapped_corrected, f->type = TYPE_UINT;
		break;
	case 143:
		f->value = gpu->remapped_uncorrected, f->type = TYPE_UINT;
		break;
	case 144:
		f->value = gpu->remap_pending, f->type = TYPE_UINT;
		break;
	case 145:
		f->value = gpu->remap_failed, f->type = TYPE_UINT;
		break;
	case 161:
		f->value = over_links(gpu->nvlink_errors, gpu, f->scope);
		break;
	case 185:
	case 186:
		f->value = power_mw(gpu), f->type = TYPE_UINT;
		break;
	case 190:
		f->value = gpu->power_limit_mw, f->type = TYPE_UINT;
		break;
	default:
		f->result = NVML_NOT_SUPPORTED;
	}
}

static nvmlReturn_t fields(const struct gpu *gpu, int n, struct field *f)
{
	struct timespec t;

	if (n < 1 || !f)
		return NVML_INVALID_ARGUMENT;
	clock_gettime(CLOCK_REALTIME, &t);
	for (int i = 0; i < n; i++) {
		f[i].ts_us = t.tv_sec * 1000000 + t.tv_nsec / 1000;
		f[i].latency_us = 0;
		f[i].value = 0;
		read_field(gpu, &f[i]);
	}
	return NVML_SUCCESS;
}

OF_DEVICE(nvmlDeviceGetFieldValues, (nvmlDevice_t device, int n, struct field *f), fields(device, n, f))

/* -- GPM: what happened between two samples -- */

struct sample {
	const struct gpu *gpu;
	u64 ts_ns, busy_ns, copied[2], nvlink[2];
};

struct metric {
	unsigned int id;
	int result;
	double value;
	struct {
		const char *short_name, *long_name, *unit;
	} info;
};

struct metrics {
	unsigned int version, count;
	struct sample *first, *second;
	struct metric values[];
};

struct support {
	unsigned int version, supported;
};

static nvmlReturn_t take(const struct gpu *gpu, struct sample *s)
{
	if (!s)
		return NVML_INVALID_ARGUMENT;
	if (!gpu->gpm_supported)
		return NVML_NOT_SUPPORTED;
	*s = (struct sample){.gpu = gpu, .ts_ns = now_ns(), .busy_ns = busy_so_far(gpu),
			     .copied = {gpu->copied_bytes[0], gpu->copied_bytes[1]},
			     .nvlink = {over_links(gpu->nvlink_rx_kib, gpu, ~0U), over_links(gpu->nvlink_tx_kib, gpu, ~0U)}};
	return NVML_SUCCESS;
}

static double per_second_mib(u64 from, u64 to, double seconds, double unit)
{
	return (double)(to - from) * unit / (1 << 20) / seconds;
}

static void measure(const struct sample *a, const struct sample *b, struct metric *m)
{
	double seconds = (double)(b->ts_ns - a->ts_ns) / 1e9;
	double busy = waits_for_ranks(b->gpu) ? 100.0 : (double)(b->busy_ns - a->busy_ns) / 1e7 / seconds;
	double sms = b->gpu->sm_percent < 0 ? 100.0 : b->gpu->sm_percent;

	busy = busy > 100.0 ? 100.0 : busy;
	m->result = NVML_SUCCESS;
	m->info.unit = "%";
	switch (m->id) {
	case 1:
		m->value = busy;
		break;
	case 2: /* SM activity: busy time times the share of SMs that kernels use */
		m->value = busy * sms / 100.0;
		break;
	case 3:
		m->value = busy * sms / 100.0 * 0.4;
		break;
	case 5:
		m->value = busy * sms / 100.0 * 0.5;
		break;
	case 10:
		m->value = b->gpu->spilled_bytes ? 0.0 : busy * 0.6;
		break;
	case 20:
		m->value = per_second_mib(a->copied[1], b->copied[1], seconds, 1);
		break;
	case 21:
		m->value = per_second_mib(a->copied[0], b->copied[0], seconds, 1);
		break;
	case 60:
		m->value = per_second_mib(a->nvlink[0], b->nvlink[0], seconds, 1024);
		break;
	case 61:
		m->value = per_second_mib(a->nvlink[1], b->nvlink[1], seconds, 1024);
		break;
	default:
		m->result = NVML_NOT_SUPPORTED;
		return;
	}
	m->info.short_name = m->info.long_name = "metric";
}

static nvmlReturn_t metrics(struct metrics *m)
{
	if (!m || m->version != 1 || !m->first || !m->second || m->second->ts_ns <= m->first->ts_ns)
		return NVML_INVALID_ARGUMENT;
	for (unsigned int i = 0; i < m->count; i++)
		measure(m->first, m->second, &m->values[i]);
	return NVML_SUCCESS;
}

NVML(nvmlGpmSampleAlloc, (struct sample * *out), nvml_ready(), (*out = calloc(1, sizeof(**out)), NVML_SUCCESS))
NVML(nvmlGpmSampleFree, (struct sample * s), nvml_ready(), (free(s), NVML_SUCCESS))
NVML(nvmlGpmMetricsGet, (struct metrics * m), nvml_ready(), metrics(m))
OF_DEVICE(nvmlGpmSampleGet, (nvmlDevice_t device, struct sample *s), take(device, s))
OF_DEVICE(nvmlGpmQueryDeviceSupport, (nvmlDevice_t device, struct support *s),
	  (s->supported = device->gpm_supported, NVML_SUCCESS))

/* -- events -- */

enum { EVENT_SINGLE_BIT = 1, EVENT_DOUBLE_BIT = 2, EVENT_XID = 8, EVENTS = 0xb };

struct event_set {
	u64 next; /* the first Xid that was not told yet */
	u64 types[MAX_DEVICES];
};

struct event_data {
	nvmlDevice_t device;
	unsigned long long type, data;
	unsigned int gpu_instance, compute_instance;
};

static nvmlReturn_t new_set(struct event_set **out)
{
	*out = calloc(1, sizeof(**out));
	(*out)->next = region->xid_count;
	return NVML_SUCCESS;
}

static nvmlReturn_t register_events(const struct gpu *gpu, u64 types, struct event_set *set)
{
	if (!set)
		return NVML_INVALID_ARGUMENT;
	if (types & ~(u64)EVENTS)
		return NVML_NOT_SUPPORTED;
	set->types[nvml_index(gpu)] |= types;
	return NVML_SUCCESS;
}

static nvmlReturn_t wait_event(struct event_set *set, struct event_data *out, unsigned int timeout_ms)
{
	const struct timespec slice = {.tv_nsec = 1000000};
	u64 begin = now_ns(), end = begin + timeout_ms * 1000000ULL;

	if (!set || !out)
		return NVML_INVALID_ARGUMENT;
	for (;; nanosleep(&slice, NULL)) {
		while (set->next < region->xid_count) {
			const struct xid *x = &region->xids[set->next++ % MAX_XIDS];

			if (x->device < MAX_DEVICES && set->types[x->device] & EVENT_XID) {
				*out = (struct event_data){&region->gpus[x->device], EVENT_XID, x->code, ~0U, ~0U};
				here.wait_ns += now_ns() - begin;
				return NVML_SUCCESS;
			}
		}
		if (now_ns() >= end) {
			here.wait_ns += now_ns() - begin;
			return NVML_TIMEOUT;
		}
	}
}

NVML(nvmlEventSetCreate, (struct event_set * *out), nvml_ready(), new_set(out))
NVML(nvmlEventSetFree, (struct event_set * set), nvml_ready(), (free(set), NVML_SUCCESS))
NVML(nvmlEventSetWait_v2, (struct event_set * set, struct event_data *out, unsigned int timeout_ms), nvml_ready(),
     wait_event(set, out, timeout_ms))
OF_DEVICE(nvmlDeviceGetSupportedEventTypes, (nvmlDevice_t device, unsigned long long *out), OUT(out, EVENTS))
OF_DEVICE(nvmlDeviceRegisterEvents, (nvmlDevice_t device, unsigned long long types, struct event_set *set),
	  register_events(device, types, set))
