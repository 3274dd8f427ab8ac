// A training step: calls of layers by all of their replicas, and the backwards, as layer.py and op.py have them.
#pragma once

#include "exchange.h"
#include "mxnet.h"
#include "operator/call.h"
#include "random.h"

namespace driver {

using syncbn::Mode;

constexpr double kPatience = 100;       // seconds: more than any right step takes under a sanitizer
constexpr int kEager = -1, kNodes = 2;  // of each layer in a graph
constexpr uint64_t kSeed = 20;          // of the permutations

struct Spec {
    Mode mode = Mode::kSync;
    int virtual_devices = 1, group = 0;  // as in syncbn::Pooling
    int contexts = 2;
    Type type = Type::kFloat32;
    int channels = 3;
    bool channels_last = false, fix_gamma = false;
    double slope = 1;  // of the activation, below 0
    bool adds = false;
    Asked* const* exchange = nullptr;  // where the one of its own stands
};
Spec any_spec(Random& random, int contexts);
// One in which somebody waits for somebody.
Spec any_meeting_spec(Random& random, int contexts);

// Of one context.
struct Parameters {
    ArrayP gamma, beta, running_mean, running_var;
    Parameters(Type data, int channels);
};

class Layer {
  public:
    Layer(Random& random, const Spec& spec, const std::string& name);
    ~Layer() { drop(); }
    Layer(const Layer&) = delete;

    // An eager call has a property of its own, a node of a graph shares one with all contexts and steps.
    std::shared_ptr<Callbacks> property(int node) const;
    // As the parameters' contexts say.
    void place(int contexts, const char* misplaced = "") const;
    void set_timeout(double seconds) const;
    void set_exchange(Asked* const* exchange) const;
    // Python holds on to it no longer. What is in flight goes on.
    void drop() const;
    // Settings as they were, after a step that has failed. Those that were left alone stay alone: `syncbn_reset` has to do.
    void restore() const;

    const Spec spec;
    const std::string name;
    const int64_t id;
    std::vector<Parameters> parameters;  // [contexts]

  private:
    mutable std::atomic<bool> replaced_{false};
    std::map<int, std::shared_ptr<Callbacks>> graph_;
};

// How a callback ended. Belongs to the engine until that has nothing left to do.
struct Outcome {
    bool ended = false;
    std::string error;
};
struct Backward {
    ArrayP dy;
    std::vector<ArrayP> gradients;  // of x, gamma, beta and addend
    std::vector<int> reqs;          // as in csrc/operator/call.h
    Outcome outcome;
};

// How the script goes about a step.
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

// One replica's part in one call of a layer.
class Replica {
  public:
    Replica(Random& random, const Layer& layer, size_t context, int node, const Manner& manner, int height);

    // On the thread that issues the call. An error of the operator's creation is the forward's outcome.
    void issue_forward(Engine& engine);
    void issue_backward(Engine& engine, Backward& backward);
    // Executes the state of an earlier call again, on data of the same shape (`static_shape`).
    void repeat(Random& random, const Replica& earlier);
    // What is in flight alone holds on to the state, and may well delete it.
    void let_go();
    // Data of another type or with other channels than the layer's, and parameters of its own that go with it.
    void become(Random& random, Type type, int channels);

    const Layer& layer;
    std::string context;  // what MXNet says it is called on
    int node;
    bool training;
    int64_t samples, height, channels;
    Parameters parameters;
    ArrayP x, addend, y;
    int req;  // of y
    Outcome forward;
    std::deque<Backward> backwards;
    bool called = true, differentiated = true;  // whether the script gets as far

  private:
    // Random numbers, [samples, channels, height], or with the channels last [samples, height, channels].
    void fill(Random& random, Type type, size_t backwards);
    void push(Engine& engine, int callback, std::vector<ArrayP> arrays, std::vector<int> reqs, Outcome& outcome) const;

    std::shared_ptr<Callbacks> property_, state_;  // the recorded graph holds on to both
    std::vector<ArrayP> inputs_;                   // of the forward that was issued
    std::vector<int> needed_;                      // by the backward, of [gradient of the output][inputs][output]
};

// A kind of run, as it is under way.
struct Run {
    Engine engine;
    Random random;
    const double end;
    Run(uint64_t seed, double seconds) : random(seed), end(now() + seconds) {}
    bool goes_on() const { return now() < end; }
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
    // Of a step that succeeds, after the engine has nothing left to do: all that is written has values. That these are
    // right, random layers show (tests/soak).
    void check();

    // Of the first layer, in its first use.
    Call& call() { return calls_[0][0]; }
    Replica& any_replica() { return *call()[run_.random.whole(0, static_cast<int>(call().size()) - 1)]; }
    void each(const std::function<void(Replica&)>& work);

  private:
    void issue_forwards_of(size_t replica, uint64_t seed);

    Run& run_;
    const Manner manner_;
    std::vector<std::vector<Call>> calls_;  // [use][layer]
};

// What failed has left nothing plausible, and what succeeded has written all.
void check_values(const ArrayP& got, int req, bool failed);
// After all calls that were in flight.
void check_running_statistics(const Layer& layer);
// A step by itself, from which everything is right again.
void right_step(Run& run, Layer& layer);

}  // namespace driver
