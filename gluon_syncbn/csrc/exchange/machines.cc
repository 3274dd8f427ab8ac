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
    InPython(bool first, Mailbox& mailbox, const MachinesInPython& python)
        : Machines(first, mailbox), python_(python) {}

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

  private:
    const MachinesInPython python_;
};

class OverMpi : public Machines {
  public:
    OverMpi(bool first, Mailbox& mailbox, const Mpi& mpi) : Machines(first, mailbox), mpi_(mpi) {}

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

    const Mpi mpi_;
    std::deque<Told> told_;  // a deque's elements stay where they are
    std::deque<Mpi::Request> sums_;
};

}  // namespace

void Machines::check() {
    mailbox_.heard(0);  // lets messages arrive
    for (size_t rank = 0; rank < mailbox_.ranks(); ++rank) {
        std::string fate;
        if (mailbox_.state_of(rank) == Mailbox::State::kFailed)
            fate = "has failed: " + mailbox_.reason_of(rank);
        else if (const int64_t process = mailbox_.died(rank))
            fate = Mailbox::fate_of_dead(process);
        if (rank == mailbox_.rank() || fate.empty()) continue;
        throw std::runtime_error("rank " + std::to_string(rank) + " of " + std::to_string(mailbox_.ranks()) + " " +
                                 fate + " (rank " + std::to_string(mailbox_.rank()) +
                                 " was in the gradients of the machines)");
    }
}

std::unique_ptr<Machines> machines(bool first, Mailbox& mailbox, const MachinesInPython& python) {
    return std::make_unique<InPython>(first, mailbox, python);
}

std::unique_ptr<Machines> machines(bool first, Mailbox& mailbox, const Mpi& mpi) {
    return std::make_unique<OverMpi>(first, mailbox, mpi);
}

}  // namespace syncbn
