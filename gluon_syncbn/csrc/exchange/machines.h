// Sums the totals of machines. One process of each machine, its leader, talks to the other leaders.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "exchange/mailbox.h"
#include "exchange/mpi.h"
#include "types.h"

namespace syncbn {

// Each leader has one, and calls it from one thread. All leaders begin the same operations in the same order, so that
// none waits for another one's next. Each function throws std::exception with the reason. With `mpi`, MPI's library adds.
// Otherwise, the first leader adds, in the order of the leaders, what the others send, and sends them the total. A sum of
// `adds_from` bytes or more is the transport's then: it gets a SumToAdd, for a reader that no rank is, adds in place,
// and delivers that message back.
class Machines {
  public:
    struct SumToAdd {
        int64_t number, size_of_value, count, address;
    };

    // `job`: of all ranks; it knows which have failed.
    Machines(Mailbox& job, Ranks leaders, const Mpi* mpi, size_t adds_from);
    // The leader of the first machine says which round is next.
    bool is_first() const { return leaders_[0] == job_.rank(); }
    void announce(int64_t round, const std::string& text);
    // For the other leaders: what has come, if it has.
    std::optional<std::string> announced(int64_t round);
    // Begins a sum in place.
    void begin(Type type, void* values, size_t count);
    // Whether the oldest sum that has not ended before has ended now.
    bool done();
    // Throws if a process is known to have failed, or, if `end_matters`, to have ended; `exchange` is the name of what
    // this one is in.
    void check(const std::string& exchange, bool end_matters);

  private:
    struct Sum {
        Type type;
        void* values;
        size_t bytes;
        Mpi::Request request = {};
    };
    bool has_ended(Sum& sum);

    Mailbox& job_;
    const Ranks leaders_, others_;  // the others: than the first
    const std::optional<Mpi> mpi_;
    const size_t adds_from_;
    int64_t begun_ = 0, ended_ = 0;
    std::deque<Sum> sums_;  // its elements stay where they are
};

}  // namespace syncbn
