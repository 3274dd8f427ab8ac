#include "waiting/wait.h"

#include <sstream>
#include <utility>

#include "clock.h"
#include "failure.h"
#include "log.h"
#include "waiting/callers.h"
#include "waiting/step.h"

namespace syncbn {
namespace {

constexpr double kWarnAfter = 10;         // seconds
constexpr double kCheckAfter = 0.04;      // seconds: less than `kSlice`, so that each slice has one check
constexpr double kAskAfter = 0.2;         // seconds: replicas that are about to come seldom take longer
constexpr double kEndAfterInterrupt = 5;  // seconds, if spinning cannot be told from computing

}  // namespace

Wait::Wait(double timeout, long interrupts_before)
    : limit_(timeout), interrupts_(interrupts_before), checked_(seconds()) {}

void Wait::look() {
    throw_if_failed();
    const double now = seconds();
    if (now - checked_ < kCheckAfter) return;
    checked_ = now;
    if (!stall_) stall_.emplace(interrupts_);
    watch_interrupts();
    stall_->sample();
    if (waited() >= kAskAfter) ask_for_callers();
    if (interrupted_ < 0 && stall_->interrupted()) interrupted_ = waited();
    const bool ends = spins() && interrupted_ >= 0 && waited() - interrupted_ >= kEndAfterInterrupt;
    if (ends || stall_->asked_to_end()) give_up(text(Why::kAskedToEnd));
    if (step().forking && in_vain()) give_up(text(Why::kForked));
    check_others();
    if (waited() >= limit_) give_up(text(Why::kLate));
    if (waited() < kWarnAfter || warned_) return;
    warned_ = true;
    const std::string warning = text(Why::kLong);
    if (!warning.empty()) warn(warning);
}

void Wait::give_up(const std::string& text) { throw Failure(text); }

void Wait::warn(const std::string& text) { log(Level::kWarning, text); }

void Wait::throw_if_failed() { step().throw_if_failed(); }

WaitFor::WaitFor(std::string layer, std::string why, double timeout, std::string advice, long interrupts_before)
    : Wait(timeout, interrupts_before), layer_(std::move(layer)), why_(std::move(why)), advice_(std::move(advice)) {}

std::string WaitFor::text(Why why) {
    std::ostringstream text;
    if (why == Why::kAskedToEnd)
        text << "the process was asked to end (Ctrl-C, or its main thread has ended), and " << why_ << ".";
    else if (why == Why::kForked)
        text << "the process was forked (os.fork, multiprocessing, subprocess with preexec_fn), and " << why_
             << ". Fork before a step or after it.";
    else if (why == Why::kLate)
        text << why_ << " for " << limit() << " s. " << advice_;
    else
        text << why_ << " for " << static_cast<int>(waited()) << " s; still waiting, until " << limit() << " s. "
             << advice_;
    return text.str();
}

void WaitFor::warn(const std::string& text) { log(Level::kWarning, Failure(layer_, "", "", text).what()); }

}  // namespace syncbn
