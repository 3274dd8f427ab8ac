// A training step: calls of layers by all of their replicas, and the backwards.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine.h"
#include "random.h"
#include "replica.h"

namespace driver {

// A kind of run, as it is under way.
struct Run {
    Engine engine;
    Random random;
    const double end;

    Run(uint64_t seed, double seconds);
    double left() const;
    bool goes_on() const { return left() > 0; }
};

// How the script goes about it.
struct Manner {
    bool threads = false;  // each replica is called by a thread of its own
    bool graph = false;    // of two nodes for each layer; otherwise eager
    bool training = true;
    int uses = 1;  // of each layer; in a graph those are its nodes
    int backwards = 1;
    bool large = false;  // on one replica, so that a kernel takes several threads

    Manner(Random& random, bool threads);
    Manner() = default;
};

class Step {
  public:
    using Call = std::vector<std::unique_ptr<Replica>>;  // in the order in which they are issued

    Step(Run& run, const std::vector<Layer*>& layers, const Manner& manner);

    // Executes the states of an earlier step again.
    void repeat(const Step& earlier);
    // Returns as soon as all is issued; the step has to stay until the engine has nothing left to do.
    void issue();
    void issue_forwards();
    void issue_backwards();
    // After the engine has nothing left to do.
    void check();

    // Of the first layer, in its first use.
    Call& call() { return calls_[0][0]; }
    Replica& any_replica() { return *call()[run_.random.whole(0, static_cast<int>(call().size()) - 1)]; }
    void each(const std::function<void(Replica&)>& work);

  private:
    void issue_forwards_of(size_t replica, uint64_t seed);

    Run& run_;
    const Manner manner_;
    std::vector<Layer*> layers_;
    std::vector<std::vector<Call>> calls_;  // [use][layer]
};

// A step by itself, from which everything is right again.
void right_step(Run& run, Layer& layer);

}  // namespace driver
