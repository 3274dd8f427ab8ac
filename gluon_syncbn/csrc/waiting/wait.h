// Ends every wait: of replicas or processes for each other, for a turn, NCCL or a GPU, and for a repeated call. A
// waiting thread calls `look` at least once in every `kSlice`, and names the object of its wait. To tell a slow step
// from a stuck one, a wait measures the computing time of the process, including time without a processor.
#pragma once

#include <chrono>
#include <cmath>
#include <deque>
#include <limits>
#include <string>
#include <utility>

namespace syncbn {

// Seconds on a monotonic clock.
inline double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

constexpr double kForEver = std::numeric_limits<double>::infinity();
constexpr auto kSlice = std::chrono::milliseconds(50);

// The number of SIGINT so far. A wait counts them before the installed handler, which is called as before. Otherwise
// Ctrl-C would wait for the main thread's call into MXNet, and the call for the step.
long interrupts();

class Wait {
  public:
    // `timeout`: seconds. `layer`: its name, for warnings. `state` and `advice`: see below. `interrupts_before`: the
    // number of interrupts at its beginning.
    explicit Wait(double timeout, std::string layer = "", std::string state = "", std::string advice = "",
                  long interrupts_before = interrupts());
    virtual ~Wait() = default;

    // Throws Failure if the wait must end: the step has failed, the process was asked to end, a fork waits, or time is
    // up. Warns once if it takes long.
    void look();

    double after_interrupt = 10;  // seconds, where threads that poll, as Horovod's, cannot be told from computing

  protected:
    // What has not happened: "rank 0 of 2 waits for rank 1".
    virtual std::string state() { return state_; }
    // What is likely if it takes long, and what to do about it.
    virtual std::string advice() { return advice_; }
    // Throws the text. `from_outside`: the process was asked to end, or was forked.
    [[noreturn]] virtual void give_up(const std::string& text, bool from_outside = false);
    virtual void warn(const std::string& text);
    // Throws the reason if the step has failed elsewhere.
    virtual void throw_if_failed();
    // A further check, in a wait that is not short.
    virtual void check_others() {}
    // Whether this wait, for which a fork waits, can no longer succeed.
    virtual bool in_vain() { return idle_for(kForkIdle); }

    // Whether the whole process has computed next to nothing for the last `seconds` although it had a processor. Beside
    // other programs, or throttled, a job may get a hundredth of one.
    bool idle_for(double seconds) const;
    // Seconds since the first look that was not short. Of a time in which this process was stopped (Ctrl-Z), one counts.
    double waited() const { return waited_; }
    // Allows so many seconds more from now on.
    void extend(double seconds) { limit_ = std::floor(waited_ + seconds); }

  private:
    static constexpr double kForkIdle = 1;  // seconds without computing

    void sample(double time);

    const std::string layer_, state_, advice_;
    double limit_;
    const long interrupts_;
    double checked_;           // the time of the last check, or of the beginning
    double interrupted_ = -1;  // seconds after which it was interrupted
    bool warned_ = false;
    double waited_ = 0, busy_ = 0, processor_time_ = 0;
    double delay_ = -1;  // of all threads together, waiting for a processor; -1 before the first measurement
    std::deque<std::pair<double, double>> samples_;  // (time, seconds in which a thread ran or was ready)
};

}  // namespace syncbn
