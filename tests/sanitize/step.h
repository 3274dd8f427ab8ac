// A training step: calls of layers by all of their replicas, and the backwards. How calls come from MXNet is left out:
// they begin and end as native/calls.cc has it.
#pragma once

#include "engine.h"
#include "operator/call.h"

namespace driver {

using syncbn::Mode;

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

    syncbn::NodePtr node(int number) const;
    // As the parameters' contexts say.
    void place(int contexts) const;
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

    // On the thread that issues the call. If that fails, it is the forward's outcome.
    void issue_forward(Engine& engine);
    void issue_backward(Engine& engine, Backward& backward);
    // Executes the call of an earlier one again, on data of the same shape (`static_shape`).
    void repeat(Random& random, const Replica& earlier);
    // What is in flight alone holds on to the call, and may well delete it.
    void let_go() { call_.reset(); }
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
    using Given = std::map<syncbn::Role, std::pair<ArrayP, int>>;  // an array, and how it is written

    // Random numbers, [samples, channels, height], or with the channels last [samples, height, channels].
    void fill(Random& random, Type type, size_t backwards);
    void push(Engine& engine, bool backward, Given given, Outcome& outcome) const;

    std::shared_ptr<syncbn::Call> call_;  // the recorded graph holds on to it
};

// A kind of run, as it is under way.
struct Run {
    Engine engine;
    Random random;
    const double end;
    Run(uint64_t seed, double seconds) : random(seed), end(syncbn::seconds() + seconds) {}
    bool goes_on() const { return syncbn::seconds() < end; }
};

class Step {
  public:
    using Call = std::vector<std::unique_ptr<Replica>>;  // in the order in which they are issued

    Step(Run& run, const std::vector<Layer*>& layers, const Manner& manner);

    // Executes the calls of an earlier step again.
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

// ---- the kinds of run: each goes on for its seconds, or for one round where that takes longer --------------------

// One or two layers beside each other, several steps in flight, every result checked. Calls may be executed again and
// again, settings may change in other threads, and Python may let the layers go.
void healthy(Run& run);
// A step in which something is wrong, or an allocation of the core fails, and a right one after it.
void failing(Run& run);
// Settings that change in other threads and pull the rug from under a step: it ends somehow, and one after it is right.
void disturbed(Run& run);
// Handlers of SIGINT that are installed anew while replicas wait, and signals that come.
void waiting(Run& run);
// A call that is repeated, and that does not come, until time is up or the step fails.
void recalling(Run& run);
// Long sums between ranks, which are threads here: rounds and arrays come in an order of each rank's own.
void summing(Run& run);
// The end of the process. Nothing can run after it.
void closing(Run& run);

}  // namespace driver
