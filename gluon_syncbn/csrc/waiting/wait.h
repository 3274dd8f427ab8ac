// Ends every wait: of replicas or processes for each other, for a turn, NCCL or a GPU, and for a repeated call. A
// waiting thread calls `look` at least once in every `kSlice`, and names the object of its wait.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "waiting/stall.h"

namespace syncbn {

constexpr auto kSlice = std::chrono::milliseconds(50);

class Wait {
  public:
    // The reason to end. `kLong` is only a warning.
    enum class Why { kAskedToEnd, kForked, kLate, kLong };

    // Seconds. `interrupts_before`: the number of interrupts at its beginning.
    explicit Wait(double timeout, long interrupts_before = interrupts());
    virtual ~Wait() = default;

    // Throws Failure if the wait must end: the step has failed, the process was asked to end, a fork waits, or time is
    // up. Warns once if it takes long.
    void look();

  protected:
    // The text of the message; empty: none.
    virtual std::string text(Why why) = 0;
    // Throws the text.
    [[noreturn]] virtual void give_up(const std::string& text);
    virtual void warn(const std::string& text);
    // Throws the reason if the step has failed elsewhere.
    virtual void throw_if_failed();
    // A further check, in a wait that is not short.
    virtual void check_others() {}
    // Whether this wait, for which a fork waits, can no longer succeed.
    virtual bool in_vain() { return stall_->idle_for(kForkIdle); }
    // Whether a spinning thread may keep a processor busy without computing.
    virtual bool spins() const { return false; }

    const Stall& stall() const { return *stall_; }
    double waited() const { return stall_->waited(); }
    double limit() const { return limit_; }
    // Allows so many seconds more from now on.
    void extend(double seconds) { limit_ = waited() + seconds; }

    static constexpr double kForkIdle = 1;  // seconds without computing

  private:
    double limit_;
    const long interrupts_;
    double checked_;              // the time of the last check, or of the beginning
    std::optional<Stall> stall_;  // empty in a short wait
    double interrupted_ = -1;     // seconds after which it was interrupted
    bool warned_ = false;
};

// A wait for an object that `why` names.
class WaitFor : public Wait {
  public:
    // For the layer of this name. `why`: "NCCL has not connected the GPUs"; `advice` is for a long wait.
    WaitFor(std::string layer, std::string why, double timeout, std::string advice,
            long interrupts_before = interrupts());

  protected:
    std::string text(Why why) override;
    void warn(const std::string& text) override;

  private:
    const std::string layer_, why_, advice_;
};

}  // namespace syncbn
