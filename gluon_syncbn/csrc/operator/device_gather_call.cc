// A gather on a GPU. NCCL brings the rows of all replicas to each GPU, and adds the gradients of all copies in float64:
//
//     x ──► own rows ──► rows of all, by NCCL ──► y
//     dy ──► float64 ──► all-reduce ──► own rows ──► dx
//
// Without NCCL, rows and gradients go to the host, meet as those of a CPU do, and go back.
#include <utility>

#include "operator/stream_call.h"

namespace syncbn {
namespace {

using cuda::Memory;

class DeviceGatherCall : public StreamCall {
  public:
    using StreamCall::StreamCall;
    ~DeviceGatherCall() override { clear_up(); }

  protected:
    void begin_normalise(const Arrays& arrays) override;
    void normalise(const Arrays& arrays, const int* reqs) override;
    void normalise_frozen(const Arrays&, int) override { refuse_to_gather(); }
    void begin_differentiate(const Arrays& arrays, const int* reqs) override;
    void differentiate(const Arrays& arrays, const int* reqs) override;
    void track(const Arrays&) override {}
    void finish() override;
    void clear_up() override {
        kept_for_repetition_ = false;
        StreamCall::clear_up();
    }

  private:
    // What a call leaves for those that repeat it.
    struct Outcome {
        std::shared_ptr<Gathered> gathered;
        int64_t first;
    };
    int64_t all_values() const { return node_.rows * channels(); }
    void contribute_rows(const Arrays& arrays);
    // Contributes what `gathered_` has, for a result of so many float64 values.
    void contribute_values(Direction direction, int64_t all);

    int64_t first_ = 0;
    bool kept_for_repetition_ = false;  // the gathered rows are
};

void DeviceGatherCall::begin_normalise(const Arrays& arrays) {
    clear_up();                 // after an execution that found no thread to go on in
    if (recall_.again) return;  // it may have to wait for the call that it repeats
    join_gather();
    contribute_rows(arrays);
}

void DeviceGatherCall::contribute_values(Direction direction, int64_t all) {
    direction_ = direction;
    if (exchange_->replicas() > 1) gathered_->all = memory(all);
    contribute_part(direction, head().packed());
}

void DeviceGatherCall::contribute_rows(const Arrays& arrays) {
    exchange_ = &exchange();
    gathered_ = std::make_shared<Gathered>();
    gathered_->own = memory(in_doubles(tensor_.shape.size()));
    double* const own_rows = gathered_->own.data();
    const bool over_host = form() == Form::kHost;
    if (over_host) cuda::fill_with_zeros(own_rows, gathered_->own.size() * 8, work().lease.stream());  // behind them
    copy_data(data(arrays[kX]), tensor_.type, tensor_.shape.size(), own_rows, false);
    if (!over_host) return contribute_values(Direction::kForward, in_doubles(all_values()));
    Vector own = contribution_of(head(), downloaded(gathered_->own).data());
    still_current([&] { contribute(Direction::kForward, std::move(own)); });
}

void DeviceGatherCall::normalise(const Arrays& arrays, const int* reqs) {
    if (recall_.again) {
        const auto outcome = std::static_pointer_cast<const Outcome>(repeat());
        gathered_ = outcome->gathered;
        first_ = outcome->first;
    } else {
        const Total total = still_current([&] { return this->total(Direction::kForward); });
        may_be_posted_ = false;
        if (form() == Form::kHost) {
            const Rows rows = rows_of(total);
            first_ = rows.first;
            gathered_->all = memory(in_doubles(all_values()));
            if (!rows.all.empty()) gathered_->all.upload(rows.all.data(), work().lease.stream());
        } else {
            first_ = first_row_of(heads_of(total.values), total.first / RowsHead::kLength);
        }
        kept_for_repetition_ = recall_.memo != nullptr;
    }
    if (reqs[0] != kNull)
        copy_data(gathered_->values(), tensor_.type, all_values(), data(arrays[node_.output()]), reqs[0] == kAdd);
}

void DeviceGatherCall::begin_differentiate(const Arrays& arrays, const int*) {
    clear_up();
    exchange_ = &exchange();
    gathered_ = std::make_shared<Gathered>();
    gathered_->own = memory(all_values());
    run_on_each(kernel_of("widen", tensor_.type), all_values(),
                cuda::CopyArguments{all_values(), data(arrays[0]), gathered_->own.data(), false});
    if (form() != Form::kHost) return contribute_values(Direction::kBackward, all_values());
    direction_ = Direction::kBackward;
    Vector own = downloaded(gathered_->own);
    still_current([&] { contribute(Direction::kBackward, std::move(own)); });
}

void DeviceGatherCall::differentiate(const Arrays& arrays, const int* reqs) {
    const Total total = still_current([&] { return this->total(Direction::kBackward); });
    may_be_posted_ = false;
    if (reqs[kX] == kNull) return;
    if (form() == Form::kHost && all_values() > 0) {
        gathered_->all = memory(all_values());
        gathered_->all.upload(total.values.data(), work().lease.stream());
    }
    const int64_t n = tensor_.shape.size();
    run_on_each(kernel_of("narrow", tensor_.type), n,
                cuda::CopyArguments{n, gathered_->values() + first_ * channels(), data(arrays[node_.gradients()]),
                                    reqs[kX] == kAdd});
}

void DeviceGatherCall::finish() {
    if (!work_) return;
    wait();
    if (kept_for_repetition_) remember(std::make_shared<Outcome>(Outcome{gathered_, first_}));
    kept_for_repetition_ = false;
    StreamCall::finish();
}

}  // namespace

std::unique_ptr<Call> device_gather_call(Node node, std::string context, Type type, Shape shape, int64_t samples) {
    return std::make_unique<DeviceGatherCall>(std::move(node), std::move(context), type, shape, samples);
}

}  // namespace syncbn
