/* libcuda: names of errors, and the table of entry points. */
#include "cuda_api.h"

#include <dlfcn.h>
#include <stdio.h>

/* -- errors -- */

static const struct {
	CUresult code;
	const char *name, *text;
} errors[] = {
#define E(code, text) {code, #code, text},
	E(CUDA_SUCCESS, "no error") E(CUDA_ERROR_INVALID_VALUE, "invalid argument")
	E(CUDA_ERROR_OUT_OF_MEMORY, "out of memory") E(CUDA_ERROR_NOT_INITIALIZED, "initialization error")
	E(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")
	E(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")
	E(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid")
	E(CUDA_ERROR_INVALID_CONTEXT, "invalid device context")
	E(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered")
	E(CUDA_ERROR_FILE_NOT_FOUND, "file not found") E(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")
	E(CUDA_ERROR_NOT_FOUND, "named symbol not found") E(CUDA_ERROR_NOT_READY, "device not ready")
	E(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")
	E(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped")
	E(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region")
	E(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure") E(CUDA_ERROR_NOT_SUPPORTED, "operation not supported")
	E(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing")
	E(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture")
	E(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "unmatched capture")
	E(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work")
	E(CUDA_ERROR_UNKNOWN, "unknown error")
#undef E
};

static CUresult error_text(CUresult code, const char **out, bool name)
{
	for (size_t i = 0; i < sizeof(errors) / sizeof(*errors); i++)
		if (errors[i].code == code) {
			*out = name ? errors[i].name : errors[i].text;
			return CUDA_SUCCESS;
		}
	*out = NULL;
	return CUDA_ERROR_INVALID_VALUE;
}

API(cuGetErrorName, (CUresult code, const char **out), error_text(code, out, true))
API(cuGetErrorString, (CUresult code, const char **out), error_text(code, out, false))

/* -- entry points -- */

/* The newest version of a function by its plain name, or a version by its full name. */
static void *entry(const char *symbol, bool per_thread)
{
	static const char *const versions[] = {"_v4", "_v3", "_v2", ""};
	static const char *const kinds[] = {"_ptsz", "_ptds", ""};
	static void *self;
	char name[128];

	if (!self) {
		Dl_info info;

		if (dladdr((void *)entry, &info))
			self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
	}
	for (int k = per_thread ? 0 : 2; k < 3; k++)
		for (int v = 0; v < 4; v++) {
			snprintf(name, sizeof(name), "%s%s%s", symbol, versions[v], kinds[k]);
			void *found = self ? dlsym(self, name) : NULL;
			if (found)
				return found;
		}
	return NULL;
}

static CUresult proc_address(const char *symbol, void **out, unsigned long long flags, int *status)
{
	if (!symbol || !out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = entry(symbol, flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
	if (status)
		*status = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API(cuGetProcAddress, (const char *symbol, void **out, int version, unsigned long long flags),
    ((void)version, proc_address(symbol, out, flags, NULL)))
API(cuGetProcAddress_v2, (const char *symbol, void **out, int version, unsigned long long flags, int *status),
    ((void)version, proc_address(symbol, out, flags, status)))
API(cuGetExportTable, (const void **table, const CUuuid *id), ((void)id, *table = NULL, CUDA_ERROR_NOT_FOUND))
