// MXNet makes handles of these libraries together with each stream. Making them is all that works: what would compute
// with them is a stub.
extern "C" {
#define HANDLE(CREATE, DESTROY, SET_STREAM) \
    int CREATE(void** out) {                \
        *out = reinterpret_cast<void*>(16); \
        return 0;                           \
    }                                       \
    int DESTROY(void*) { return 0; }        \
    int SET_STREAM(void*, void*) { return 0; }
HANDLE(cublasCreate_v2, cublasDestroy_v2, cublasSetStream_v2)
HANDLE(cusolverDnCreate, cusolverDnDestroy, cusolverDnSetStream)
}
