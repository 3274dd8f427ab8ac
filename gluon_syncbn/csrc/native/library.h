// Wraps MXNet's library, if its C++ side is known.
#pragma once

#include "mxnet_api.h"
#include "native/abi.h"

namespace syncbn {
namespace native {

#define SYNCBN_COMPUTE                                                                                 \
    "St8functionIFvRKN5mxnet10OpStatePtrERKNS3_9OpContextERKSt6vectorINS3_7NDArrayESaISB_EERKSA_INS3_" \
    "9OpReqTypeESaISG_EESF_EE"
struct Library {
    int (*find_op)(const char* name, Op** op) = find("NNGetOpHandle");
    const ComputeMap& (*computes)(const void* name) = find("_ZN4nnvm2Op7GetAttrI" SYNCBN_COMPUTE
                                                           "EERKNS_5OpMapIT_EERKSs");
    Op& (*set_compute)(Op* op, const void* name, const Compute& compute,
                       int priority) = find("_ZN4nnvm2Op8set_attrI" SYNCBN_COMPUTE "EERS0_RKSsRKT_i");
    Op& (*set_flag)(Op* op, const void* name, const bool& value,
                    int priority) = find("_ZN4nnvm2Op8set_attrIbEERS0_RKSsRKT_i");
    void (*copy)(NDArray* out, const NDArray* from) = find("_ZN5mxnet7NDArrayC1ERKS0_");
    void (*destroy)(NDArray* array) = find("_ZN5mxnet7NDArrayD1Ev");
    // To plain; `out` is empty before.
    NDArray* (*reorder)(NDArray* out, const NDArray* from) = find("_ZNK5mxnet7NDArray15Reorder2DefaultEv");
    // Null for a view.
    void* (*lay_out)(NDArray* array,
                     const Descriptor* descriptor) = find("_ZN5mxnet7NDArray16CreateMKLDNNDataERKN4dnnl6memory4descE");
    bool (*is_blocked)(const Chunk* chunk) = find("_ZNK5mxnet7NDArray5Chunk8IsMKLDNNEv");
    void (*reorder_chunk)(Chunk* chunk) = find("_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv");  // to plain, in place
    void* (*stream)() = find("_ZN5mxnet12MKLDNNStream3GetEv");  // oneDNN's, of this thread
    void (*submit)(void* stream, bool clean_up) = find("_ZN5mxnet12MKLDNNStream6SubmitEb");
};
#undef SYNCBN_COMPUTE

// Empty until `take_calls` knows the library.
inline Library library;

inline NDArray::NDArray(const NDArray& other) { library.copy(this, &other); }
inline NDArray::NDArray(Plain, const NDArray& other) { library.reorder(this, &other); }
inline NDArray::~NDArray() { library.destroy(this); }
inline bool NDArray::is_plain() const { return chunk_ == nullptr || !library.is_blocked(chunk_); }
inline NDArray NDArray::plain(const NDArray& other) {
    return other.is_plain() ? NDArray(other) : NDArray(Plain{}, other);
}

}  // namespace native
}  // namespace syncbn
