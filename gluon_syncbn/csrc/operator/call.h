// One call of a layer on one context: what it is to MXNet, whom it meets, and how it fails. What it computes, and with
// what, say `HostCall` and `DeviceCall`.
#pragma once

#include <array>
#include <exception>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "meeting/registry.h"
#include "mxnet_api.h"
#include "operator/tape.h"
#include "pooling/pooling.h"
#include "tensor.h"

namespace syncbn {

// Which part of a call an operator is. Several replicas of one context would wait for each other in the queue of whoever
// writes the running statistics, so there one operator meets the others and leaves the batch's statistics in an output,
// and a second one, which waits for nobody, takes them.
enum class Role : int { kWhole = 0, kMeet = 1, kTrack = 2 };

enum Request { kNull = 0, kWrite = 1, kInplace = 2, kAdd = 3 };
// In this order; where the batch is, says `Node`.
enum Input { kX = 0, kGamma = 1, kBeta = 2, kAddend = 3, kBatch };

// What the operator's attributes say; read once per call.
struct Node {
    std::shared_ptr<Layer> layer;
    Role role = Role::kWhole;
    size_t lanes = 1;
    Activation activation;
    bool adds = false;     // a fourth input to what is normalised, before the activation
    int64_t number = -1;   // which node of a graph this is, the same on all contexts; -1 for an eager call
    bool inplace = false;  // the backward gets y in the place of x, and finds x again
    int axis = 1;
    double epsilon = 1e-5, momentum = 0.9;
    bool fix_gamma = false;
    bool unbiased = false;  // the variance that the running one takes
    bool on_cpus = true;    // it may be called there, too; see op.py

    // Where things are in MXNet's lists: [inputs][outputs][auxiliary states] of the forward,
    // [gradients of the outputs][inputs][outputs][gradients of the inputs] of the backward.
    int inputs() const { return batch() + (role == Role::kTrack); }
    int batch() const { return kBeta + 1 + adds; }  // of the second operator of a call
    int outputs() const { return role != Role::kMeet ? 1 : hands_addend_on() ? 3 : 2; }
    int output() const { return inputs(); }
    int batch_output() const { return output() + 1; }  // of the first
    int addend_output() const { return output() + 2; }
    int running_mean() const { return inputs() + outputs(); }
    int output_in_backward() const { return outputs() + inputs(); }
    int gradients() const { return output_in_backward() + outputs(); }
    // A graph predicts, too. Then the second operator of a call normalises and adds. The addend passes through the first
    // one, so that one operator alone writes its gradient.
    bool hands_addend_on() const { return role == Role::kMeet && adds && number >= 0; }
    static constexpr int kGradientOfAddendOutput = 2;  // in the list of the backward
    // Whether what is there in the list of the forward, or of the backward, is like the data; else it is a vector.
    bool is_data(int at) const;
    bool is_data_of_backward(int at) const;
};

// Those of a call, as `Node` lists them.
struct Arrays {
    std::vector<Array> list;
    int64_t block = 1;  // of those that are like the data: see `Shape`
    Array operator[](int i) const { return list[static_cast<size_t>(i)]; }
};

// What a failed step has left for second operators that will not run any more.
void forget_handed_over();

// The next batch that is not finite gets a warning, however short ago the last one was.
void speak_of_nonfinite_again();

// With `static_shape`, MXNet keeps a call and executes it again at every step.
class Call {
  public:
    std::array<void*, 3> callback_states;  // MXNet keeps a pointer to these

    // For "cpu(0)" or "gpu(1)"; another kind of context is a Failure. `shape.outer` holds `samples` equal parts, which are
    // what slots are made of.
    static std::unique_ptr<Call> of(Node node, std::string context, Type type, Shape shape, int64_t samples);
    Call(Node node, std::string context, Type type, Shape shape, int64_t samples)
        : node_(std::move(node)), context_(std::move(context)), tensor_{type, shape, samples, {}} {}
    virtual ~Call() = default;

    // On the issuing thread, for a training call. `caller` is null on the main thread, whose calls take turns on the
    // seats; any other thread is one replica. `recall` says whether it is kept for a recomputation, or is one.
    void issue(const void* caller, Recall recall);
    // `reqs` as MXNet gives them, one for each output. On failure the outputs are NaN: nothing plausible is left.
    void forward(const Arrays& arrays, const int* reqs, bool training) {
        begin_forward(arrays, reqs, training);
        end_forward(arrays, reqs);
    }
    void backward(const Arrays& arrays, const int* reqs) {
        begin_backward(arrays, reqs);
        end_backward(arrays, reqs);
    }
    // Their halves. The first waits for others a moment at most, and returns whether the second will not wait at all.
    bool begin_forward(const Arrays& arrays, const int* reqs, bool training);
    void end_forward(const Arrays& arrays, const int* reqs);
    bool begin_backward(const Arrays& arrays, const int* reqs);
    void end_backward(const Arrays& arrays, const int* reqs);

    // Ends the step with what an exception says, and the layer and the context where it does not say them. Returns that,
    // or where there is no memory for it what says so.
    std::exception_ptr end_step(const std::exception& error) const noexcept;

    const Node& node() const { return node_; }
    const Tensor& tensor() const { return tensor_; }

