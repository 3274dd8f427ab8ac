// One replica's part in one call of a layer.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "layer.h"

namespace driver {

constexpr double kBefore = 0.5;  // what is in an array before the core writes to it, or adds, or leaves it alone

struct Backward {
    ArrayP dy, dx, dgamma, dbeta, daddend;
    std::vector<int> reqs;  // of x, gamma, beta and addend
    Outcome outcome;
};

class Replica {
  public:
    // [samples, channels, height], or with the channels last [samples, height, channels]; filled with random numbers.
    Replica(Random& random, Layer& layer, size_t context, int node, bool training, int height, int backwards);

    // On the thread that issues the call. An error of the operator's creation is the forward's outcome.
    void issue_forward(Engine& engine);
    void issue_backward(Engine& engine, Backward& backward);
    // Executes the states of an earlier call again, on data of the same shape (`static_shape`).
    void repeat(Random& random, const Replica& earlier);
    // What is in flight alone holds on to the states, and may well delete them.
    void let_go();
    // Data of another type or with other channels than the layer's, and parameters of its own that go with it.
    void become(Random& random, Type type, int channels);

    Layer& layer;
    size_t context;            // index into layer.placed
    std::string context_name;  // what MXNet says it is called on
    int node;
    bool training;
    int64_t samples, height;
    int64_t channels;
    ArrayP x, addend, y;
    Parameters parameters;
    int req = 1;  // of y
    Outcome forward;
    std::deque<Backward> backwards;
    bool called = true, differentiated = true;  // whether the script gets as far

  private:
    void fill(Random& random, Type type, int backwards);

    std::shared_ptr<Property> property_;  // the recorded graph holds on to it
    std::shared_ptr<State> state_;
    Execution execution_;
};

}  // namespace driver
