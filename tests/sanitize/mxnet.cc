#include "mxnet.h"

#include "core.h"
#include "cpu/numbers.h"

namespace driver {
namespace {

using syncbn::cpu::Half;
using syncbn::cpu::Value;

CustomOpPropCreator creator = nullptr;
thread_local bool is_training = false;
thread_local std::string error_of_array;

}  // namespace

// ---- arrays ----------------------------------------------------------------------------------------------------

Array::Array(Type type, int64_t size, double value)
    : type(type), size(size), memory_(new char[static_cast<size_t>(size * size_of(type))]) {
    for (int64_t i = 0; i < size; ++i) set(i, value);
}

double Array::get(int64_t i) const {
    const void* at = memory_.get() + i * size_of(type);
    if (type == Type::kFloat64) return *static_cast<const double*>(at);
    if (type == Type::kFloat32) return *static_cast<const float*>(at);
    return Value<Half>::load(static_cast<const Half*>(at));
}

void Array::set(int64_t i, double value) {
    void* at = memory_.get() + i * size_of(type);
    if (type == Type::kFloat64)
        *static_cast<double*>(at) = value;
    else if (type == Type::kFloat32)
        *static_cast<float*>(at) = static_cast<float>(value);
    else
        Value<Half>::store(static_cast<Half*>(at), static_cast<float>(value));
}

void* new_handle(const ArrayP& array) {
    ++figures.handles;
    return new ArrayP(array);
}

// ---- the functions that the core calls -------------------------------------------------------------------------

// The core finds them by these names in the driver, as in MXNet's library.
extern "C" {

int MXCustomOpRegister(const char*, CustomOpPropCreator given) {
    creator = given;
    return 0;
}

int MXAutogradIsTraining(bool* training) {
    *training = is_training;
    return 0;
}

const char* MXGetLastError() { return "the array is broken\nStack trace:\n  that of MXNet"; }

int MXNDArrayGetData(void* handle, void** data) {
    const Within program(false);
    const ArrayP& array = *static_cast<ArrayP*>(handle);
    if (!array) expect(false, "the core reads no array that it has not asked for");
    if (!array || array->broken) return -1;
    *data = array->memory();
    return 0;
}

// MXNet looks at the arrays of a call once that is over, so it makes no difference that this runs at once.
int MXEnginePushSyncND(void (*run)(void* context, void* parameter), void* parameter, void (*deleter)(void* parameter),
                       const void*, void**, int, void** writes, int write_count, const void*, int, const char*) {
    const Within program(false);
    expect(write_count == 1 && writes[0] != nullptr, "an error goes to one array");
    expect(error_of_array.empty(), "a call fails once");
    try {
        run(nullptr, parameter);
        expect(false, "what is handed to an array is an error");
    } catch (const dmlc::Error& error) {
        error_of_array = error.what();
    }
    deleter(parameter);
    return 0;
}

int MXNDArrayFree(void* handle) {
    delete static_cast<ArrayP*>(handle);
    --figures.handles;
    return 0;
}

// No call of the driver's comes here.
int MXAutogradIsRecording() { std::abort(); }
int MXEnginePushAsyncND() { std::abort(); }
int MXShallowCopyNDArray() { std::abort(); }

}  // extern "C"

std::string take_error() { return std::exchange(error_of_array, {}); }

std::shared_ptr<Callbacks> make_property(const std::map<std::string, std::string>& attributes) {
    std::vector<const char*> keys, values;
    for (const auto& [key, value] : attributes) {
        keys.push_back(key.c_str());
        values.push_back(value.c_str());
    }
    auto made = std::make_shared<Callbacks>();  // MXNet deletes the property also if this fails
    const Within core(true);
    if (creator("gluon_syncbn", static_cast<int>(keys.size()), keys.data(), values.data(), &made->list) == 0)
        throw dmlc::Error("Check failed");
    return made;
}

void load_core() {
    syncbn_find_in(dlopen("libm.so.6", RTLD_NOW), "", "");
    expect(syncbn_register(kProcess) != 0, "a library without the functions that the layer calls is refused");
    syncbn_find_in(dlopen(nullptr, RTLD_NOW), "", "");
    expect(syncbn_register(kProcess) == 0, "the operator is registered");
}

void set_training(bool training) { is_training = training; }

}  // namespace driver
