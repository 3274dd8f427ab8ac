// Represents one call of a layer on one context for MXNet: whom it meets, and how it fails. `HostCall` and `DeviceCall`
// compute.
#pragma once

#include <array>
#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "meeting/tape.h"
#include "operator/updates.h"
#include "pooling/pooling.h"
#include "tensor.h"
#include "waiting/wait.h"

namespace syncbn {

// The time of the last warning about a batch that is not finite. Such a value reaches all later layers and all replicas, and
// one warning is enough.
inline std::atomic<double> said_not_finite{-kForEver};

enum Request { kNull = 0, kWrite = 1, kInplace = 2, kAdd = 3 };

// What an array is to the operator: an input, what the forward writes, or the gradient of one of these.
enum Role { kX, kGamma, kBeta, kAddend, kMask, kY, kRunningMean, kRunningVar, kRoles };
constexpr Role gradient_of(Role role) { return static_cast<Role>(kRoles + role); }
constexpr Role kDx = gradient_of(kX), kDgamma = gradient_of(kGamma), kDbeta = gradient_of(kBeta),
               kDaddend = gradient_of(kAddend), kDmask = gradient_of(kMask), kDy = gradient_of(kY);
// Whether it has the shape of the data. If not, it is a vector or a mask.
constexpr bool is_data(int role) { return role % kRoles == kX || role % kRoles == kAddend || role % kRoles == kY; }

// The operator's attributes, which all calls of a node share.
struct Node {
    std::shared_ptr<Layer> layer;
    Activation activation;
    bool adds = false;    // has a fourth input, which is added before the activation
    bool masks = false;   // has a mask behind these
    int64_t number = -1;  // the number of this node of a graph, the same on all contexts; -1 for an eager call
    int axis = 1;
    double epsilon = 1e-5, momentum = 0.9;
    bool fix_gamma = false;
    bool unbiased = false;  // selects the variance that updates the running one
    bool frozen = false;    // normalises with the running statistics in training too
    bool on_cpus = true;    // it may be called on CPUs too; see op.py
    int turn = -1;  // its place among the nodes of a graph that update the same running statistics; -1: no other does

    // The roles of the arrays in MXNet's lists, and of those that are written.
    struct Lists {
        std::vector<Role> all, written;
    };
    size_t inputs = 0;  // their number; the mask is the last one
    Lists forward;      // [inputs][output][running statistics]
    Lists backward;     // [gradient of the output][inputs][output][gradients of the inputs]
    void list_roles();
};

using NodePtr = std::shared_ptr<const Node>;

// The arrays of an execution, by their roles. `requests` are MXNet's, of arrays that are written.
struct Arrays {
    std::array<Array, 2 * kRoles> of = {};
    std::array<int, 2 * kRoles> requests = {};
    int64_t block = 1;  // channels in a block, of arrays with the data's shape: see `Shape`
    Array operator[](Role role) const { return of[role]; }
    bool wants(Role role) const { return requests[role] != kNull; }
    // MXNet adds gradients alone (src/executor/inplace_addto_detect_pass.cc).
    bool adds(Role role) const { return requests[role] == kAdd; }
};

// With `static_shape`, MXNet keeps a call and executes it again at every step.
class Call {
  public:
    std::array<void*, 3> callback_states;  // MXNet keeps a pointer to these

    Call(NodePtr node, std::string context, Tensor tensor)
        : node_(std::move(node)), context_(std::move(context)), tensor_(std::move(tensor)) {}
    virtual ~Call() = default;

    // Called on the issuing thread, for a training call.
    void issue();
    // The two halves of an execution, of the forward or of a backward. The first waits for others a moment at most, and
    // returns whether the second will not wait. On failure what is written is NaN, so that nothing looks plausible.
    bool begin(bool backward, const Arrays& arrays, bool training);
    void end();

    // Ends the step with the text of an exception, and adds the layer and the context if they are missing. Returns the
    // failure or, without memory for it, an error that says so.
    std::exception_ptr end_step(const std::exception& error) const noexcept;

    const Node& node() const { return *node_; }
    const Tensor& tensor() const { return tensor_; }

