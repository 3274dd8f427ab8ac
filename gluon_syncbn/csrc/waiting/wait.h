// The end of every wait: of replicas for each other, of processes for each other, for a turn, for NCCL, for a GPU, and for what
// a call repeats. Whoever waits looks once every `kSlice` or more often, and says what is waited for.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "waiting/stall.h"

namespace syncbn {

constexpr auto kSlice = std::chrono::milliseconds(50);
constexpr double kWarnAfter = 10;  // seconds, of every wait

class Wait {
  public:
    // Why it ends. `kLong` is no end: a warning.
    enum class Why { kAskedToEnd, kForked, kLate, kLong };

    // Seconds. `interrupts_before`: as they were when it began.
    explicit Wait(double timeout, double warn_after = kWarnAfter, long interrupts_before = interrupts());
    virtual ~Wait() = default;
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

    // Throws Failure where the wait should not go on: the step has failed, the process was asked to end, a fork waits, or
    // time is up. Warns once where it takes long.
    void look();

  protected:
    // What there is to say; empty: nothing.
    virtual std::string text(Why why) = 0;
    // Throws it.
    [[noreturn]] virtual void give_up(const std::string& text);
    virtual void warn(const std::string& text);
    // Throws the reason where somebody else has failed.
    virtual void throw_if_failed();
    // A look of its own, in a wait that is no short one.
    virtual void look_around() {}
    // A fork waits for this wait, and what is waited for does not come.
    virtual bool in_vain() { return stall_->idle_for(kForkIdle); }
    // What is waited for may keep a processor busy and compute nothing.
    virtual bool spins() const { return false; }

    const Stall& stall() const { return *stall_; }
    double waited() const { return stall_->waited(); }
    double limit() const { return limit_; }
    // From now on, so many seconds more.
    void extend(double seconds) { limit_ = waited() + seconds; }

    static constexpr double kForkIdle = 1;  // seconds without computing

  private:
    double limit_;
    const double warn_after_;
    const long interrupts_;
    double looked_;               // when; at first, when it began
    std::optional<Stall> stall_;  // once it is no short one
    double interrupted_ = -1;     // seconds after which it was
    bool warned_ = false;
};

// One for something that a clause names.
class WaitFor : public Wait {
  public:
    // For the layer of this name. `why`: "NCCL has not connected the GPUs"; `advice`, where that lasts.
    WaitFor(std::string layer, std::string why, double timeout, std::string advice);

  protected:
    std::string text(Why why) override;
    void warn(const std::string& text) override;

  private:
    const std::string layer_, why_, advice_;
};

}  // namespace syncbn
