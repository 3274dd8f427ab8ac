#include "waiting/wait.h"

#include <sstream>
#include <utility>

#include "failure.h"
#include "log.h"
#include "waiting/step.h"

namespace syncbn {
namespace {

constexpr double kEndAfterInterrupt = 5;  // seconds, where nobody can tell what spins from what computes
constexpr double kForkIdle = 1;           // seconds without computing

}  // namespace

Wait::Wait(std::string layer, std::string why, double timeout, std::string advice, bool spins)
    : layer_(std::move(layer)), why_(std::move(why)), advice_(std::move(advice)), timeout_(timeout), spins_(spins) {}

void Wait::look() {
    step().throw_if_failed();
    watch_interrupts();
    stall_.sample();
    const double waited = stall_.waited();
    if (interrupted_ < 0 && stall_.interrupted()) interrupted_ = waited;
    const bool ends = spins_ && interrupted_ >= 0 && waited - interrupted_ >= kEndAfterInterrupt;
    std::ostringstream text;
    if (ends || stall_.asked_to_end()) {
        text << "the process was asked to end (Ctrl-C, or its main thread is gone), and " << why_ << ".";
    } else if (step().forking && stall_.idle_for(kForkIdle)) {
        text << "the process was forked (os.fork, multiprocessing, subprocess with preexec_fn), and " << why_
             << ". Fork before a step or after it.";
    } else if (waited >= timeout_) {
        text << why_ << " for " << timeout_ << " s. " << advice_;
    } else {
        if (waited < kWarnAfter || warned_) return;
        warned_ = true;
        text << why_ << " for " << static_cast<int>(waited) << " s; still waiting, until " << timeout_ << " s. "
             << advice_;
        return log(Level::kWarning, Failure(layer_, "", "", text.str()).what());
    }
    throw Failure(text.str());
}

}  // namespace syncbn