  protected:
    // The work before the replicas wait for each other, up to `contribute`, whose result these return; true if nothing is
    // shared. A call that repeats another one has none. In the backward, computes dz, which is dy unless y says more.
    virtual bool begin_normalise() = 0;
    virtual bool begin_differentiate() = 0;
    // Computes y, with the running statistics if `frozen_`. From the statistics of the batch it also updates the running
    // ones, and sets a gamma that does not count to 1, as MXNet's BatchNorm does: an optimizer may have changed it. Operators
    // that write the running statistics of a context come one after the other.
    virtual void normalise() = 0;
    // Computes dx, dgamma, dbeta and dz, the gradient before the activation, which is also the addend's: see reference.py.
    // The parameters' gradients are this replica's part; the trainer adds the parts, as for any parameter.
    virtual void differentiate() = 0;
    virtual void add_data(Array from, Array to) = 0;
    // Gives all bytes this value.
    virtual void fill(Array to, int64_t bytes, int value) = 0;
    // Returns memory for the data, until the execution ends.
    virtual Array scratch() = 0;
    // Waits for all work of the call on a device; throws Failure. After a failure it removes the rest of the work, and
    // does not throw.
    virtual void finish() = 0;
    virtual void clear_up() = 0;

    // Takes statistics and position of the call that this one repeats. Returns the statistics on a device.
    std::shared_ptr<const void> repeat();
    void remember(std::shared_ptr<const void> device) const;
    // Applies `configure`'s setting, if it watches, for this replica's packed moments that are not finite. The first one
    // is `value`, at index `at`; -1 if all are finite.
    void check_finite(int64_t at, double value) const;
    bool watches() const { return config_->nonfinite != Nonfinite::kPropagate; }
    bool shares() const { return sharing_of(node_->layer->pooling) != Sharing::kNothing; }
    // Contributes this replica's vectors, as in `Part`. Waits a moment for the others, in this process and elsewhere, and
    // returns whether they have come.
    bool contribute(Vector values, std::shared_ptr<const cuda::OnDevice> device = nullptr);
    // Returns the vectors of all slots, or their combination.
    std::shared_ptr<const Total> total() const;
    // Whether other nodes of the graph, which MXNet keeps, update the same running statistics.
    bool takes_turns() const { return kept_ && node_->turn >= 0; }
    // Updates the running statistics now, or behind the graph. So it keeps what it needs.
    template <typename Update>
    void update_in_turn(Update update) {
        if (!takes_turns()) return update();
        updates->leave(data(arrays_[kRunningMean]), node_->turn, std::move(update));
    }
    // Makes the pools of all slots. The vector of each has this length, and begins with its samples.
    void assign(const Total& of_slots, int64_t length);
    int64_t channels() const { return tensor_.shape.channels; }
    // Whether dx comes from dy and the activation, by x. With an addend it comes from dz, the addend's gradient.
    bool by_input() const { return node_->activation.any() && !node_->adds; }

    const NodePtr node_;
    const std::string context_;
    Tensor tensor_;
    Arrays arrays_;
    bool backward_ = false;  // the execution is one, or the last was
    Array dz_;               // of a backward
    LayerConfigPtr config_;  // of the layer, as they were when this call was issued
    Place place_;
    std::shared_ptr<const Pools> pools_;  // of the last forward
    bool frozen_ = false;                 // normalised with the running statistics: no gradient through them
    std::shared_ptr<Memo> memo_;          // of this forward, or of the one that it repeats
    bool repeats_ = false;

  private:
    const std::vector<Role>& written() const { return (backward_ ? node_->backward : node_->forward).written; }
    // Whether this is a backward whose forward has failed.
    bool orphaned() const { return backward_ && !complete_; }
    // Fills all that this execution writes or, if it has not failed, what is always 0.
    void fill_written(bool failed);
    // Does a part of the execution. If it fails, ends the step and throws the reason. Must work without memory then.
    template <typename Work>
    void attempt(const Work& work);
    void join_meeting();

    bool issued_ = false;    // the next forward has its place
    bool complete_ = false;  // the last forward has left what a backward needs
    bool kept_ = true;       // MXNet keeps the call and executes it again, and it has not been issued by itself
    const int64_t outer_ = tensor_.shape.outer, samples_ = tensor_.samples;  // of `tensor_`, unless left out
    std::shared_ptr<const Total> own_;  // this replica's vectors, if it contributes none
};

std::unique_ptr<Call> host_call(NodePtr node, std::string context, Tensor tensor);
std::unique_ptr<Call> device_call(NodePtr node, std::string context, Tensor tensor);

}  // namespace syncbn
