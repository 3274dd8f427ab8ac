// A layer with its parameters, as layer.py and op.py have it.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "custom.h"
#include "operator/call.h"
#include "random.h"

namespace driver {

using syncbn::Mode;

constexpr double kPatience = 100;  // seconds: more than any right step takes under a sanitizer

struct Spec {
    Mode mode = Mode::kSync;
    int virtual_devices = 1, group = 0;  // as in syncbn::Pooling
    int contexts = 2;
    Type type = Type::kFloat32;
    int channels = 3;
    bool channels_last = false, fix_gamma = false;
    double slope = 1;  // of the activation, below 0
    bool adds = false;
    syncbn::Asked* const* exchange = nullptr;  // where the one of its own stands

    bool activates() const { return slope != 1; }
    Type parameter_type() const { return type == Type::kFloat64 ? Type::kFloat64 : Type::kFloat32; }
};

Spec any_spec(Random& random, int contexts);
// One in which somebody waits for somebody.
Spec any_meeting_spec(Random& random, int contexts);

struct Parameters {
    ArrayP gamma, beta, running_mean, running_var;
};

// On one context.
struct Placed {
    std::string context;  // "cpu(1)"
    Parameters parameters;
};

class Layer {
  public:
    Layer(Random& random, const Spec& spec, const std::string& name);
    ~Layer() { drop(); }
    Layer(const Layer&) = delete;
    Layer& operator=(const Layer&) = delete;

    // An eager call (node -1) has a property of its own, a node of a graph shares one with all contexts and steps.
    std::shared_ptr<Property> property(int node) const;
    // As the parameters' contexts say.
    void place(int contexts, const char* misplaced = "") const;
    void set_timeout(double seconds) const;
    void set_exchange(syncbn::Asked* const* exchange) const;
    // Python holds on to it no longer. What is in flight goes on.
    void drop() const;
    // Settings as they were, after a step that has failed. Those that were left alone stay alone: `syncbn_reset` has to do.
    void restore();

    const Spec spec;
    const std::string name;
    const int64_t id;
    std::vector<Placed> placed;  // [contexts]

  private:
    const std::string token_;
    mutable std::atomic<bool> replaced_{false};
    std::map<int, std::shared_ptr<Property>> graph_;
};

constexpr int kEager = -1, kNodes = 2;  // of each layer in a graph
constexpr uint64_t kSeed = 20;          // of the permutations

}  // namespace driver
