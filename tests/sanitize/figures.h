// What was done, and what was wrong in it.
#pragma once

#include <atomic>
#include <string>

namespace driver {

struct Figures {
    std::atomic<long> steps{0}, forwards{0}, backwards{0}, failures{0};  // failures: callbacks that ended in an error
    std::atomic<long> checked{0}, wrong{0};                              // arrays and other statements about results
    std::atomic<long> records{0}, warnings{0};                           // for the logger
    std::atomic<long> handles{0}, properties{0}, states{0};              // alive
};
extern Figures figures;

// Counts a statement about a result, and says so where it does not hold.
void expect(bool holds, const std::string& what);
bool contains(const std::string& text, const std::string& part);

double now();  // seconds
void pause(double seconds);

}  // namespace driver
