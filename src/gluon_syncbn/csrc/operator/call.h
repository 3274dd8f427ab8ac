// One call of a layer on one context: kernels, pooling and meetings put together.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "meeting/registry.h"
#include "mxnet_api.h"
#include "operator/tape.h"
#include "pooling/pooling.h"

namespace syncbn {

// Which part of a call an operator is. Several replicas of one context would wait for each other in the queue of whoever
// writes the running statistics, so there one operator meets the others and leaves the batch's statistics in an output,
// and a second one, which waits for nobody, takes them.
enum class Role : int { kWhole = 0, kMeet = 1, kTrack = 2 };

// What the operator's attributes say; read once per call.
struct Node {
    std::shared_ptr<Layer> layer;
    Role role = Role::kWhole;
    size_t lanes = 1;
    int64_t number = -1;  // which node of a graph this is, the same on all contexts; -1 for an eager call
    int axis = 1;
    double epsilon = 1e-5, momentum = 0.9;
    bool fix_gamma = false;
    bool unbiased = false;  // the variance that the running one takes
    bool guarded = true;    // against temporary inputs, which only a CPU has; see op.py

    // Where things are in MXNet's lists: [inputs][outputs][auxiliary states] of the forward,
    // [gradients of the outputs][inputs][outputs][gradients of the inputs] of the backward.
    int inputs() const { return role == Role::kTrack ? 4 : 3; }
    int outputs() const { return role == Role::kMeet ? 2 : 1; }
    int output() const { return inputs(); }
    int running_mean() const { return inputs() + outputs(); }
    int gradients() const { return outputs() + inputs() + outputs(); }
};

enum Request { kNull = 0, kWrite = 1, kInplace = 2, kAdd = 3 };
enum Input { kX = 0, kGamma = 1, kBeta = 2, kBatch = 3 };

// Frees the arrays that MXNet hands to a callback, whatever happens in it.
class Arrays {
  public:
    Arrays(int size, void** handles) : handles_(handles, handles + size) {}
    ~Arrays() {
        for (void* handle : handles_) mx.ndarray_free(handle);
    }
    Arrays(const Arrays&) = delete;
    Arrays& operator=(const Arrays&) = delete;

    Array operator[](int i) const { return handles_[i]; }

  private:
    std::vector<void*> handles_;
};

// The next batch that is not finite gets a warning, however short ago the last one was.
void speak_of_nonfinite_again();

// With `static_shape`, MXNet keeps a call and executes it again at every step.
class Call {
  public:
    std::array<void*, 3> callback_states;  // MXNet keeps a pointer to these

    // `shape.outer` holds `samples` equal parts, which are what slots are made of.
    Call(Node node, std::string context, Type type, Shape shape, int64_t samples)
        : node_(std::move(node)),
          context_(std::move(context)),
          backend_(Backend::of(context_)),
          tensor_{type, shape, samples, {}} {}

    // On the issuing thread, for a training call. `caller` is null on the main thread, whose calls take turns on the
    // seats; any other thread is one replica. `recall` says whether it is kept for a recomputation, or is one.
    void issue(const void* caller, Recall recall);
    // `reqs` as MXNet gives them, one for each output. On failure the outputs are NaN: nothing plausible is left.
    void forward(const Arrays& arrays, const int* reqs, bool training);
    void backward(const Arrays& arrays, const int* reqs);

  private:
    // Ends the step with what an exception says, and the layer and the context where it does not say them; NaN into the
    // outputs in which something plausible might stand.
    [[noreturn]] void fail(const std::exception& error, const std::vector<std::pair<Array, Input>>& outputs);
    void invalidate(Array out, Input like);
    void throw_if_closed() const;
    int threads() const;
    int64_t channels() const { return tensor_.shape.channels; }
    Affine affine(const Arrays& arrays, int inputs) const;
    // The other operator of the call does the work.
    bool passes_on() const { return node_.role == (frozen_ ? Role::kMeet : Role::kTrack); }

    void normalise(const Arrays& arrays, const int* reqs);
    void normalise_frozen(const Arrays& arrays, int req);
    void differentiate(const Arrays& arrays, const int* reqs);
    void pass(Array from, Array to, int req);
    void no_gradient(const Arrays& arrays, const int* reqs);

    void sit_down();
    // Statistics and seat of the call that this one repeats.
    void repeat();
    // The packed vectors of this replica's slots in; those of all slots out, or what they are together.
    Total share(Direction direction, Vector values);
    // What `configure` says of this replica's moments that are not finite.
    void look_at(const Vector& moments) const;
    // Gives the slots their statistics.
    void assign(const Total& moments);
    // [1, mean[C], variance[C]] that the running statistics go towards; [0, ...] where there is nothing.
    Vector batch_statistics(const Total& moments) const;
    void update_running(const Vector& batch, const Arrays& arrays);
    // [sum dy[C], sum dy*xhat[C]] of each slot in; of the slots that use the statistics which it feeds out.
    Vector gradients_of_users(Vector sums);
    std::shared_ptr<const Statistic> statistic(const Vector& moments) const;

    const Node node_;
    const std::string context_;
    const std::unique_ptr<Backend> backend_;
    Tensor tensor_;
    Place place_;
    Pools pools_;             // of all slots of the last forward
    int64_t first_slot_ = 0;  // of this replica
    Recall recall_;
    bool seated_ = false;
    bool repeated_ = false;  // has been executed before
    bool complete_ = false;  // the forward has left what the backward needs
    bool frozen_ = false;    // normalised with the running statistics: no gradient through them
};

}  // namespace syncbn
