#include "copies.h"

#include <cstring>

#include "device.h"
#include "memory.h"

namespace emulator {
namespace {

void move(const Copy& it, int device) {
    for (size_t row = 0; row < it.rows; ++row) {
        char* const to = static_cast<char*>(it.to) + row * it.to_pitch;
        const char* const from = static_cast<const char*>(it.from) + row * it.from_pitch;
        std::string wrong = problem(from, it.width, it.from_device);
        if (wrong.empty()) wrong = problem(to, it.width, it.to_device);
        if (!wrong.empty()) {
            report(device, kIllegalAddress, format("copy of %zu rows of %zu bytes: ", it.rows, it.width) + wrong);
            return;
        }
        std::memmove(to, from, it.width);
    }
}

}  // namespace

Status copy(const Copy& what, const StreamPointer& stream) {
    const int device = device_of(*stream);
    if (const Status status = sticky(device)) return status;
    if (what.width == 0 || what.rows == 0) return kSuccess;
    if (what.rows > 1 && (what.to_pitch < what.width || what.from_pitch < what.width)) return kInvalidValue;
    count(device, device_of(what.from) < 0 ? kToDevice : device_of(what.to) < 0 ? kToHost : kWithin);
    if (device_of(what.from) == kPageableHost && what.from != nullptr) {
        auto staged = std::make_shared<std::vector<char>>(what.width * what.rows);
        for (size_t row = 0; row < what.rows; ++row)
            std::memcpy(staged->data() + row * what.width, static_cast<const char*>(what.from) + row * what.from_pitch,
                        what.width);
        Copy rest = what;
        rest.from = staged->data();
        rest.from_pitch = what.width;
        enqueue(stream, [staged, rest, device] { move(rest, device); });
        return kSuccess;
    }
    const Completion done = enqueue(stream, [what, device] { move(what, device); });
    if (device_of(what.to) != kPageableHost) return kSuccess;
    done.wait();
    return sticky(device);
}

Status copy_and_wait(void* to, const void* from, size_t size) {
    const StreamPointer stream = find_stream(nullptr);
    // Of whichever device they are: the driver finds it by the address.
    const auto owner = [](const void* pointer) {
        const int device = device_of(pointer);
        return device == kPageableHost ? current_device : device;
    };
    const Status status = copy({to, size, from, size, size, 1, owner(to), owner(from)}, stream);
    return status ? status : synchronize(stream);
}

Status compute(const StreamPointer& stream, const std::string& name, const std::vector<Bytes>& reads, Bytes written,
               std::function<void()> work) {
    const int device = device_of(*stream);
    if (const Status status = sticky(device)) return status;
    enqueue(stream, [=] {
        std::string wrong = problem(written.begin, written.size, device);
        for (const Bytes& read : reads)
            if (wrong.empty()) wrong = problem(read.begin, read.size, device);
        if (wrong.empty())
            work();
        else
            report(device, kIllegalAddress, name + ": " + wrong);
    });
    return kSuccess;
}

Status fill(void* to, int value, size_t size, const StreamPointer& stream) {
    return compute(stream, "memset", {}, {to, size}, [=] { std::memset(to, value, size); });
}

Status add(double* to, const std::vector<const double*>& from, size_t size, const StreamPointer& stream) {
    count(device_of(*stream), kLaunches);
    std::vector<Bytes> reads;
    for (const double* one : from) reads.push_back({one, size * sizeof(double)});
    return compute(stream, "sum", reads, {to, size * sizeof(double)}, [=] {
        for (size_t i = 0; i < size; ++i) {
            double sum = from[0][i];
            for (size_t j = 1; j < from.size(); ++j) sum += from[j][i];
            to[i] = sum;
        }
    });
}

}  // namespace emulator
