/* libnvidia-ml: utilisation, clocks, power and temperature. */
#include "nvml.h"

#include <time.h>

/* -- utilisation: the share of the last sixth of a second in which anything ran, as the driver has it -- */

#define SAMPLE_NS 166666667ULL

static u64 later(u64 a, u64 b)
{
	return a > b ? a : b;
}

static u64 sooner(u64 a, u64 b)
{
	return a < b ? a : b;
}

u64 busy_between(const struct gpu *gpu, u64 from, u64 to)
{
	u64 sum = 0, begin = later(from, gpu->stretch_ns), end = sooner(to, gpu->covered_ns);

	if (end > begin)
		sum = end - begin; /* of the last stretch; the buckets tell of what was before it */
	to = sooner(to, gpu->stretch_ns);
	for (u64 at = from, next; at < to; at = next) {
		u64 number = at / BUCKET_NS, part;

		next = sooner(to, (number + 1) * BUCKET_NS);
		if (gpu->bucket[number % BUCKETS] != number)
			continue;
		part = gpu->bucket_busy_ns[number % BUCKETS];
		sum += part < next - at ? part : next - at;
	}
	return sum;
}

u64 busy_so_far(const struct gpu *gpu)
{
	u64 now = now_ns(), ahead = gpu->covered_ns > now ? gpu->covered_ns - later(now, gpu->stretch_ns) : 0;

	return gpu->busy_ns > ahead ? gpu->busy_ns - ahead : 0;
}

bool in_use(const struct gpu *gpu)
{
	int d = nvml_index(gpu);

	for (u32 i = 0; i < MAX_PROCESSES; i++)
		if (nvml_on_device(&region->procs[i], d))
			return true;
	return false;
}

bool waits_for_ranks(const struct gpu *gpu)
{
	int d = nvml_index(gpu);

	for (u32 i = 0; i < MAX_PROCESSES; i++)
		if (nvml_alive(&region->procs[i]) && region->procs[i].spinning[d])
			return true;
	return false;
}

u32 utilisation(const struct gpu *gpu)
{
	u64 now = now_ns();

	return waits_for_ranks(gpu) ? 100 : (u32)(busy_between(gpu, now - SAMPLE_NS, now) * 100 / SAMPLE_NS);
}

struct utilisation {
	unsigned int gpu, memory;
};

static nvmlReturn_t rates(const struct gpu *gpu, struct utilisation *out)
{
	if (!out)
		return NVML_INVALID_ARGUMENT;
	if (gpu->mig_mode)
		return NVML_NOT_SUPPORTED;
	out->gpu = utilisation(gpu);
	out->memory = gpu->spilled_bytes ? 0 : out->gpu / 2;
	return NVML_SUCCESS;
}

struct process_sample {
	unsigned int pid;
	unsigned long long ts_us;
	unsigned int sm, memory, encoder, decoder;
};

/* Since this process asked last. */
static nvmlReturn_t process_use(const struct gpu *gpu, struct process_sample *out, unsigned int *n, u64 since_us)
{
	static u64 asked_ns[MAX_PROCESSES][MAX_DEVICES], had_ns[MAX_PROCESSES][MAX_DEVICES];
	int d = nvml_index(gpu);
	u64 now = now_ns(), wall_us;
	unsigned int room = *n, found = 0;
	struct timespec t;

	if (gpu->mig_mode)
		return NVML_NOT_SUPPORTED;
	clock_gettime(CLOCK_REALTIME, &t);
	wall_us = (u64)t.tv_sec * 1000000 + (u64)t.tv_nsec / 1000;
	for (u32 i = 0; i < MAX_PROCESSES && wall_us > since_us; i++) {
		const struct proc *p = &region->procs[i];
		u64 ahead, busy, window;

		if (!nvml_on_device(p, d))
			continue;
		ahead = p->covered_ns[d] > now ? p->covered_ns[d] - now : 0;
		busy = p->busy_ns[d] > ahead ? p->busy_ns[d] - ahead : 0;
		if (p->spinning[d])
			busy = had_ns[i][d] + (now - asked_ns[i][d]);
		if (!busy)
			continue;
		if (out && found < room) {
			window = asked_ns[i][d] ? now - asked_ns[i][d] : SAMPLE_NS;
			busy = busy > had_ns[i][d] ? busy - had_ns[i][d] : 0;
			out[found] = (struct process_sample){.pid = p->pid, .ts_us = wall_us,
							     .sm = (u32)(sooner(busy, window) * 100 / window)};
			had_ns[i][d] += busy;
			asked_ns[i][d] = now;
		}
		found++;
	}
	*n = found;
	if (!found)
		return NVML_NOT_FOUND;
	return found > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

OF_DEVICE(nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, struct utilisation *out), rates(device, out))
OF_DEVICE(nvmlDeviceGetProcessUtilization,
	  (nvmlDevice_t device, struct process_sample *out, unsigned int *n, unsigned long long since_us),
	  n ? process_use(device, out, n, since_us) : NVML_INVALID_ARGUMENT)

