// Ends every wait: of replicas or processes for each other, for a turn, NCCL or a GPU, and for a repeated call. A
// waiting thread calls `look` at least once in every `kSlice`, and names the object of its wait.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
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
constexpr double kSleep = std::chrono::duration<double>(kSlice).count();  // in seconds

// The number of SIGINT so far. A wait counts them before the installed handler, which is called as before. Otherwise
// Ctrl-C would wait for the main thread's call into MXNet, and the call for the step.
inline std::atomic<long> interrupts{0};

class Wait {
  public:
    // `timeout`: seconds. `layer`: its name, for warnings. `state` and `advice`: see below.
    explicit Wait(double timeout, std::string layer = "", std::string state = "", std::string advice = "")
        : layer_(std::move(layer)), state_(std::move(state)), advice_(std::move(advice)), limit_(timeout) {}
    virtual ~Wait() = default;

    // Throws Failure if the wait must end: the step has failed, the process was asked to end, or time is up. Warns once if
    // it takes long.
    void look();

  protected:
    // What has not happened: "rank 0 of 2 waits for rank 1".
    virtual std::string state() { return state_; }
    // What is likely if it takes long, and what to do about it.
    virtual std::string advice() { return advice_; }
    // Throws the text.
    [[noreturn]] virtual void give_up(const std::string& text);
    virtual void warn(const std::string& text);
    // Throws the reason if the step has failed elsewhere.
    virtual void throw_if_failed();
    // A further check, in a wait that is not short.
    virtual void check_others() {}
    // Whether a step that does not finish soon shall end.
    virtual bool is_asked_to_end() { return interrupts != interrupts_; }
    void end_as_asked();  // gives up

    // Seconds. Of a time in which this process was stopped (Ctrl-Z), one counts.
    double waited() const { return waited_; }
    // Allows so many seconds more.
    void allow(double seconds) { limit_ += seconds; }
    // Allows so many seconds from now on, and so many more than other waits after an interrupt.
    void extend(double seconds, double grace) {
        limit_ = std::floor(waited_ + seconds + grace);
        grace_ = grace;
    }

  private:
    const std::string layer_, state_, advice_;
    double limit_;
    const long interrupts_ = interrupts;
    double checked_ = seconds();  // the time of the last check, or of the beginning
    double waited_ = 0;           // seconds
    double uninterrupted_ = 0;    // of these, those before the process was asked to end
    double grace_ = 0;
    bool warned_ = false;
};

}  // namespace syncbn
