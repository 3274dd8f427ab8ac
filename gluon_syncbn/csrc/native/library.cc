#include "native/library.h"

#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstring>

namespace syncbn {
namespace native {

Library library;

namespace {

struct Known {
    const char* device;
    const char* build_id;
    const char* wheel;
};
constexpr Known kKnown[] = {
    {"cpu", "472988f6268780302be9ee15d6c53d9a07b534f5", "mxnet-1.9.1-py3-none-manylinux2014_x86_64"},
    {"gpu", "9523fbda21d9ef14722537c1896afda0cdd1778e", "mxnet_cu112-1.9.1-py3-none-manylinux2014_x86_64"},
};

struct Search {
    uintptr_t address;
    std::string build_id;
};

// Returns the build id, a note of the linker in an object.
std::string build_id(const dl_phdr_info& object, const ElfW(Phdr) & segment) {
    const char* at = reinterpret_cast<const char*>(object.dlpi_addr + segment.p_vaddr);
    const char* end = at + segment.p_memsz;
    const auto padded = [](size_t size) { return (size + 3) / 4 * 4; };
    while (at + sizeof(ElfW(Nhdr)) <= end) {
        ElfW(Nhdr) note;
        std::memcpy(&note, at, sizeof note);
        const char* name = at + sizeof note;
        const char* content = name + padded(note.n_namesz);
        if (content + note.n_descsz > end) break;
        if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0) {
            static const char digits[] = "0123456789abcdef";
            std::string out;
            for (size_t i = 0; i < note.n_descsz; ++i) {
                const auto byte = static_cast<unsigned char>(content[i]);
                out += {digits[byte / 16], digits[byte % 16]};
            }
            return out;
        }
        at = content + padded(note.n_descsz);
    }
    return "";
}

int look(dl_phdr_info* object, size_t, void* argument) {
    auto& search = *static_cast<Search*>(argument);
    const ElfW(Phdr)*const first = object->dlpi_phdr, *const last = first + object->dlpi_phnum;
    const bool found = std::any_of(first, last, [&](const ElfW(Phdr) & segment) {
        const uintptr_t begin = object->dlpi_addr + segment.p_vaddr;
        return segment.p_type == PT_LOAD && search.address >= begin && search.address < begin + segment.p_memsz;
    });
    if (!found) return 0;
    for (const auto* segment = first; segment != last && search.build_id.empty(); ++segment)
        if (segment->p_type == PT_NOTE) search.build_id = build_id(*object, *segment);
    return 1;
}

}  // namespace

std::string open(void* handle, const std::string& device) {
    Library found{};
    if (!find(handle, "NNGetOpHandle", &found.find_op)) return "the library has no NNGetOpHandle";
    Search search{reinterpret_cast<uintptr_t>(found.find_op), ""};
    dl_iterate_phdr(look, &search);
    const Known& wanted =
        *std::find_if(std::begin(kKnown), std::end(kKnown), [&](const Known& one) { return device == one.device; });
    if (search.build_id != wanted.build_id)
        return "this MXNet (build id " + (search.build_id.empty() ? "none" : search.build_id) + ") is not " +
               wanted.wheel;
#define SYNCBN_COMPUTE                                                                                 \
    "St8functionIFvRKN5mxnet10OpStatePtrERKNS3_9OpContextERKSt6vectorINS3_7NDArrayESaISB_EERKSA_INS3_" \
    "9OpReqTypeESaISG_EESF_EE"
    const bool complete =
        find(handle, "_ZN4nnvm2Op7GetAttrI" SYNCBN_COMPUTE "EERKNS_5OpMapIT_EERKSs", &found.computes) &&
        find(handle, "_ZN4nnvm2Op8set_attrI" SYNCBN_COMPUTE "EERS0_RKSsRKT_i", &found.set_compute) &&
        find(handle, "_ZN4nnvm2Op8set_attrIbEERS0_RKSsRKT_i", &found.set_flag) &&
        find(handle, "_ZN5mxnet7NDArrayC1ERKS0_", &found.copy) &&
        find(handle, "_ZN5mxnet7NDArrayD1Ev", &found.destroy) &&
        find(handle, "_ZNK5mxnet7NDArray15Reorder2DefaultEv", &found.reorder) &&
        find(handle, "_ZN5mxnet7NDArray16CreateMKLDNNDataERKN4dnnl6memory4descE", &found.lay_out) &&
        find(handle, "_ZNK5mxnet7NDArray5Chunk8IsMKLDNNEv", &found.is_blocked) &&
        find(handle, "_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv", &found.reorder_chunk) &&
        find(handle, "_ZN5mxnet12MKLDNNStream3GetEv", &found.stream) &&
        find(handle, "_ZN5mxnet12MKLDNNStream6SubmitEb", &found.submit);
#undef SYNCBN_COMPUTE
    if (!complete) return "the library lacks a function that its build should have";
    library = found;
    return "";
}

NDArray::NDArray(const NDArray& other) { library.copy(this, &other); }
NDArray::NDArray(Plain, const NDArray& other) { library.reorder(this, &other); }
NDArray::~NDArray() { library.destroy(this); }
NDArray NDArray::plain(const NDArray& other) { return other.is_plain() ? NDArray(other) : NDArray(Plain{}, other); }
bool NDArray::is_plain() const { return chunk_ == nullptr || !library.is_blocked(chunk_); }

}  // namespace native
}  // namespace syncbn
