// What was done, and what was wrong in it.
#pragma once

#include "standard.h"

namespace driver {

struct Figures {
    std::atomic<long> steps{0}, forwards{0}, backwards{0}, failures{0};  // failures: callbacks that ended in an error
    std::atomic<long> checked{0}, wrong{0};                              // arrays and other statements about results
    std::atomic<long> records{0};                                        // for the logger
    std::atomic<long> handles{0};                                        // alive
};
inline Figures figures;

// Counts a statement about a result, and says so where it does not hold.
inline void expect(bool holds, const std::string& what) {
    ++figures.checked;
    if (holds) return;
    ++figures.wrong;
    std::fprintf(stderr, "WRONG: %s\n", what.c_str());
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Seconds.
inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline void pause(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

}  // namespace driver
