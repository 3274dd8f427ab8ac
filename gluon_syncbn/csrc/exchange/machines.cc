#include "exchange/machines.h"

#include <cstring>
#include <utility>

#include "failure.h"

namespace syncbn {
namespace {

constexpr int64_t kPhase = -100;  // that no other exchange has

template <typename T>
void add(void* total, const void* part, size_t bytes) {
    auto* to = static_cast<T*>(total);
    const auto* from = static_cast<const T*>(part);
    for (size_t i = 0; i < bytes / sizeof(T); ++i) to[i] += from[i];
}

class OverMpi : public Machines {
  public:
    OverMpi(Tier& job, Ranks leaders, const Mpi& mpi) : Machines(job, std::move(leaders)), mpi_(mpi) {}

    void begin(Type type, void* values, size_t count) override {
        sums_.emplace_back();
        const Mpi::Handle kind = type == Type::kFloat64 ? mpi_.float64 : mpi_.float32;
        Mpi::check(mpi_.all_reduce(mpi_.in_place, values, static_cast<int>(count), kind, mpi_.add, mpi_.leaders,
                                   sums_.back().memory));
    }
    bool done() override {
        if (!mpi_.has_ended(&sums_.front())) return false;
        sums_.pop_front();
        return true;
    }

  private:
    const Mpi mpi_;
    std::deque<Mpi::Request> sums_;  // a deque's elements stay where they are
};

}  // namespace

// No message is the first piece of an exchange, of which a mailbox remembers who has come to it.
Label Machines::label(Kind kind, int64_t number) { return {kind, 0, number, kPhase, 1}; }

Mailbox::Found Machines::from(size_t place, const Label& label) {
    job_.mail->heard(0);  // lets messages arrive
    return job_.mail->find(leaders_[place], label);
}

void Machines::announce(const Announcement& announcement) {
    std::string text(sizeof announcement.channel, 0);
    std::memcpy(&text[0], &announcement.channel, text.size());
    text += announcement.arrays;
    job_.post_bytes(label(kOrder, rounds_++), text.data(), text.size(), others());
}

std::optional<Announcement> Machines::announced() {
    const Label order = label(kOrder, rounds_);
    const Mailbox::Found found = from(0, order);
    if (found.values == nullptr) return std::nullopt;
    Announcement announcement{0, {reinterpret_cast<const char*>(found.values + 1), found.length - sizeof(int64_t)}};
    std::memcpy(&announcement.channel, found.values, sizeof announcement.channel);
    job_.mail->done(leaders_[0], order, found);
    ++rounds_;
    return announcement;
}

void Machines::begin(Type type, void* values, size_t count) {
    sums_.push_back({type, values, count * static_cast<size_t>(size_of(type))});
    const size_t bytes = sums_.back().bytes;
    const CarriedSum carried{begun_, size_of(type), static_cast<int64_t>(count), reinterpret_cast<int64_t>(values)};
    if (bytes >= carried_from_)
        job_.post_bytes(label(kPart, begun_), &carried, sizeof carried, {job_.mail->ranks()});
    else if (!is_first())
        job_.post_bytes(label(kPart, begun_), values, bytes, {leaders_[0]});
    ++begun_;
}

bool Machines::done() {
    const Sum& sum = sums_.front();
    const Label part = label(kPart, ended_), total = label(kTotal, ended_);
    if (sum.bytes >= carried_from_) {
        const size_t own = job_.mail->rank();
        const Mailbox::Found found = job_.mail->find(own, part);
        if (found.values == nullptr) return false;
        job_.mail->done(own, part, found);
    } else if (is_first()) {
        for (size_t place = 1; place < leaders_.size(); ++place)
            if (from(place, part).values == nullptr) return false;
        for (size_t place = 1; place < leaders_.size(); ++place) {
            const Mailbox::Found found = from(place, part);
            (sum.type == Type::kFloat64 ? add<double> : add<float>)(sum.values, found.values, sum.bytes);
            job_.mail->done(leaders_[place], part, found);
        }
        job_.post_bytes(total, sum.values, sum.bytes, others());
    } else {
        const Mailbox::Found found = from(0, total);
        if (found.values == nullptr) return false;
        std::memcpy(sum.values, found.values, sum.bytes);
        job_.mail->done(leaders_[0], total, found);
    }
    sums_.pop_front();
    ++ended_;
    return true;
}

void Machines::check() {
    Mailbox& mail = *job_.mail;
    mail.heard(0);  // lets messages arrive
    job_.check_open();
    for (size_t rank = 0; rank < mail.ranks(); ++rank)
        if (rank != mail.rank() && (mail.state_of(rank) == Mailbox::State::kFailed || mail.died(rank) != 0))
            throw Failure(job_.loss(rank, "the gradients of the machines"));
}

std::unique_ptr<Machines> machines(Tier& job, Ranks leaders, const Mpi* mpi, size_t carried_from) {
    if (mpi != nullptr) return std::make_unique<OverMpi>(job, std::move(leaders), *mpi);
    return std::make_unique<Machines>(job, std::move(leaders), carried_from);
}

}  // namespace syncbn
