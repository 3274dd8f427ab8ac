// The operator `gluon_syncbn` as MXNet's `Custom` uses it (src/operator/custom/custom.cc).
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "array.h"
#include "engine.h"
#include "mxnet_api.h"

namespace driver {

struct Tensor {
    Type type;
    std::vector<int> shape;

    int64_t size() const;
};

// The operator as it stands in a graph, or in one eager call.
class Property {
  public:
    explicit Property(const std::map<std::string, std::string>& attributes);
    ~Property();
    Property(const Property&) = delete;
    Property& operator=(const Property&) = delete;

    // Those of [inputs][outputs][auxiliary states] from that of the data.
    std::vector<Tensor> infer(const Tensor& data) const;

    size_t inputs = 0, outputs = 0, auxiliary = 0;
    std::vector<int> needed;  // by the backward: places in [gradients of the outputs][inputs][outputs]
    const MXCallbackList& callbacks() const { return callbacks_; }

  private:
    Property();
    size_t count(int which) const;

    MXCallbackList callbacks_{};
};

// What MXNet creates when a call is issued; with `static_shape` it is executed again at every step.
class State {
  public:
    // `tensors` as the property has inferred them.
    State(const Property& property, const std::string& context, const std::vector<Tensor>& tensors);
    ~State();
    State(const State&) = delete;
    State& operator=(const State&) = delete;

    const std::vector<int> needed;
    const MXCallbackList& callbacks() const { return callbacks_; }

  private:
    MXCallbackList callbacks_{};
};

// How a callback ended. Belongs to the engine until that has nothing left to do.
struct Outcome {
    int ended = 0;  // so many times
    std::string error;
};

// One execution of a state: what is pushed to the engine, for the forward and for each backward.
struct Execution {
    std::shared_ptr<State> state;
    std::vector<ArrayP> inputs, outputs, auxiliary;

    // `reqs` as in csrc/operator/call.h, one for each output or gradient.
    void forward(Engine& engine, const std::vector<int>& reqs, bool training, Outcome& outcome) const;
    void backward(Engine& engine, const std::vector<ArrayP>& of_outputs, const std::vector<ArrayP>& of_inputs,
                  const std::vector<int>& reqs, Outcome& outcome) const;
};

}  // namespace driver
