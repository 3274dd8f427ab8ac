// `kernels.cu`, compiled at first use by MXNet's run-time compiler, and MXNet's arrays on a GPU.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "mxnet_api.h"
#include "types.h"

namespace syncbn {
namespace cuda {

// Where the source is. Read at the first launch.
void set_source(const std::string& path);

struct Grid {
    int64_t x = 1, y = 1, z = 1;
};

// An argument of a kernel: an array that it reads or writes, or a number.
struct Argument {
    bool is_array, is_const;
    int type;  // MXNet's flag
    union {
        void* array;
        int32_t int32;
        int64_t int64;
        double float64;
    };

    Argument(bool value) : Argument(static_cast<int32_t>(value)) {}
    Argument(int32_t value) : is_array(false), is_const(true), type(4), int32(value) {}
    Argument(int64_t value) : is_array(false), is_const(true), type(6), int64(value) {}
    Argument(double value) : is_array(false), is_const(true), type(static_cast<int>(Type::kFloat64)), float64(value) {}
    Argument(void* array, Type type, bool is_const)
        : is_array(true), is_const(is_const), type(static_cast<int>(type)), array(array) {}
};

inline Argument in(void* array, Type type) { return {array, type, true}; }
inline Argument out(void* array, Type type) { return {array, type, false}; }

// Threads of every block; kernels.cu is compiled for it.
constexpr int kBlock = 256;

// Hands `kernel` to MXNet's engine, which runs it when its arrays are ready. A kernel that fails leaves its error in what it
// writes.
void launch(const std::string& kernel, int device, Grid grid, std::initializer_list<Argument> arguments);

// Waits for whatever writes the array of float64.
void read(void* array, double* values, int64_t n);

// An array of float64 on a GPU.
class Doubles {
  public:
    Doubles(int device, int64_t size);
    ~Doubles();
    Doubles(Doubles&& other) : handle_(other.handle_), size_(other.size_) { other.handle_ = nullptr; }
    Doubles& operator=(Doubles&& other);

    void* handle() const { return handle_; }
    void upload(const double* values);  // of all its values
    // Waits for whatever writes them.
    void download(double* values) const;

  private:
    void* handle_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace cuda
}  // namespace syncbn
