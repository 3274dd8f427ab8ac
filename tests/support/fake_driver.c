/* A libcuda.so.1 that tells of as many GPUs as the environment says, and runs nothing. */
#include <stdlib.h>
#include <string.h>

static int number(const char* name) {
    const char* value = getenv(name);
    return value ? atoi(value) : 0;
}

int cuInit(unsigned flags) { return flags || !number("FAKE_GPUS") ? 100 : 0; }
int cuDriverGetVersion(int* version) { return *version = number("FAKE_CUDA"), 0; }
int cuDeviceGetCount(int* count) { return *count = number("FAKE_GPUS"), 0; }
int cuDeviceGet(int* device, int ordinal) { return ordinal < number("FAKE_GPUS") ? (*device = ordinal, 0) : 101; }
int cuDeviceGetName(char* name, int size, int device) { return strncpy(name, device ? "Other" : "First", size), 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    /* FAKE_CAPABILITY=86: the first GPU has 8.6, the second 9.6 and so on. */
    int capability = number("FAKE_CAPABILITY") + 10 * device;
    if (attribute != 75 && attribute != 76) return 1;
    return *value = attribute == 75 ? capability / 10 : capability % 10, 0;
}
int cuGetErrorString(int status, const char** text) {
    return *text = status == 100 ? "no CUDA-capable device is detected" : "invalid device ordinal", 0;
}

/* What libmxnet.so is linked against. */
#define STUB(name) \
    int name(void) { return 3; }
STUB(cuDevicePrimaryCtxRetain)
STUB(cuGraphKernelNodeGetParams)
STUB(cuGraphNodeGetType)
STUB(cuLaunchKernel)
STUB(cuModuleGetFunction)
STUB(cuModuleLoadData)
STUB(cuModuleLoadDataEx)
STUB(cuModuleUnload)
