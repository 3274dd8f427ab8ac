#include "figures.h"

#include <chrono>
#include <cstdio>
#include <thread>

namespace driver {

Figures figures;

void expect(bool holds, const std::string& what) {
    ++figures.checked;
    if (holds) return;
    ++figures.wrong;
    std::fprintf(stderr, "WRONG: %s\n", what.c_str());
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void pause(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

}  // namespace driver
