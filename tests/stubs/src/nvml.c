/* libnvidia-ml: initialisation, devices, memory and processes. */
#include "nvml.h"

#include <errno.h>
#include <signal.h>

static u32 users;

nvmlReturn_t nvml_ready(void)
{
	return users ? NVML_SUCCESS : NVML_UNINITIALIZED;
}

int nvml_index(const struct gpu *gpu)
{
	return (int)(gpu - region->gpus);
}

nvmlReturn_t nvml_device(nvmlDevice_t device)
{
	if (!users)
		return NVML_UNINITIALIZED;
	for (u32 i = 0; i < region->devices; i++)
		if (device == &region->gpus[i])
			return NVML_SUCCESS;
	return NVML_INVALID_ARGUMENT;
}

static nvmlReturn_t init(void)
{
	if (!stub_attach())
		return NVML_DRIVER_NOT_LOADED;
	__atomic_fetch_add(&users, 1, __ATOMIC_RELAXED);
	return NVML_SUCCESS;
}

static nvmlReturn_t finish(void)
{
	__atomic_fetch_sub(&users, 1, __ATOMIC_RELAXED);
	return NVML_SUCCESS;
}

static nvmlReturn_t text(char *out, unsigned int size, const char *value)
{
	if (!out || size < strlen(value) + 1)
		return out ? NVML_INSUFFICIENT_SIZE : NVML_INVALID_ARGUMENT;
	snprintf(out, size, "%s", value);
	return NVML_SUCCESS;
}

NVML(nvmlInit, (void), NVML_SUCCESS, init())
NVML(nvmlInit_v2, (void), NVML_SUCCESS, init())
NVML(nvmlInitWithFlags, (unsigned int flags), NVML_SUCCESS, ((void)flags, init()))
NVML(nvmlShutdown, (void), nvml_ready(), finish())
NVML(nvmlSystemGetDriverVersion, (char *out, unsigned int size), nvml_ready(), text(out, size, "580.82.07"))
NVML(nvmlSystemGetNVMLVersion, (char *out, unsigned int size), nvml_ready(), text(out, size, "13.580.82.07"))
NVML(nvmlSystemGetCudaDriverVersion, (int *out), nvml_ready(), OUT(out, 13000))
NVML(nvmlSystemGetCudaDriverVersion_v2, (int *out), nvml_ready(), OUT(out, 13000))

static nvmlReturn_t process_name(unsigned int pid, char *out, unsigned int size)
{
	char path[64], line[256] = "";
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%u/cmdline", pid);
	file = fopen(path, "r");
	if (!file)
		return NVML_NOT_FOUND;
	line[fread(line, 1, sizeof(line) - 1, file)] = 0;
	fclose(file);
	return text(out, size, line);
}

NVML(nvmlSystemGetProcessName, (unsigned int pid, char *out, unsigned int size), nvml_ready(),
     process_name(pid, out, size))

static const char *const texts[] = {
	[NVML_SUCCESS] = "Success",
	[NVML_UNINITIALIZED] = "Uninitialized",
	[NVML_INVALID_ARGUMENT] = "Invalid Argument",
	[NVML_NOT_SUPPORTED] = "Not Supported",
	[4] = "Insufficient Permissions",
	[NVML_NOT_FOUND] = "Not Found",
	[NVML_INSUFFICIENT_SIZE] = "Insufficient Size",
	[NVML_DRIVER_NOT_LOADED] = "Driver Not Loaded",
	[NVML_TIMEOUT] = "Timeout",
	[NVML_GPU_IS_LOST] = "GPU is lost",
};

EXPORT const char *nvmlErrorString(nvmlReturn_t error)
{
	bool known = error >= 0 && error < (int)(sizeof(texts) / sizeof(*texts)) && texts[error];

	return known ? texts[error] : "Unknown Error";
}

/* -- which device -- */

