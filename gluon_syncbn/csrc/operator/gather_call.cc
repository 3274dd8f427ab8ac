// A gather on a CPU context. It outputs the rows of all replicas, in the order of their ranks. The gradient of a row is
// the sum of the gradients of its copies.
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "cpu/backend.h"
#include "cpu/numbers.h"
#include "operator/call.h"
#include "waiting/step.h"

namespace syncbn {
namespace {

// A replica contributes the number of its rows, the number of values in a row, their type, and then the rows.
constexpr size_t kHead = 3;

// Returns how many float64 numbers have space for so many bytes.
size_t doubles_for(int64_t bytes) { return (static_cast<size_t>(bytes) + sizeof(double) - 1) / sizeof(double); }

// The rows of all replicas, and the index of this replica's first row.
struct Rows {
    std::vector<char> all;
    int64_t first = 0;
};

class GatherCall : public Call {
  public:
    using Call::Call;

  protected:
    void begin_normalise(const Arrays& arrays) override;
    void normalise(const Arrays& arrays, const int* reqs) override;
    void normalise_frozen(const Arrays&, int) override {
        throw Failure("gather works only within autograd.record() or autograd.train_mode().");
    }
    void begin_differentiate(const Arrays& arrays, const int* reqs) override;
    void differentiate(const Arrays& arrays, const int* reqs) override;
    void track(const Arrays&) override {}
    void copy(Array from, Type type, int64_t n, Array to, bool add) override {
        backend_.copy(data(from), type, n, to, add);
    }
    void fill(Array to, Type type, int64_t n, double value) override { backend_.fill(to, type, n, value); }
    void fill_with_zeros(Array, int64_t) override {}

  private:
    int64_t bytes() const { return tensor_.shape.size() * size_of(tensor_.type); }
    Rows rows_of(const Total& total) const;

    cpu::Backend backend_;
    int64_t first_ = 0;
};

void GatherCall::begin_normalise(const Arrays& arrays) {
    if (recall_.again) return;  // it may have to wait for the call that it repeats
    join_meeting();
    if (step().out_of_batches)
        throw Failure("gather does not work within gluon_syncbn.join, because a process without a batch has no rows.");
    Vector own{static_cast<double>(tensor_.shape.outer), static_cast<double>(channels()),
               static_cast<double>(static_cast<int>(tensor_.type))};
    own.resize(kHead + doubles_for(bytes()));
    if (bytes() > 0) std::memcpy(&own[kHead], data(arrays[kX]), static_cast<size_t>(bytes()));
    contribute(Direction::kForward, std::move(own));
}

Rows GatherCall::rows_of(const Total& total) const {
    Rows rows;
    std::string counts;
    const int64_t of_row = channels() * size_of(tensor_.type);
    int64_t count = 0;
    for (size_t at = 0; at < total.values.size();) {
        const double* part = &total.values[at];
        const auto here = static_cast<int64_t>(part[0]);
        if (part[1] != static_cast<double>(channels()) || static_cast<int>(part[2]) != static_cast<int>(tensor_.type))
            throw Failure("rows of " + std::to_string(channels()) + " values of " + name_of(tensor_.type) +
                          " met rows of " + std::to_string(static_cast<int64_t>(part[1])) + " values of " +
                          type_of_data(static_cast<int>(part[2]))->name +
                          ". All replicas need rows of one shape and type.");
        if (at == total.first) rows.first = count;
        const char* values = reinterpret_cast<const char*>(part + kHead);
        rows.all.insert(rows.all.end(), values, values + here * of_row);
        count += here;
        counts += (counts.empty() ? "" : ", ") + std::to_string(here);
        at += kHead + doubles_for(here * of_row);
    }
    if (count != node_.rows)
        throw Failure("the parts have " + counts + " rows, " + std::to_string(count) + " in all, where " +
                      std::to_string(node_.rows) + " were expected. Give gather(..., rows=" + std::to_string(count) +
                      ") in all of them.");
    return rows;
}

void GatherCall::normalise(const Arrays& arrays, const int* reqs) {
    std::shared_ptr<const Rows> rows;
    if (recall_.again) {
        rows = std::static_pointer_cast<const Rows>(repeat());
    } else {
        rows = std::make_shared<Rows>(rows_of(total(Direction::kForward)));
        remember(rows);
    }
    first_ = rows->first;
    if (reqs[0] != kNull && !rows->all.empty())
        backend_.copy(rows->all.data(), tensor_.type, node_.rows * channels(), arrays[node_.output()], reqs[0] == kAdd);
}

void GatherCall::begin_differentiate(const Arrays& arrays, const int*) {
    Vector all(static_cast<size_t>(node_.rows * channels()));
    cpu::with_type(tensor_.type, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T* dy = all.empty() ? nullptr : data<const T>(arrays[0]);
        for (size_t i = 0; i < all.size(); ++i) all[i] = cpu::Value<T>::load(dy + i);
    });
    contribute(Direction::kBackward, std::move(all));
}

void GatherCall::differentiate(const Arrays& arrays, const int* reqs) {
    const Total sums = total(Direction::kBackward);
    if (reqs[kX] == kNull || tensor_.shape.size() == 0) return;
    const auto own = sums.values.begin() + first_ * channels();
    backend_.write(Vector(own, own + tensor_.shape.size()), tensor_.type, arrays[node_.gradients()], reqs[kX] == kAdd);
}

}  // namespace

std::unique_ptr<Call> gather_call(Node node, std::string context, Type type, Shape shape, int64_t samples) {
    if (context.compare(0, 3, "cpu") != 0)
        throw Failure("gather in a hybridized net works on CPU contexts only; " + context +
                      " was given. Call gluon_syncbn.gather outside the hybridized net.");
    return std::make_unique<GatherCall>(std::move(node), std::move(context), type, shape, samples);
}

}  // namespace syncbn
