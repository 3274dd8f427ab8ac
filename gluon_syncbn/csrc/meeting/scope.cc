#include "meeting/scope.h"

#include <utility>

#include "waiting/step.h"

namespace syncbn {
namespace {

thread_local std::shared_ptr<Scope> of_thread;

}  // namespace

Scope::Scope(std::string thread, std::shared_ptr<const Failure> before, bool open)
    : thread(std::move(thread)), open(open), step(syncbn::step().number), before_(std::move(before)) {}

Scope::~Scope() { delete why_ended_.load(); }

void Scope::end(const Failure& failure) {
    auto reason = std::make_unique<const Failure>(failure);
    const Failure* none = nullptr;
    if (why_ended_.compare_exchange_strong(none, reason.get())) reason.release();
}

void Scope::throw_if_ended() {
    if (before_ != nullptr && syncbn::step().failure() == before_) end(*before_);
    if (const Failure* why = why_ended()) throw Failure(*why);
}

const std::shared_ptr<Scope>& current_scope() {
    static const auto& outside = *new auto(std::make_shared<Scope>("", nullptr, false));
    return of_thread != nullptr ? of_thread : outside;
}

void enter_scope(std::string thread) {
    of_thread = std::make_shared<Scope>(std::move(thread), syncbn::step().failure());
}

void leave_scope() {
    if (of_thread == nullptr) return;
    of_thread->open = false;
    of_thread = nullptr;
}

}  // namespace syncbn
