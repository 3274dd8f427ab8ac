// Sums the totals of machines. One process of each machine, its leader, talks to the other leaders.
#pragma once

#include <cstdint>
#include <memory>

#include "exchange/mpi.h"
#include "exchange/python.h"
#include "types.h"

namespace syncbn {

// What comes next: a round, with a digest of its first arrays, each together with those before it. The last digest is of
// all others.
struct Announcement {
    static constexpr size_t kArrays = 511;
    int64_t channel = 0, count = 0;
    int64_t digests[kArrays + 1] = {};
};
constexpr int kAnnouncement = sizeof(Announcement) / sizeof(int64_t);

// Each leader has one, and calls it from one thread. All leaders begin the same operations in the same order, so that
// none waits for another one's next. Each function throws std::runtime_error with the reason.
class Machines {
  public:
    // `mailbox`: of all ranks; it knows which have failed.
    Machines(bool first, Mailbox& mailbox) : first_(first), mailbox_(mailbox) {}
    virtual ~Machines() = default;
    // The leader of the first machine says which round is next.
    bool is_first() const { return first_; }
    virtual void announce(const Announcement& announcement) = 0;
    // For the other leaders: whether that has come.
    virtual bool announced(Announcement* announcement) = 0;
    // Begins a sum in place.
    virtual void begin(Type type, void* values, size_t count) = 0;
    // Whether the oldest sum that has not ended before has ended now.
    virtual bool done() = 0;
    // Throws if another process is known to have failed.
    void check();
    void fail(const char* reason) { mailbox_.leave(Mailbox::State::kFailed, reason); }

  private:
    const bool first_;
    Mailbox& mailbox_;
};

// A leader's functions in Python, which wait. Each returns 0, or 1 with the reason. They must stay as long as the process.
struct MachinesInPython {
    int (*tell)(int64_t* announcement, Problem*);  // the first leader's comes back
    int (*add)(int type, int64_t count, void* values, Problem*);
};

std::unique_ptr<Machines> machines(bool first, Mailbox& mailbox, const MachinesInPython& python);
// MPI's run without the interpreter.
std::unique_ptr<Machines> machines(bool first, Mailbox& mailbox, const Mpi& mpi);

}  // namespace syncbn