static nvmlReturn_t by_index(unsigned int i, nvmlDevice_t *device)
{
	if (i >= region->devices || !device)
		return NVML_INVALID_ARGUMENT;
	*device = &region->gpus[i];
	return NVML_SUCCESS;
}

static void uuid_of(const struct gpu *gpu, char *out, size_t size)
{
	const u8 *b = gpu->uuid;

	snprintf(out, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2],
		 b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

static nvmlReturn_t by_uuid(const char *uuid, nvmlDevice_t *device)
{
	char have[48];

	for (u32 i = 0; uuid && i < region->devices; i++) {
		uuid_of(&region->gpus[i], have, sizeof(have));
		if (!strcmp(have, uuid))
			return by_index(i, device);
	}
	return uuid ? NVML_NOT_FOUND : NVML_INVALID_ARGUMENT;
}

struct pci_place {
	unsigned int domain, bus, device;
};

static bool place_of(const char *id, struct pci_place *p)
{
	return id && sscanf(id, "%x:%x:%x", &p->domain, &p->bus, &p->device) == 3;
}

static nvmlReturn_t by_pci(const char *id, nvmlDevice_t *device)
{
	struct pci_place want, have;

	if (!place_of(id, &want))
		return NVML_INVALID_ARGUMENT;
	for (u32 i = 0; i < region->devices; i++)
		if (place_of(region->gpus[i].pci, &have) && !memcmp(&want, &have, sizeof(want)))
			return by_index(i, device);
	return NVML_NOT_FOUND;
}

struct pci_info {
	char legacy[16];
	unsigned int domain, bus, device, device_id, subsystem_id;
	char id[32];
};

static nvmlReturn_t pci_info(const struct gpu *gpu, struct pci_info *out)
{
	struct pci_place p = {0, 0, 0};

	if (!out)
		return NVML_INVALID_ARGUMENT;
	place_of(gpu->pci, &p);
	*out = (struct pci_info){.domain = p.domain, .bus = p.bus, .device = p.device, .device_id = 0x233010de,
				 .subsystem_id = 0x16c110de};
	snprintf(out->legacy, sizeof(out->legacy), "%04X:%02X:%02X.0", p.domain & 0xffff, p.bus & 0xff, p.device & 0xff);
	snprintf(out->id, sizeof(out->id), "%08X:%02X:%02X.0", p.domain, p.bus & 0xff, p.device & 0xff);
	return NVML_SUCCESS;
}

static nvmlReturn_t uuid_text(const struct gpu *gpu, char *out, unsigned int size)
{
	char have[48];

	uuid_of(gpu, have, sizeof(have));
	return text(out, size, have);
}

NVML(nvmlDeviceGetCount_v2, (unsigned int *n), nvml_ready(), OUT(n, region->devices))
NVML(nvmlDeviceGetHandleByIndex_v2, (unsigned int i, nvmlDevice_t *device), nvml_ready(), by_index(i, device))
NVML(nvmlDeviceGetHandleByUUID, (const char *uuid, nvmlDevice_t *device), nvml_ready(), by_uuid(uuid, device))
NVML(nvmlDeviceGetHandleByPciBusId_v2, (const char *id, nvmlDevice_t *device), nvml_ready(), by_pci(id, device))
OF_DEVICE(nvmlDeviceGetName, (nvmlDevice_t device, char *out, unsigned int size), text(out, size, device->name))
OF_DEVICE(nvmlDeviceGetUUID, (nvmlDevice_t device, char *out, unsigned int size), uuid_text(device, out, size))
OF_DEVICE(nvmlDeviceGetSerial, (nvmlDevice_t device, char *out, unsigned int size), text(out, size, "1650423000000"))
OF_DEVICE(nvmlDeviceGetIndex, (nvmlDevice_t device, unsigned int *out), OUT(out, (unsigned int)nvml_index(device)))
OF_DEVICE(nvmlDeviceGetMinorNumber, (nvmlDevice_t device, unsigned int *out),
	  OUT(out, (unsigned int)nvml_index(device)))
OF_DEVICE(nvmlDeviceGetPciInfo_v3, (nvmlDevice_t device, struct pci_info *out), pci_info(device, out))
OF_DEVICE(nvmlDeviceGetArchitecture, (nvmlDevice_t device, unsigned int *out), OUT(out, 9)) /* Hopper */
OF_DEVICE(nvmlDeviceGetCudaComputeCapability, (nvmlDevice_t device, int *major, int *minor),
	  (*major = 9, *minor = 0, NVML_SUCCESS))
OF_DEVICE(nvmlDeviceGetPersistenceMode, (nvmlDevice_t device, int *out), OUT(out, 1))

/* -- memory and processes -- */

struct memory {
	unsigned long long total, free, used;
};

struct memory_v2 {
	unsigned int version;
	unsigned long long total, reserved, free, used;
};
#define MEMORY_V2 (sizeof(struct memory_v2) | 2U << 24)

static nvmlReturn_t memory(const struct gpu *gpu, struct memory *out)
{
	u64 used = gpu->used_granules * gpu->granule_bytes;

	if (!out)
		return NVML_INVALID_ARGUMENT;
	*out = (struct memory){gpu->memory_bytes, gpu->memory_bytes - used, used};
	return NVML_SUCCESS;
}

static nvmlReturn_t memory_v2(const struct gpu *gpu, struct memory_v2 *out)
{
	struct memory m;

	if (!out)
		return NVML_INVALID_ARGUMENT;
	if (out->version != MEMORY_V2)
		return NVML_ARGUMENT_VERSION_MISMATCH;
	memory(gpu, &m);
	out->total = m.total;
	out->reserved = 0;
	out->free = m.free;
	out->used = m.used;
	return NVML_SUCCESS;
}

bool nvml_alive(const struct proc *p)
{
	return p->pid && !(kill((pid_t)p->pid, 0) && errno == ESRCH);
}

struct process_info {
	unsigned int pid;
	unsigned long long used;
	unsigned int gpu_instance, compute_instance;
};

bool nvml_on_device(const struct proc *p, int d)
{
	return nvml_alive(p) && (p->granules[d] || p->busy_until_ns[d]);
}

static nvmlReturn_t processes(const struct gpu *gpu, unsigned int *n, struct process_info *out)
{
	int d = nvml_index(gpu);
	unsigned int room, found = 0;

	if (!n)
		return NVML_INVALID_ARGUMENT;
	room = *n;
	for (u32 i = 0; i < MAX_PROCESSES; i++) {
		const struct proc *p = &region->procs[i];

		if (!nvml_on_device(p, d))
			continue;
		if (out && found < room)
			out[found] = (struct process_info){p->pid, p->granules[d] * gpu->granule_bytes, ~0U, ~0U};
		found++;
	}
	*n = found;
	return found > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static nvmlReturn_t no_processes(unsigned int *n)
{
	return OUT(n, 0);
}

OF_DEVICE(nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, struct memory *out), memory(device, out))
OF_DEVICE(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, struct memory_v2 *out), memory_v2(device, out))
OF_DEVICE(nvmlDeviceGetComputeRunningProcesses_v2,
	  (nvmlDevice_t device, unsigned int *n, struct process_info *out), processes(device, n, out))
OF_DEVICE(nvmlDeviceGetComputeRunningProcesses_v3,
	  (nvmlDevice_t device, unsigned int *n, struct process_info *out), processes(device, n, out))
OF_DEVICE(nvmlDeviceGetGraphicsRunningProcesses_v3,
	  (nvmlDevice_t device, unsigned int *n, struct process_info *out), ((void)out, no_processes(n)))
OF_DEVICE(nvmlDeviceGetMPSComputeRunningProcesses_v3,
	  (nvmlDevice_t device, unsigned int *n, struct process_info *out), ((void)out, no_processes(n)))
