#include "native/layout.h"

#include <algorithm>

namespace syncbn {
namespace native {

const Descriptor* blocks_of(const NDArray& array, Type type, const Shape& shape) {
    const int kind = type == Type::kFloat32 ? kFloat32Kind : kBfloat16Kind;
    if ((type != Type::kFloat32 && type != Type::kBfloat16) || array.is_plain()) return nullptr;
    const Descriptor& d = array.chunk().blocked->descriptor;
    if (d.dims_count < 3 || d.type != kind || d.kind != kBlockedKind || d.offset != 0 || d.inner_count != 1)
        return nullptr;
    const int64_t block = block_of(d);
    if (d.inner_dims[0] != 1 || (block != 8 && block != 16)) return nullptr;
    int64_t stride = block;
    for (int i = d.dims_count - 1; i > 1; --i) {
        if (d.strides[i] != stride || d.padded_dims[i] != d.dims[i]) return nullptr;
        stride *= d.dims[i];
    }
    const bool dense = d.strides[1] == stride && d.strides[0] == stride / block * d.dims[1];
    const bool whole = d.padded_dims[0] == d.dims[0] && d.padded_dims[1] == d.dims[1] && d.dims[1] % block == 0;
    const bool same = d.dims[0] == shape.outer && d.dims[1] == shape.channels && stride / block == shape.inner;
    return dense && whole && same ? &d : nullptr;
}

int64_t block_of(const Descriptor& descriptor) { return descriptor.inner_blocks[0]; }

bool alike(const Descriptor& a, const Descriptor& b) {
    return block_of(a) == block_of(b) && a.dims_count == b.dims_count &&
           std::equal(a.dims, a.dims + a.dims_count, b.dims);
}

}  // namespace native
}  // namespace syncbn
