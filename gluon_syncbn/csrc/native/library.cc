#include "native/library.h"

namespace syncbn {
namespace native {

Library library;

void open(void* handle) {
#define SYNCBN_COMPUTE                                                                                 \
    "St8functionIFvRKN5mxnet10OpStatePtrERKNS3_9OpContextERKSt6vectorINS3_7NDArrayESaISB_EERKSA_INS3_" \
    "9OpReqTypeESaISG_EESF_EE"
    find(handle, "NNGetOpHandle", &library.find_op);
    find(handle, "_ZN4nnvm2Op7GetAttrI" SYNCBN_COMPUTE "EERKNS_5OpMapIT_EERKSs", &library.computes);
    find(handle, "_ZN4nnvm2Op8set_attrI" SYNCBN_COMPUTE "EERS0_RKSsRKT_i", &library.set_compute);
    find(handle, "_ZN4nnvm2Op8set_attrIbEERS0_RKSsRKT_i", &library.set_flag);
    find(handle, "_ZN5mxnet7NDArrayC1ERKS0_", &library.copy);
    find(handle, "_ZN5mxnet7NDArrayD1Ev", &library.destroy);
    find(handle, "_ZNK5mxnet7NDArray15Reorder2DefaultEv", &library.reorder);
    find(handle, "_ZN5mxnet7NDArray16CreateMKLDNNDataERKN4dnnl6memory4descE", &library.lay_out);
    find(handle, "_ZNK5mxnet7NDArray5Chunk8IsMKLDNNEv", &library.is_blocked);
    find(handle, "_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv", &library.reorder_chunk);
    find(handle, "_ZN5mxnet12MKLDNNStream3GetEv", &library.stream);
    find(handle, "_ZN5mxnet12MKLDNNStream6SubmitEb", &library.submit);
#undef SYNCBN_COMPUTE
}

NDArray::NDArray(const NDArray& other) { library.copy(this, &other); }
NDArray::NDArray(Plain, const NDArray& other) { library.reorder(this, &other); }
NDArray::~NDArray() { library.destroy(this); }
NDArray NDArray::plain(const NDArray& other) { return other.is_plain() ? NDArray(other) : NDArray(Plain{}, other); }
bool NDArray::is_plain() const { return chunk_ == nullptr || !library.is_blocked(chunk_); }

}  // namespace native
}  // namespace syncbn
