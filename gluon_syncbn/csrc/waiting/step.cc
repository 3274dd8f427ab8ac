#include "waiting/step.h"

namespace syncbn {

Step& step() {
    static Step* instance = new Step;  // outlives the threads that wait at exit
    return *instance;
}

void Step::fail(const std::exception& error) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_ == nullptr) try {
            const auto* known = dynamic_cast<const Failure*>(&error);
            failure_ = std::make_shared<const Failure>(known != nullptr ? *known : Failure(reason_of(error)));
        } catch (const std::bad_alloc&) {
            failure_ = no_memory_;
        }
    failed_ = true;
}

std::shared_ptr<const Failure> Step::failure() const {
    if (!failed_) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
}

void Step::throw_if_failed() const {
    if (const auto reason = failure()) throw Failure(*reason);
}

void Step::clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_ = nullptr;
    failed_ = false;
}

}  // namespace syncbn
