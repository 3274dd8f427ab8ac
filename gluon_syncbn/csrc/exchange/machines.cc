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

class OverMpi : public InPython {
  public:
    OverMpi(bool first, const MachinesInPython& python, const Mpi& mpi) : InPython(first, python), mpi_(mpi) {}

    void announce(const Announcement& announcement) override {
        while (!told_.empty() && told_.front().operation.done(mpi_)) told_.pop_front();
        broadcast(announcement);
    }
    bool announced(Announcement* announcement) override {
        if (told_.empty()) broadcast({});
        if (!told_.front().operation.done(mpi_)) return false;
        *announcement = told_.front().announcement;
        told_.pop_front();
        return true;
    }
    void begin(Type type, void* values, size_t count) override {
        sums_.emplace_back();
        const Mpi::Handle kind = type == Type::kFloat64 ? mpi_.float64 : mpi_.float32;
        checked(mpi_.all_reduce(mpi_.in_place, values, static_cast<int>(count), kind, mpi_.add, mpi_.communicator,
                                sums_.back().request));
    }
    bool done() override {
        if (!sums_.front().done(mpi_)) return false;
        sums_.pop_front();
        return true;
    }

  private:
    // Stays where it is as long as MPI uses it.
    struct Operation {
        char request[16] = {};  // of any MPI

        bool done(const Mpi& mpi) {
            char status[256];
            int done = 0;
            checked(mpi.test(request, &done, status));
            return done != 0;
        }
    };
    struct Told {
        Announcement announcement;
        Operation operation;
    };
    static void checked(int status) {
        if (status != 0) throw std::runtime_error("MPI reports error " + std::to_string(status));
    }
    void broadcast(const Announcement& announcement) {
        told_.push_back({announcement, {}});
        checked(mpi_.broadcast(&told_.back().announcement, kAnnouncement, mpi_.int64, 0, mpi_.communicator,
                               told_.back().operation.request));
    }

    const Mpi mpi_;
    std::deque<Told> told_;
    std::deque<Operation> sums_;
};

}  // namespace

std::unique_ptr<Machines> machines(bool first, const MachinesInPython& python, const Mpi* mpi) {
    if (mpi != nullptr) return std::make_unique<OverMpi>(first, python, *mpi);
    return std::make_unique<InPython>(first, python);
}

}  // namespace syncbn
