#include "waiting/callers.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <utility>

#include "clock.h"

namespace syncbn {
namespace {

constexpr double kGap = 1;  // seconds; whoever waits asks more often

struct Question {
    std::mutex mutex;  // guards everything here
    std::condition_variable asked;
    bool open = false;
    Callers answer;
    double first = 0, last = 0;  // times of equal answers
};

Question& question() {
    static Question* instance = new Question;  // outlives the threads that wait at exit
    return *instance;
}

}  // namespace

void ask_for_callers() {
    Question& q = question();
    std::lock_guard<std::mutex> lock(q.mutex);
    q.open = true;
    q.asked.notify_one();
}

bool asked_for_callers(double seconds) {
    Question& q = question();
    std::unique_lock<std::mutex> lock(q.mutex);
    q.asked.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return q.open; });
    return std::exchange(q.open, false);
}

void answer_callers(std::string wait, bool for_all) {
    Question& q = question();
    const double now = seconds();
    std::lock_guard<std::mutex> lock(q.mutex);
    if (q.answer.wait != wait || now - q.last > kGap) q.first = now;
    q.last = now;
    q.answer = {std::move(wait), for_all, 0};
}

Callers callers(double since) {
    Question& q = question();
    std::lock_guard<std::mutex> lock(q.mutex);
    if (q.last < since || seconds() - q.last > kGap) return {};
    Callers answer = q.answer;
    answer.lasts = q.last - std::max(q.first, since);
    return answer;
}

void forget_callers() { new (&question()) Question; }  // a thread that the child does not have may have held its lock

}  // namespace syncbn