/* -- clocks, power, temperature -- */

enum { IDLE_MHZ = 345, CLOCK_MEMORY = 2, REASON_IDLE = 1 };

static unsigned int clock_of(const struct gpu *gpu, int type)
{
	if (type == CLOCK_MEMORY)
		return gpu->mem_clock_max_mhz;
	return in_use(gpu) ? (unsigned int)(gpu->sm_clock_max_mhz * gpu->clock_factor) : IDLE_MHZ;
}

static unsigned long long reasons(const struct gpu *gpu)
{
	return gpu->throttle_reasons | (in_use(gpu) ? 0 : REASON_IDLE);
}

u32 power_mw(const struct gpu *gpu)
{
	f64 share = utilisation(gpu) / 100.0 * 0.8;

	return gpu->power_mw ? gpu->power_mw
			     : gpu->power_idle_mw + (u32)(share * (gpu->power_limit_mw - gpu->power_idle_mw));
}

static bool a_clock(int type)
{
	return type >= 0 && type <= 3;
}

OF_DEVICE(nvmlDeviceGetClockInfo, (nvmlDevice_t device, int type, unsigned int *out),
	  a_clock(type) ? OUT(out, clock_of(device, type)) : NVML_INVALID_ARGUMENT)
OF_DEVICE(nvmlDeviceGetClock, (nvmlDevice_t device, int type, int id, unsigned int *out),
	  ((void)id, a_clock(type) ? OUT(out, clock_of(device, type)) : NVML_INVALID_ARGUMENT))
OF_DEVICE(nvmlDeviceGetMaxClockInfo, (nvmlDevice_t device, int type, unsigned int *out),
	  a_clock(type) ? OUT(out, type == CLOCK_MEMORY ? device->mem_clock_max_mhz : device->sm_clock_max_mhz)
			: NVML_INVALID_ARGUMENT)
OF_DEVICE(nvmlDeviceGetCurrentClocksEventReasons, (nvmlDevice_t device, unsigned long long *out),
	  OUT(out, reasons(device)))
OF_DEVICE(nvmlDeviceGetCurrentClocksThrottleReasons, (nvmlDevice_t device, unsigned long long *out),
	  OUT(out, reasons(device)))
OF_DEVICE(nvmlDeviceGetSupportedClocksEventReasons, (nvmlDevice_t device, unsigned long long *out), OUT(out, 0x1ff))
OF_DEVICE(nvmlDeviceGetSupportedClocksThrottleReasons, (nvmlDevice_t device, unsigned long long *out),
	  OUT(out, 0x1ff))
OF_DEVICE(nvmlDeviceGetPerformanceState, (nvmlDevice_t device, int *out), OUT(out, in_use(device) ? 0 : 8))
OF_DEVICE(nvmlDeviceGetPowerUsage, (nvmlDevice_t device, unsigned int *out), OUT(out, power_mw(device)))
OF_DEVICE(nvmlDeviceGetEnforcedPowerLimit, (nvmlDevice_t device, unsigned int *out),
	  OUT(out, device->power_limit_mw))
OF_DEVICE(nvmlDeviceGetPowerManagementLimit, (nvmlDevice_t device, unsigned int *out),
	  OUT(out, device->power_limit_mw))
OF_DEVICE(nvmlDeviceGetPowerManagementDefaultLimit, (nvmlDevice_t device, unsigned int *out),
	  OUT(out, device->power_limit_mw))
OF_DEVICE(nvmlDeviceGetTotalEnergyConsumption, (nvmlDevice_t device, unsigned long long *out),
	  OUT(out, busy_so_far(device) / 1000000 * (device->power_limit_mw / 1000) / 1000))
OF_DEVICE(nvmlDeviceGetTemperature, (nvmlDevice_t device, int sensor, unsigned int *out),
	  sensor ? NVML_INVALID_ARGUMENT : OUT(out, device->temperature_c))
OF_DEVICE(nvmlDeviceGetTemperatureThreshold, (nvmlDevice_t device, int which, unsigned int *out),
	  which < 0 || which > 3 ? NVML_NOT_SUPPORTED : OUT(out, which == 0 ? 92 : which == 1 ? 89 : 87))
OF_DEVICE(nvmlDeviceGetFanSpeed, (nvmlDevice_t device, unsigned int *out), ((void)out, NVML_NOT_SUPPORTED))
