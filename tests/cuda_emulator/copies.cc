#include "emulator.h"

#include <cstring>

namespace emulator {
namespace {

void move(const Copy& it, int device) {
    std::string wrong = problem(it.from, it.size, it.from_device);
    if (wrong.empty()) wrong = problem(it.to, it.size, it.to_device);
    if (wrong.empty())
        std::memmove(it.to, it.from, it.size);
    else
        report(device, kIllegalAddress, "a copy: " + wrong);
}

}  // namespace

Status copy(const Copy& what, const StreamPointer& stream) {
    const int device = device_of(*stream);
    if (const Status status = sticky(device)) return status;
    if (what.size == 0) return kSuccess;
    count(device, device_of(what.from) < 0 ? kToDevice : device_of(what.to) < 0 ? kToHost : kWithin);
    if (device_of(what.from) == kPageableHost && what.from != nullptr) {
        const char* const from = static_cast<const char*>(what.from);
        auto staged = std::make_shared<std::vector<char>>(from, from + what.size);
        Copy rest = what;
        rest.from = staged->data();
        enqueue(stream, [staged, rest, device] { move(rest, device); });
        return kSuccess;
    }
    const Completion done = enqueue(stream, [what, device] { move(what, device); });
    if (device_of(what.to) != kPageableHost) return kSuccess;
    done.wait();
    return sticky(device);
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

}  // namespace emulator
