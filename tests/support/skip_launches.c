// For GPUs that MXNet has no machine code for, Hopper and later: preloaded, it skips the kernels that do not start there for
// that reason, MXNet's own, so that what does not depend on them can be tried: copies, cuDNN, this layer. What a skipped
// kernel should have written stays as it was.
//
//     gcc -shared -fPIC tests/support/skip_launches.c -o skip_launches.so -ldl
//     LD_PRELOAD=$PWD/skip_launches.so GLUON_SYNCBN_ANY_ARCHITECTURE=1 python ...
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {
    unsigned x, y, z;
} Extent;
typedef int Launch(const void*, Extent, Extent, void**, size_t, void*);
typedef int Last(void);

enum { kInvalidDeviceFunction = 98, kNoKernelImage = 209 };

long skipped_launches;  // which a program reads

int cudaLaunchKernel(const void* kernel, Extent grid, Extent block, void** arguments, size_t shared, void* stream) {
    void* const library = dlopen("libcudart.so.11.0", RTLD_LAZY | RTLD_NOLOAD);  // MXNet's
    if (library == NULL) abort();
    Launch* const launch = (Launch*)dlsym(library, "cudaLaunchKernel");
    Last* const last = (Last*)dlsym(library, "cudaGetLastError");
    const int status = launch(kernel, grid, block, arguments, shared, stream);
    dlclose(library);
    if (status != kInvalidDeviceFunction && status != kNoKernelImage) return status;
    last();  // forgets it
    __sync_fetch_and_add(&skipped_launches, 1);
    return 0;
}

__attribute__((destructor)) static void tell(void) {
    if (skipped_launches > 0)
        fprintf(stderr, "skip_launches: %ld kernels that this GPU has no code for\n", skipped_launches);
}
