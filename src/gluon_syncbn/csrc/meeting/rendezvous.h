// Threads meet: the replicas of a layer hand in their sums and all leave with the same total.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "meeting/process.h"
#include "pooling/permutation.h"
#include "pooling/statistics.h"
#include "types.h"

namespace syncbn {

// One handing-in: the forward of a meeting is phase 0, its k-th backward is phase k.
struct Phase {
    struct Entry {
        bool arrived = false;
        int64_t channels = 0;
        Type type = Type::kFloat32;
        Vector payload;
    };
    std::vector<Entry> entries;  // [seats]
    size_t arrived = 0;
    bool done = false;
    bool warned = false;  // one of those who wait has said so
    Total total;
};

struct Meeting {
    struct Seat {
        size_t context = 0;              // index into `contexts`
        const void* occupant = nullptr;  // who may not sit down twice
    };
    int64_t number = 0;
    Draw draw;                          // draw.node: only calls of the same node of a graph meet
    std::vector<std::string> contexts;  // those that take part, in the layer's order
    size_t lanes = 1;                   // replicas per context
    bool repeated = false;              // a state of an earlier meeting is executed again (static_shape)
    std::vector<Seat> seats;            // [contexts * lanes] once everybody has joined
    std::map<int, Phase> phases;
    std::condition_variable changed;

    size_t replicas() const { return contexts.size() * lanes; }
    size_t joined(size_t context) const;
    size_t rank(size_t seat) const;  // in the order of the contexts, on one context in that of the seats
    const std::string& replica(size_t seat) const { return contexts[seats[seat].context]; }  // "cpu(1)"
};

// A replica's place in a meeting. Its forward and its backward meet the same partners.
struct Place {
    std::shared_ptr<Meeting> meeting;
    size_t seat = 0;
    int backwards = 0;

    // The one replica of its context that writes the running statistics. Only after the forward has met.
    bool first_lane() const;
};

// The replicas of one SyncBatchNorm, and the meetings that they have not yet all joined.
class Layer {
  public:
    const int64_t id;
    const std::string name;

    const Pooling pooling;

    Layer(int64_t id, std::string name, Pooling pooling) : id(id), name(std::move(name)), pooling(pooling) {}

    // The contexts that hold the parameters, and how many replicas they have in all. Forgets unfinished meetings.
    void configure(std::vector<std::string> contexts, size_t replicas);
    void set_timeout(double seconds);  // 0: as the process says
    double timeout() const;            // the caller holds the process's mutex
    void set_reach(Reach reach);       // kDefault: as the process says
    size_t lanes() const;              // per context; the caller holds the process's mutex
    size_t replicas();
    void restart_calls();    // of the permutations; the caller holds the process's mutex
    void forget_meetings();  // the caller holds the process's mutex

    // The issuing thread announces a call; only messages and the check for a stuck queue use this.
    void issued(const std::string& context);
    // Sits down in the earliest meeting of this graph node in which `context` has room and `occupant` does not sit yet.
    // `repeated` says that MXNet executes a state again.
    Place join(const std::string& context, int64_t node, const void* occupant, bool repeated);
    // Packed moments of one replica in, of all of them out.
    Vector merge_moments(const Place& place, Type type, int64_t channels, Vector moments);
    // Packed sums of one replica's gradient in, of all of them out; once for each backward of the call.
    Vector add_gradients(Place& place, Type type, int64_t channels, Vector sums);
    // The parts of one replica's slots in, those of all replicas in the order of their ranks out. `first` is then the
    // first of this replica.
    Total gather_moments(const Place& place, Type type, int64_t channels, Vector parts);
    Total gather_gradients(Place& place, Type type, int64_t channels, Vector parts);

  private:
    Total meet(const Place& place, int phase, Reduction reduction, Type type, int64_t channels, Vector payload);
    void check_equal(const Meeting& meeting, const Phase& phase, size_t seat, Type type, int64_t channels) const;
    Total wait(Meeting& meeting, Phase& phase, int phase_number, Lock& lock);

    // In reduction.cc: what a meeting makes of what its replicas handed in.
    Total reduce(const Meeting& meeting, int phase, Reduction reduction, Reach reach, Hook hook) const;
    Total gather(const Meeting& meeting, int phase, Reach reach, Hook hook) const;
    Total through(Hook hook, const Meeting& meeting, int phase, Reduction reduction, const Vector& rows,
                  size_t count) const;

    // In diagnosis.cc: who is here, who is not, and why that may be. Where nothing is being computed, waiting
    // longer than `stuck_after` seconds cannot help; 0 means that it can.
    bool all_issued(const Meeting& meeting) const;
    std::string describe(const Meeting& meeting, int phase) const;
    std::string likely_cause(const Meeting& meeting, int phase, double* stuck_after) const;
    std::string why_not_here(const std::string& context) const;

    // All of these belong to the process's mutex.
    std::vector<std::string> contexts_;
    size_t replicas_ = 0, lanes_ = 1;  // lanes_ is 0 where the contexts cannot share the replicas evenly
    double timeout_ = 0;
    Reach reach_ = kDefault;
    int64_t next_meeting_ = 0;
    std::deque<std::shared_ptr<Meeting>> open_;
    std::map<std::string, int64_t> issued_, joined_;
    std::map<int64_t, int64_t> calls_;  // of each node
};

}  // namespace syncbn