  protected:
    // What comes before the replicas wait for each other, up to `contribute`. It may all be left to what follows.
    virtual void begin_normalise(const Arrays& arrays) = 0;
    virtual void begin_differentiate(const Arrays& arrays, const int* reqs) = 0;
    // y and, from the statistics of the batch, the running ones or what the second operator of the call moves them by.
    virtual void normalise(const Arrays& arrays, const int* reqs) = 0;
    // y, with the running statistics.
    virtual void normalise_frozen(const Arrays& arrays, int req) = 0;
    // dx, dgamma, dbeta and dz, the gradient before the activation, which is that of the addend. For slot i, normalised
    // with the statistics of pool u and feeding pool f, S1 = sum dz and S2 = sum dz*xhat over the slots that are normalised
    // with f:
    //   dx = gamma * invstd_u * dz  -  gamma * invstd_f / n_f * (S1 + (x - mean_f) * invstd_f * S2)
    // The parameters' gradients are this replica's part; the trainer adds the parts, as for any parameter.
    virtual void differentiate(const Arrays& arrays, const int* reqs) = 0;
    // Moves the running statistics by what the first operator of the call has left.
    virtual void track(const Arrays& arrays) = 0;
    // n values from one array into another, added where `add`; a value into all of an array.
    virtual void copy(Array from, Type type, int64_t n, Array to, bool add) = 0;
    virtual void fill(Array to, Type type, int64_t n, double value) = 0;
    // Waits until all that the call has asked for is done; throws Failure. And after a failure, so that nothing is left
    // behind; does not throw.
    virtual void finish() {}
    virtual void clear_up() {}
    // Another thread goes on.
    virtual void leave_thread() {}

    void sit_down();
    // Statistics and seat of the call that this one repeats. Returns what a device keeps them in.
    std::shared_ptr<const void> repeat();
    // For whoever repeats this one.
    void remember(std::shared_ptr<const void> device) const;
    // What `configure` says of this replica's packed moments that are not finite: the first is `value`, the `at`-th; -1
    // where all are finite.
    void look_at(int64_t at, double value) const;
    void look_at(const Vector& moments) const;
    bool watches() const { return node_.layer->terms()->nonfinite != Nonfinite::kPropagate; }
    bool shares() const { return sharing_of(node_.layer->pooling) != Sharing::kNothing; }
    // That of the meeting.
    Exchange& exchange(Direction direction) const {
        return node_.layer->room.exchange(*node_.layer->terms(), place_, direction);
    }
    // What this replica has for the others: `values` as `Part` has them. Waits a moment for theirs, in this process and
    // elsewhere.
    void contribute(Direction direction, Vector values, std::shared_ptr<const cuda::OnDevice> device = nullptr);
    // Those of all slots, or what they are together.
    Total total(Direction direction);
    // The pools of all slots, of which this replica's begin at `first`.
    void assign(const std::vector<double>& counts, size_t first, int64_t key);
    int64_t channels() const { return tensor_.shape.channels; }
    Affine affine(const Arrays& arrays, int inputs) const;
    [[noreturn]] void refuse_to_recover(const Hidden& hidden) const;

    const Node node_;
    const std::string context_;
    Tensor tensor_;
    Place place_;
    Pools pools_;          // of the last forward
    bool frozen_ = false;  // normalised with the running statistics: no gradient through them
    bool due_ = false;     // what is left of this execution waits for nobody
    Recall recall_;

  private:
    // NaN into the outputs in which something plausible might stand, those of which there is a request.
    struct Output {
        Array array;
        Input like;
        bool wanted;
    };
    // Ends the step, and throws why. Nothing of it may need memory.
    [[noreturn]] void fail(const std::exception& error, std::initializer_list<Output> outputs);
    void invalidate(Array out, Input like);
    void throw_if_closed() const;
    // Whether the first operator of the call has left the statistics of the batch there. Where it has not, the step has
    // failed: throws Failure if nobody has said so yet.
    bool has_come(Array batch) const;
    // The other operator of the call does the work.
    bool passes_on() const { return node_.role == (frozen_ ? Role::kMeet : Role::kTrack); }
    void pass(Array from, Array to, int req);
    void pass_forward(const Arrays& arrays, const int* reqs);
    void pass_backward(const Arrays& arrays, const int* reqs);
    template <typename Work>
    void attempt_forward(const Arrays& arrays, const int* reqs, const Work& work);
    template <typename Work>
    void attempt_backward(const Arrays& arrays, const int* reqs, const Work& work);

    // A process that is out of batches: the call works on no sample, and its outputs and gradients are 0.
    void leave_out(bool so);
    void write_zeros(const Arrays& arrays, const int* reqs, std::initializer_list<int> outputs);

    bool seated_ = false;
    bool left_out_ = false;
    int64_t outer_ = 0, samples_ = 0;  // of the tensor, while it is left out
    bool repeated_ = false;            // has been executed before
    bool complete_ = false;            // the forward has left what the backward needs
    bool lost_ = false;                // it has not, and has met nobody, so that nobody waits for the backward
    Vector own_;                       // what this replica has, where it contributes nothing
};

std::unique_ptr<Call> host_call(Node node, std::string context, Type type, Shape shape, int64_t samples);
std::unique_ptr<Call> device_call(Node node, std::string context, Type type, Shape shape, int64_t samples);

}  // namespace syncbn
