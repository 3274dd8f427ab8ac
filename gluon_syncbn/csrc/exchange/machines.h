// Sums the totals of machines. One process of each machine, its leader, talks to the other leaders.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "exchange/mpi.h"
#include "exchange/tier.h"
#include "types.h"

namespace syncbn {

// What comes next: a round, with a text of its arrays.
struct Announcement {
    int64_t channel;
    std::string arrays;
};

// Each leader has one, and calls it from one thread. All leaders begin the same operations in the same order, so that
// none waits for another one's next. Each function throws std::exception with the reason. The first leader adds, in the
// order of the leaders, what the others send, and sends them the total. A sum of `carried_from` bytes or more is the
// carrier's: it gets a CarriedSum, for a reader that no rank is, adds in place, and delivers that message back.
class Machines {
  public:
    struct CarriedSum {
        int64_t number, size_of_value, count, address;
    };
    // `job`: of all ranks; it knows which have failed.
    Machines(Tier& job, Ranks leaders, size_t carried_from = 0)
        : job_(job), leaders_(std::move(leaders)), carried_from_(carried_from) {}
    virtual ~Machines() = default;
    // The leader of the first machine says which round is next.
    bool is_first() const { return leaders_[0] == job_.mail->rank(); }
    void announce(const Announcement& announcement);
    // For the other leaders: what has come, if it has.
    std::optional<Announcement> announced();
    // Begins a sum in place.
    virtual void begin(Type type, void* values, size_t count);
    // Whether the oldest sum that has not ended before has ended now.
    virtual bool done();
    // Throws if a process is known to have failed.
    void check();
    void fail(const char* reason) { job_.mail->leave(Mailbox::State::kFailed, reason); }

  private:
    struct Sum {
        Type type;
        void* values;
        size_t bytes;
    };
    enum Kind : int64_t { kOrder, kPart, kTotal };
    static Label label(Kind kind, int64_t number);
    // Returns what the leader of this place has sent; null if it has not come.
    Mailbox::Found from(size_t place, const Label& label);
    Ranks others() const { return {leaders_.begin() + 1, leaders_.end()}; }

    Tier& job_;
    const Ranks leaders_;
    const size_t carried_from_;
    int64_t rounds_ = 0, begun_ = 0, ended_ = 0;  // announced rounds, and sums
    std::deque<Sum> sums_;
};

// With `mpi`, MPI's library makes the sums.
std::unique_ptr<Machines> machines(Tier& job, Ranks leaders, const Mpi* mpi, size_t carried_from);

}  // namespace syncbn
