// A wait for something else than the replicas of a meeting: it ends as theirs do. Whoever waits looks once every `kSlice`.
#pragma once

#include <chrono>
#include <string>

#include "waiting/stall.h"

namespace syncbn {

constexpr auto kSlice = std::chrono::milliseconds(50);
constexpr double kWarnAfter = 10;  // seconds, of every wait

class Wait {
  public:
    // For the layer of this name. `why`, a clause: "NCCL has not connected the GPUs"; `advice`, where that lasts. `spins`:
    // what is waited for may keep a processor busy and compute nothing.
    Wait(std::string layer, std::string why, double timeout, std::string advice, bool spins = false);
    // Throws Failure where the wait should not go on: the step has failed, the process was asked to end, a fork waits, or
    // time is up. Warns once where it takes long.
    void look();

  private:
    const std::string layer_, why_, advice_;
    const double timeout_;
    const bool spins_;
    Stall stall_;
    double interrupted_ = -1;  // seconds after which it was
    bool warned_ = false;
};

}  // namespace syncbn
