#include "waiting/wait.h"

#include <dirent.h>

#include <csignal>
#include <ctime>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <utility>

#include "failure.h"
#include "lock.h"
#include "log.h"
#include "waiting/callers.h"
#include "waiting/step.h"

namespace syncbn {
namespace {

constexpr double kWarnAfter = 10;      // seconds
constexpr double kCheckAfter = 0.04;   // seconds: less than `kSlice`, so that each slice has one check
constexpr double kAskAfter = 0.2;      // seconds: replicas that are about to come seldom take longer
constexpr double kWindow = 4.0;        // seconds of samples to keep
constexpr double kStopped = 1.0;       // between two samples; more means that the process itself was stopped
constexpr double kIdleShare = 0.25;    // of one core: Horovod's thread, which polls every 1 ms, takes 0.12 to 0.19
constexpr double kEndAfterIdle = 1.5;  // seconds
constexpr double kMeasured = 0.5;      // seconds

std::atomic<long> interrupted{0};
// The previous handlers of SIGINT.
std::atomic<const struct sigaction*> previous{nullptr}, original{nullptr};
// The handler may run in a thread that has never been here. The usual model would allocate the thread's part then, which
// a handler must not do.
__attribute__((tls_model("initial-exec"))) thread_local int depth = 0;

double processor_time() {
    timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// The seconds in which threads of this process were ready and did not run; 0 if the kernel does not count them.
double measured_run_delay() {
    double total = 0;
    const std::unique_ptr<DIR, int (*)(DIR*)> tasks(opendir("/proc/self/task"), closedir);
    if (tasks == nullptr) return 0;
    while (const dirent* task = readdir(tasks.get())) {
        std::ifstream account("/proc/self/task/" + std::string(task->d_name) + "/schedstat");
        double ran = 0, delayed = 0;
        if (account >> ran >> delayed) total += 1e-9 * delayed;
    }
    return total;
}

// The same, measured at most once in `kMeasured`, whoever asks: it reads a file for each thread. Without a lock, which the
// child of a fork could inherit locked.
double run_delay(double time) {
    static std::atomic<double> measured{0}, delay{0};
    double last = measured;
    if (time - last >= kMeasured && measured.compare_exchange_strong(last, time)) delay = measured_run_delay();
    return delay;
}

void on_interrupt(int signal, siginfo_t* info, void* context) {
    interrupted.fetch_add(1);
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

long interrupts() { return interrupted.load(); }

Wait::Wait(double timeout, std::string layer, std::string state, std::string advice, long interrupts_before)
    : layer_(std::move(layer)),
      state_(std::move(state)),
      advice_(std::move(advice)),
      limit_(timeout),
      interrupts_(interrupts_before),
      checked_(seconds()) {}

void Wait::sample(double time) {
    const double processor = processor_time(), ran = processor - processor_time_;
    processor_time_ = processor;
    if (!samples_.empty()) {
        const double passed = time - samples_.back().first;
        waited_ += std::min(passed, kStopped);  // every wait ends, even on a slow machine
        if (passed >= kStopped) samples_.clear();
        busy_ += ran;
        if (ran < kIdleShare * passed) {  // it takes time, so only if it matters
            const double delay = run_delay(time);
            if (delay_ >= 0) busy_ += std::max(0.0, delay - delay_);  // ended threads no longer count
            delay_ = delay;
        }
    }
    samples_.emplace_back(time, busy_);
    while (samples_.size() > 2 && samples_[1].first < samples_.back().first - kWindow) samples_.pop_front();
}

bool Wait::idle_for(double seconds) const {
    const auto& last = samples_.back();
    for (auto it = samples_.rbegin(); it != samples_.rend(); ++it) {
        const double span = last.first - it->first;
        if (span >= seconds) return last.second - it->second < kIdleShare * span;
    }
    return false;
}

void Wait::look() {
    throw_if_failed();
    const double now = seconds();
    if (now - checked_ < kCheckAfter) return;
    checked_ = now;
    watch_interrupts();
    sample(now);
    if (waited_ >= kAskAfter) ask_for_callers();
    const bool interrupted = interrupts() != interrupts_;
    if (interrupted && interrupted_ < 0) interrupted_ = waited_;
    const bool ends = interrupted && waited_ - interrupted_ >= after_interrupt;
    // A step that still computes may finish first, if it does so soon, so that a handler can save its work.
    if (ends || ((interrupted || step().nobody_left) && idle_for(kEndAfterIdle)))
        give_up(state() + ", and the process was asked to end (Ctrl-C, or its main thread has ended).", true);
    if (step().forking && in_vain())
        give_up(state() + ", and the process was forked (os.fork, multiprocessing, subprocess with preexec_fn). " +
                    "Fork before a step or after it, not between the calls of its replicas.",
                true);
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

void Wait::give_up(const std::string& text, bool) { throw Failure(text); }

void Wait::warn(const std::string& text) { log(Level::kWarning, Failure(layer_, "", "", text).what()); }

void Wait::throw_if_failed() { step().throw_if_failed(); }

}  // namespace syncbn
