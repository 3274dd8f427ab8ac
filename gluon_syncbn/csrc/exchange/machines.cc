#include "exchange/machines.h"

#include <deque>
#include <stdexcept>
#include <string>

namespace syncbn {
namespace {

// Calls a function in Python.
template <typename Function, typename... Arguments>
void call(Function* function, Arguments... arguments) {
    Problem problem{};
    if (function(arguments..., &problem) != 0) throw std::runtime_error(problem.text);
}

class InPython : public Machines {
  public:
    InPython(bool first, const MachinesInPython& python) : python_(python), first_(first) {}

    bool is_first() const override { return first_; }
    void announce(const Announcement& announcement) override {
        Announcement copy = announcement;
        call(python_.tell, &copy.channel);
    }
    bool announced(Announcement* announcement) override {
        call(python_.tell, &announcement->channel);
        return true;
    }
    void begin(Type type, void* values, size_t count) override {
        call(python_.add, static_cast<int>(type), static_cast<int64_t>(count), values);
    }
    bool done() override { return true; }
    void check() override { call(python_.check); }
    void fail(const char* reason) override { python_.fail(reason); }

  private:
    const MachinesInPython python_;
    const bool first_;
};

class OverMpi : public Machines {
  public:
    OverMpi(bool first, const Mpi& mpi, Mailbox& mailbox) : first_(first), mpi_(mpi), mailbox_(mailbox) {}

    bool is_first() const override { return first_; }
    void announce(const Announcement& announcement) override {
        while (!told_.empty() && mpi_.has_ended(&told_.front().request)) told_.pop_front();
        broadcast(announcement);
    }
    bool announced(Announcement* announcement) override {
        if (told_.empty()) broadcast({});
        if (!mpi_.has_ended(&told_.front().request)) return false;
        *announcement = told_.front().announcement;
        told_.pop_front();
        return true;
    }
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
    void check() override {
        mailbox_.heard(0);  // lets messages arrive
        const std::string of = " of " + std::to_string(mailbox_.ranks());
        for (size_t rank = 0; rank < mailbox_.ranks(); ++rank)
            if (mailbox_.state_of(rank) == Mailbox::State::kFailed)
                throw std::runtime_error("rank " + std::to_string(rank) + of +
                                         " has failed: " + mailbox_.reason_of(rank) + " (rank " +
                                         std::to_string(mailbox_.rank()) + " was in the gradients of the machines)");
    }
    void fail(const char* reason) override { mailbox_.leave(Mailbox::State::kFailed, reason); }

  private:
    struct Told {
        Announcement announcement;
        Mpi::Request request;
    };
    void broadcast(const Announcement& announcement) {
        told_.push_back({announcement, {}});
        Mpi::check(mpi_.broadcast(&told_.back().announcement, kAnnouncement, mpi_.int64, 0, mpi_.leaders,
                                  told_.back().request.memory));
    }

    const bool first_;
    const Mpi mpi_;
    Mailbox& mailbox_;
    std::deque<Told> told_;  // a deque's elements stay where they are
    std::deque<Mpi::Request> sums_;
};

}  // namespace

std::unique_ptr<Machines> machines(bool first, const MachinesInPython& python) {
    return std::make_unique<InPython>(first, python);
}

std::unique_ptr<Machines> machines(bool first, const Mpi& mpi, Mailbox& mailbox) {
    return std::make_unique<OverMpi>(first, mpi, mailbox);
}

}  // namespace syncbn
