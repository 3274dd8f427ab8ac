// What happens at the points of a core with SYNCBN_FAULT_POINTS: nothing, or once what a test has asked for.
#include <chrono>
#include <csignal>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "point.h"

namespace {

std::mutex mutex;
std::map<std::string, int> reached;  // how often, since `syncbn_points_arm`
std::string armed, action;
int hit = 0;
double duration = 0;

}  // namespace

void syncbn::reach_point(const char* name) {
    std::unique_lock<std::mutex> lock(mutex);
    if (++reached[name] != hit || armed != name) return;
    const std::string what = action;
    const std::chrono::duration<double> seconds(duration);
    lock.unlock();
    std::this_thread::sleep_for(seconds);
    if (what == "raise") throw std::runtime_error(std::string("a fault ") + name);
    // To this very thread, which otherwise goes on for a moment.
    if (what == "kill") raise(SIGKILL);
    if (what == "stop") raise(SIGSTOP);
}

// At the n-th time that this point is reached from now on.
extern "C" void syncbn_points_arm(const char* name, const char* what, int times, double seconds) {
    std::lock_guard<std::mutex> lock(mutex);
    reached.clear();
    armed = name;
    action = what;
    hit = times;
    duration = seconds;
}

// How often this one has been.
extern "C" int syncbn_points_reached(const char* name) {
    std::lock_guard<std::mutex> lock(mutex);
    return reached[name];
}
