// Declares the parts of MXNet's C++ side that calls need: how the published libraries of 1.9.1 lay out the arguments of
// an operator, and which functions they have. They are the last release, so this is final. `tests/layer/test_native.py`
// compares the layout with the wheel's headers; parts that these lack are marked.
//
// Those libraries were compiled by g++ 4.8. Of the types used here, later versions have changed only std::string.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mxnet_api.h"

namespace syncbn::native {

// A std::string as before g++ 5. Exceptions keep their text in one, behind the pointer to their virtual functions.
class OldString {
  public:
    explicit OldString(const std::string& text) : exception_(text) {}
    const void* object() const { return reinterpret_cast<const char*>(&exception_) + sizeof(void*); }

  private:
    const std::runtime_error exception_;
};

constexpr int kMostDims = 12;

// dnnl_memory_desc_t, of a blocked layout.
struct Descriptor {
    int dims_count;
    int64_t dims[kMostDims];
    int type;
    int64_t padded_dims[kMostDims], padded_offsets[kMostDims];
    int64_t offset;
    int kind;
    int64_t strides[kMostDims];
    int inner_count;
    int64_t inner_blocks[kMostDims], inner_dims[kMostDims];
};
constexpr int kBfloat16Kind = 2, kFloat32Kind = 3, kBlockedKind = 2;  // dnnl_bf16, dnnl_f32, dnnl_blocked

// mxnet::MKLDNNMemory of src/operator/nn/mkldnn/mkldnn_base-inl.h, which no header of the wheel has.
struct BlockedMemory {
    std::shared_ptr<void> memory;
    Descriptor descriptor;
};

// mxnet::NDArray::Chunk: memory, and the engine's variable for it.
struct Chunk {
    void* values;  // of its handle
    char handle[24];
    std::array<void*, 3> more_handles;
    std::shared_ptr<BlockedMemory> blocked;
};

class NDArray;
using NDArrays = std::vector<NDArray>;

// mxnet::op::custom::CustomParam of src/operator/custom/custom.cc, which no header has.
struct CustomState {
    void* type;  // std::string
    size_t inputs, outputs, states;
    std::vector<int> needed;  // by the backward, of [gradients of the outputs][inputs][outputs]
    std::shared_ptr<MXCallbackList> callbacks;
};

struct State {
    void* variable;
    CustomState* custom;
};
using StatePointer = std::shared_ptr<State>;  // mxnet::OpStatePtr

// mxnet::engine::CallbackOnComplete
struct Completion {
    void (*run)(void* engine, void* parameter, const dmlc::Error* error);
    void* engine;
    void* parameter;
    void operator()(const dmlc::Error* error) const { run(engine, parameter, error); }
    void fail(const std::exception_ptr& reason) const noexcept;  // in calls.cc
};

// mxnet::engine::ThreadedOpr and mxnet::engine::OprBlock of src/engine/threaded_engine.h, which no header has: an
// operation of the engine, and one that runs, which its completion points to.
struct Operation {
    std::function<void()> run;
    std::array<std::vector<void*>, 2> variables;
    int property;
    void* name;
    bool is_temporary, waits;
    std::shared_ptr<std::exception_ptr> failure;  // of what it depends on, or its own
};
struct Block {
    std::atomic<int> missing;
    Operation* operation;
};

// mxnet::OpContext
struct OpContext {
    bool needs_gradient;
    bool training;
    std::array<void*, 4> run;  // RunContext
    Completion complete;
    std::vector<char> resources;
};

using Requests = std::vector<int>;
using Compute =
    std::function<void(const StatePointer&, const OpContext&, const NDArrays&, const Requests&, const NDArrays&)>;

// mxnet::Context
struct Context {
    static constexpr int kCpu = 1, kGpu = 2;
    int type, number;
};

// mxnet::engine::Var
struct Variable {
    struct {
        size_t (*version)(Variable* self);
    }* table;  // of its virtual functions
    size_t version;
};

// mxnet::Resource
struct Resource {
    int kind;  // of ResourceRequest
    Variable* variable;
    int32_t id;
    void* memory;
};
constexpr int kTempSpace = 1;

// mxnet::Storage::Handle
struct StorageHandle {
    void* values = nullptr;
    size_t size = 0;
    Context context{Context::kCpu, 0};
    int shared_process = -1, shared_number = -1;
};

// mxnet::resource::SpaceAllocator of src/resource.cc, which no header has: what a Resource of temporary space points to.
struct Space {
    Context context{Context::kCpu, 0};
    StorageHandle memory, host;
};

struct Engine;  // mxnet::Engine

// mxnet::resource::ResourceManagerImpl of src/resource.cc, which no header has.
struct ResourceManager {
    void** table;  // of its virtual functions
    std::array<int, 4> copies;
    std::array<void*, 4> references;
    uint32_t seed;
};

// nnvm::Op
struct Op {
    char before[152];
    uint32_t index;
};

// nnvm::OpMap<FStatefulComputeEx>
struct ComputeMap {
    void* name;
    std::vector<std::pair<Compute, int>> by_index;  // with its priority
};

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

// mxnet::NDArray. A copy keeps the memory.
class NDArray {
  public:
    NDArray(const NDArray& other) { library.copy(this, &other); }
    NDArray& operator=(const NDArray&) = delete;
    ~NDArray() { library.destroy(this); }
    // Returns the values in the order of the dimensions, as a copy if they are in another.
    static NDArray plain(const NDArray& other) { return other.is_plain() ? NDArray(other) : NDArray(Plain{}, other); }
    bool is_plain() const { return chunk_ == nullptr || !library.is_blocked(chunk_); }
    Chunk& chunk() const { return *chunk_; }

  private:
    struct Plain {};
    NDArray(Plain, const NDArray& other) { library.reorder(this, &other); }

    Chunk* chunk_;
    char rest_[216];
};

}  // namespace syncbn::native
