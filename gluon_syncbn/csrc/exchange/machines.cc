#include "exchange/machines.h"

#include <cstring>
#include <utility>

#include "failure.h"

namespace syncbn {
namespace {

// MPI moves a sum on only while it is asked, a bit at a time. Of 14 MB in pieces of 512 KB, two processes slept 265 times
// when they asked once between two naps, and 26 times with so many.
constexpr int kLooks = 20;

template <typename T>
void add(void* total, const void* part, size_t bytes) {
    auto* to = static_cast<T*>(total);
    const auto* from = static_cast<const T*>(part);
    for (size_t i = 0; i < bytes / sizeof(T); ++i) to[i] += from[i];
}

}  // namespace

Machines::Machines(Mailbox& job, Ranks leaders, const Mpi* mpi, size_t adds_from)
    : job_(job),
      leaders_(std::move(leaders)),
      others_(leaders_.begin() + 1, leaders_.end()),
      mpi_(mpi != nullptr ? std::optional<Mpi>(*mpi) : std::nullopt),
      adds_from_(adds_from) {}

void Machines::announce(int64_t round, const std::string& text) {
    job_.post(Label::of_gradients(Label::kOrder, round), text.data(), text.size(), others_);
}

std::optional<std::string> Machines::announced(int64_t round) {
    job_.arrivals(0);  // lets messages arrive
    return job_.received(leaders_[0], Label::of_gradients(Label::kOrder, round));
}

void Machines::begin(Type type, void* values, size_t count) {
    Sum& sum = sums_.emplace_back(Sum{type, values, count * static_cast<size_t>(size_of(type))});
    const SumToAdd given{begun_, size_of(type), static_cast<int64_t>(count), reinterpret_cast<int64_t>(values)};
    const Label part = Label::of_gradients(Label::kPart, begun_++);
    if (mpi_) {
        const Mpi::Handle kind = type == Type::kFloat64 ? mpi_->float64 : mpi_->float32;
        Mpi::check(mpi_->all_reduce(mpi_->in_place, values, static_cast<int>(count), kind, mpi_->add, mpi_->leaders,
                                    sum.request.memory));
    } else if (sum.bytes >= adds_from_) {
        job_.post(part, &given, sizeof given, {job_.ranks()});
    } else if (!is_first()) {
        job_.post(part, values, sum.bytes, {leaders_[0]});
    }
}

bool Machines::done() {
    if (!has_ended(sums_.front())) return false;
    sums_.pop_front();
    ++ended_;
    return true;
}

bool Machines::has_ended(Sum& sum) {
    const Label part = Label::of_gradients(Label::kPart, ended_), total = Label::of_gradients(Label::kSum, ended_);
    for (int look = 0; mpi_ && look < kLooks; ++look)
        if (mpi_->has_ended(&sum.request)) return true;
    if (mpi_) return false;
    if (sum.bytes >= adds_from_) return job_.received(job_.rank(), part).has_value();
    if (!is_first()) {
        const Mailbox::Found found = job_.find(leaders_[0], total);
        if (found.values == nullptr) return false;
        std::memcpy(sum.values, found.values, sum.bytes);
        job_.done(leaders_[0], found);
        return true;
    }
    for (const size_t leader : others_)
        if (job_.find(leader, part).values == nullptr) return false;
    for (const size_t leader : others_) {
        const Mailbox::Found found = job_.find(leader, part);
        (sum.type == Type::kFloat64 ? add<double> : add<float>)(sum.values, found.values, sum.bytes);
        job_.done(leader, found);
    }
    job_.post(total, sum.values, sum.bytes, others_);
    return true;
}

void Machines::check(const std::string& exchange, bool end_matters) {
    job_.arrivals(0);  // lets messages arrive
    job_.check_open();
    for (const size_t rank : without(job_.everybody, job_.rank()))
        if (!job_.fate_of(rank).empty() && (end_matters || job_.state_of(rank) != Mailbox::State::kEnded))
            throw Failure(job_.loss(rank, exchange));
}

}  // namespace syncbn
