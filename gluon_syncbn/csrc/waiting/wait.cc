#include "waiting/wait.h"

#include <csignal>

#include <algorithm>
#include <deque>
#include <mutex>
#include <sstream>

#include "failure.h"
#include "lock.h"
#include "log.h"
#include "waiting/step.h"

namespace syncbn {
namespace {

// Seconds.
constexpr double kWarnAfter = 10;
constexpr double kEndsWithin = 5;     // of an interrupt
constexpr double kCheckAfter = 0.04;  // less than `kSlice`, so that each slice has one check
constexpr double kStopped = 1;        // between two checks; more means that the process itself was stopped

// The previous handlers of SIGINT.
std::atomic<const struct sigaction*> previous{nullptr}, original{nullptr};
// The handler may run in a thread that has never been here. The usual model would allocate the thread's part then, which
// a handler must not do.
__attribute__((tls_model("initial-exec"))) thread_local int depth = 0;

void on_interrupt(int signal, siginfo_t* info, void* context) {
    ++interrupts;
    // A handler that was installed over ours may call us back. Then `original` comes next, unless both are the same.
    const struct sigaction* next = depth == 0 ? previous.load() : original.load();
    if (depth > 1 || (depth == 1 && next == previous.load())) return;
    ++depth;
    if (next->sa_flags & SA_SIGINFO)
        next->sa_sigaction(signal, info, context);
    else
        next->sa_handler(signal);
    --depth;
}

// The handler may run while a waiter chains another one. So each entry is written once and never changes. A program has
// few handlers, and may install them again and again. One waiter calls at a time.
const struct sigaction* keep(const struct sigaction& handler) {
    static auto& kept = *new std::deque<struct sigaction>;
    for (const auto& known : kept)
        if (known.sa_flags == handler.sa_flags && known.sa_sigaction == handler.sa_sigaction) return &known;
    kept.push_back(handler);
    return &kept.back();
}

// Repeated calls are cheap: a handler that was installed over ours is chained anew.
void watch_interrupts() {
    static Mutex mutex;
    const std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
    if (!lock) return;  // another waiter is at it, or was in the parent of this fork
    struct sigaction current;
    if (sigaction(SIGINT, nullptr, &current) != 0) return;
    if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_interrupt) return;
    // The default ends the process at once, and an ignored signal stays ignored. Neither needs a chain.
    if (!(current.sa_flags & SA_SIGINFO) && (current.sa_handler == SIG_DFL || current.sa_handler == SIG_IGN)) return;
    const auto* chained = keep(current);
    if (original.load() == nullptr) original.store(chained);
    previous.store(chained);
    struct sigaction ours = current;
    ours.sa_flags |= SA_SIGINFO;
    ours.sa_sigaction = on_interrupt;
    sigaction(SIGINT, &ours, nullptr);
}

}  // namespace

void Wait::look() {
    throw_if_failed();
    const double now = seconds(), passed = now - checked_;
    if (passed < kCheckAfter) return;
    checked_ = now;
    waited_ += std::min(passed, kStopped);
    watch_interrupts();
    // A step may finish first, if it does so soon, so that a handler can save its work.
    if (!is_asked_to_end())
        uninterrupted_ = waited_;
    else if (waited_ - uninterrupted_ >= kEndsWithin + grace_)
        end_as_asked();
    check_others();
    const bool late = waited_ >= limit_;
    // Without a limit, the process waits for itself: for gradients that its backward has not written yet.
    if (!late && (waited_ < kWarnAfter || warned_ || limit_ == kForEver)) return;
    warned_ = true;
    std::ostringstream text;
    text << state() << " after ";
    if (!late) text << static_cast<int>(waited_) << " s; still waiting, until ";
    text << limit_ << " s. " << advice();
    late ? give_up(text.str()) : warn(text.str());
}

void Wait::end_as_asked() {
    give_up(state() + ", and the process was asked to end (Ctrl-C, or its main thread has ended).");
}

void Wait::give_up(const std::string& text) { throw Failure(text); }

void Wait::warn(const std::string& text) { log(Level::kWarning, Failure(layer_, "", "", text).what()); }

void Wait::throw_if_failed() { step().throw_if_failed(); }

}  // namespace syncbn
