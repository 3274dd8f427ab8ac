#include "emulator.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace emulator {
namespace {

// Never destroyed: threads of streams may still run while the process ends.
struct Errors {
    std::mutex mutex;
    std::vector<std::string> texts;
    size_t read = 0;
    std::map<int, Status> sticky;
};
Errors& errors = *new Errors;

// A process that nobody told of its errors does not end as if all were well.
struct AtExit {
    AtExit() {
        std::atexit([] {
            std::unique_lock<std::mutex> lock(errors.mutex);
            if (errors.read >= errors.texts.size()) return;
            std::fprintf(stderr, "cuda emulator: the process ends with %zu errors that nobody read\n",
                         errors.texts.size() - errors.read);
            std::fflush(nullptr);
            _exit(86);
        });
    }
} at_exit;

}  // namespace

const char* status_text(Status status) {
    if (status == kIllegalAddress) return "an illegal memory access was encountered";
    return status == kOutOfMemory ? "out of memory" : "an error that the emulator has no text for";
}

Status report(int device, Status status, const std::string& text) {
    std::lock_guard<std::mutex> lock(errors.mutex);
    std::fprintf(stderr, "cuda emulator: %s\n", text.c_str());
    errors.texts.push_back(text);
    if (device >= 0) errors.sticky.emplace(device, status);
    return status;
}

Status sticky(int device) {
    std::lock_guard<std::mutex> lock(errors.mutex);
    const auto found = errors.sticky.find(device);
    return found == errors.sticky.end() ? kSuccess : found->second;
}

std::string format(const char* pattern, ...) {
    char text[1024];
    va_list values;
    va_start(values, pattern);
    std::vsnprintf(text, sizeof text, pattern, values);
    va_end(values);
    return text;
}

}  // namespace emulator

// The number of errors since the last reset; their text, one per line, into `text`. They count as read.
extern "C" int cuda_emulator_errors(char* text, size_t size) {
    using emulator::errors;
    std::lock_guard<std::mutex> lock(errors.mutex);
    std::string joined;
    for (const std::string& one : errors.texts) joined += one + "\n";
    std::snprintf(text, size, "%s", joined.c_str());
    errors.read = errors.texts.size();
    return static_cast<int>(errors.texts.size());
}

extern "C" void cuda_emulator_reset() {
    using emulator::errors;
    std::lock_guard<std::mutex> lock(errors.mutex);
    errors.texts.clear();
    errors.sticky.clear();
    errors.read = 0;
}
