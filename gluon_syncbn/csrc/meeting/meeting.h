// Threads meet: the replicas of a layer hand in their vectors, and all leave with what became of them.
//
//        replica 0          replica 1                      1. join: a seat in the earliest meeting with room
//        join ────┐    ┌──── join                          2. contribute the packed vector
//   contribute ──►│ Meeting │◄── contribute                3. the last to arrive calls the exchange with all of them, in
//        wait     │ phase 0 │    exchange                     the order of the replicas, never in that of arrival
//       total ◄───│         │───► total                    4. all leave with the same total
//                  phase 1, 2 …: the backwards, same seats
//
// A wait ends in one of three ways: the total (4), a failure of any replica of the process (5), or a failure
// that the waiter itself declares: time is up, the process was asked to end, or its queue is stuck (6).
// After a failure nothing is exchanged until `reset`: no total is ever made from a step that is half gone.
//
// A room has one lock, which guards its meetings and all that is in them. Whoever waits gives it up; the exchange (3) runs
// without it, because nobody else touches a phase that is complete. Under it, `Step` may be asked and told of failures.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exchange/choice.h"
#include "meeting/rounds.h"
#include "pooling/permutation.h"
#include "pooling/pooling.h"
#include "types.h"
#include "waiting/step.h"

namespace syncbn {

// What becomes of a batch whose statistics are not finite: nothing special; the running statistics stay; the step ends.
enum class Nonfinite : int { kPropagate = 0, kSkip = 1, kError = 2 };

// What holds for a layer; nobody changes it any more.
struct Terms {
    int64_t layer = 0;
    std::string name;
    std::vector<std::string> contexts;     // that hold the parameters
    std::vector<std::string> taking_part;  // of these, in the same order
    std::vector<std::string> devices;      // that alone may take part; empty means all
    size_t replicas = 0, lanes = 1;        // lanes: replicas per context; 0 where the contexts cannot share them evenly
    uint64_t seed = 0;                     // of the permutations
    double timeout = 300;                  // seconds
    Sharing sharing = Sharing::kNothing;
    std::shared_ptr<Choice> choice;  // of the exchange
    Nonfinite nonfinite = Nonfinite::kPropagate;
};

// What one replica contributes.
struct Part {
    Type type;
    int64_t channels;
    Vector values;  // packed, [slots][...]; of what stays on a GPU, the samples of each slot
    std::shared_ptr<const cuda::OnDevice> device = nullptr;  // that; whatever it points to lives as long
};

// One exchange: the forward of a meeting is phase 0, its k-th backward is phase k.
struct Phase {
    struct Entry : Part {
        bool arrived = false;
        double at = 0;  // seconds on some clock; 0 where nobody wants to know
    };
    std::vector<Entry> entries;  // [seats]
    size_t arrived = 0;
    std::vector<Vector> made;            // of the vectors of several replicas, for the exchange
    std::unique_ptr<Underway> underway;  // of the exchange; whoever came last brings it to its end
    size_t last = 0;                     // the seat of that one
    size_t stride = 0;                   // of a replica's numbers in the total; 0 where that is the same for all
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
    std::string layer;                  // its name
    Draw draw;                          // draw.node: only calls of the same node of a graph meet
    std::vector<std::string> contexts;  // those that take part, in the layer's order
    size_t lanes = 1;                   // replicas per context
    std::shared_ptr<Choice> choice;     // as it was when the first of them came: all have the same exchange
    const int64_t step = syncbn::step().number;
    std::shared_ptr<const Failure> failure;  // of its own, where its step has been forgotten
    bool repeated = false;                   // a state of an earlier meeting is executed again (static_shape)
    std::vector<Seat> seats;                 // [contexts * lanes] once everybody has joined
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

    // The one replica of its context that hands its statistics on. Only after the forward has met.
    bool first_lane() const;
};

// Calls of a layer on each context: those that were issued and those that have joined. For messages, and to see that a
// queue is stuck.
struct Attendance {
    std::map<std::string, int64_t> issued, joined;
};

enum class Direction { kForward, kBackward };

// Where the replicas of one layer meet: the meetings that they have not yet all joined.
class MeetingRoom {
  public:
    // The issuing thread announces a call. Throws Failure where the layer is in the middle of a step of another thread.
    void issued(const Terms& terms, const std::string& context, int64_t node);
    // So it does for a graph whose calls MXNet executes again without announcing them; `graph` is a number below -1.
    void issued_again(const Terms& terms, const std::string& context, int64_t graph);
    // Sits down in the earliest meeting of this graph node in which `context` has room and `occupant` does not sit yet.
    // `repeated` says that MXNet executes a state again.
    Place join(const Terms& terms, const std::string& context, int64_t node, const void* occupant, bool repeated);
    // That of the meeting. GPUs may wait here for other processes, as `Choice` says.
    Exchange& exchange(const Terms& terms, const Place& place, Direction direction) const;
    // Once for the forward of a call, and once for each of its backwards. Waits for no replica, and returns whether all have
    // come. The last of them calls the exchange.
    bool contribute(const Terms& terms, Place& place, Direction direction, Part part);
    // Waits for that, and for other processes, so long at most; whether they have. Nobody who is missing is a failure here.
    bool comes_within(const Terms& terms, const Place& place, Direction direction, double seconds) const;
    // What all have contributed, once they have come: put together, or side by side in the order of their ranks, where
    // `first` is then the first of this replica.
    Total total(const Terms& terms, const Place& place, Direction direction) const;
    // What is on its way on the devices takes long: throws where another process has failed.
    void check(const Terms& terms, const Place& place, Direction direction) const;
    // A replica of it has failed: the step has, or, if that has been forgotten, the meeting alone.
    void fail(Meeting& meeting, const Failure& failure) const;
    void forget();         // all meetings
    void restart_calls();  // of the permutations
    void forked();         // in the child

  private:
    using Lock = std::unique_lock<std::mutex>;
    // For whoever came last: makes the total, or does if it comes within so many seconds.
    void finish(const Terms& terms, Meeting& meeting, Phase& phase, int number) const;
    bool comes_within(const Terms& terms, Meeting& meeting, Phase& phase, int number, double seconds) const;
    // What it throws becomes the failure of the step.
    template <typename Work>
    void attempt(const Terms& terms, Meeting& meeting, const Work& work) const;

    mutable std::mutex mutex_;
    int64_t next_meeting_ = 0;
    std::deque<std::shared_ptr<Meeting>> open_;
    Attendance attendance_;
    Rounds rounds_;                     // where each context has one replica that shares statistics
    std::map<int64_t, int64_t> calls_;  // of each node
};

}  // namespace syncbn
