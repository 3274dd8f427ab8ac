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
Question& question = *new Question;  // outlives the threads that wait at exit

}  // namespace

void ask_for_callers() {
    std::lock_guard<std::mutex> lock(question.mutex);
    question.open = true;
    question.asked.notify_one();
}

bool asked_for_callers(double seconds) {
    std::unique_lock<std::mutex> lock(question.mutex);
    question.asked.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return question.open; });
    return std::exchange(question.open, false);
}

void answer_callers(std::string wait, bool for_all) {
    const double now = seconds();
    std::lock_guard<std::mutex> lock(question.mutex);
    if (question.answer.wait != wait || now - question.last > kGap) question.first = now;
    question.last = now;
    question.answer = {std::move(wait), for_all, 0};
}

Callers callers(double since) {
    std::lock_guard<std::mutex> lock(question.mutex);
    if (question.last < since || seconds() - question.last > kGap) return {};
    Callers answer = question.answer;
    answer.lasts = question.last - std::max(question.first, since);
    return answer;
}

void forget_callers() { new (&question) Question; }  // a thread that the child does not have may have held its lock

}  // namespace syncbn
