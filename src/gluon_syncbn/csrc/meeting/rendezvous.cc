// Threads meet.
//
//        replica 0          replica 1                      1. join: a seat in the earliest meeting with room
//        join ────┐    ┌──── join                          2. hand in the packed sums
//      hand in ──►│ Meeting │◄── hand in                   3. the last to arrive adds them up, in the order of
//        wait     │ phase 0 │    reduce                       the replicas, never in the order of arrival
//        leave ◄──│         │──► leave                     4. all leave with the same total
//                  phase 1, 2 …: the backwards, same seats
//
// A wait ends in one of three ways: the total (4), a failure of any replica of the process (5), or a failure
// that the waiter itself declares: time is up, the process was asked to end, or its queue is stuck (6).
// After a failure nothing is exchanged until `reset`: no total is ever made from a step that is half gone.
#include "meeting/rendezvous.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <sstream>

#include "meeting/stall.h"

namespace syncbn {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);
constexpr double kWatchAfter = 0.05;  // seconds until a wait counts as long enough to look around
constexpr double kWarnAfter = 10;
constexpr double kGrace = 2;      // seconds that an exchange gets to report its own failure
constexpr double kStuckIdle = 3;  // seconds without computing that show it
constexpr double kForkIdle = 1;   // the same, where a fork waits

[[noreturn]] void fail_and_throw(Meeting& meeting, const std::string& reason) {
    process().fail(reason);
    meeting.changed.notify_all();
    throw Failure(process().failure);
}

void throw_if_failed() {
    if (!process().failure.empty()) throw Failure(process().failure);  // (5)
}

}  // namespace

size_t Meeting::joined(size_t context) const {
    return static_cast<size_t>(
        std::count_if(seats.begin(), seats.end(), [&](const Seat& s) { return s.context == context; }));
}

size_t Meeting::rank(size_t seat) const {
    size_t before = 0;
    for (size_t i = 0; i < seats.size(); ++i)
        before += seats[i].context < seats[seat].context || (seats[i].context == seats[seat].context && i < seat);
    return before;
}

bool Place::first_lane() const {
    for (size_t i = 0; i < seat; ++i)
        if (meeting->seats[i].context == meeting->seats[seat].context) return false;
    return true;
}

Place Layer::join(const std::string& context, int64_t node, const void* occupant, bool repeated) {  // (1)
    Lock lock(process().mutex);
    throw_if_failed();
    ++joined_[context];

    const auto& devices = process().devices;
    std::vector<std::string> taking_part;
    for (const auto& c : contexts_)
        if (devices.empty() || std::find(devices.begin(), devices.end(), c) != devices.end()) taking_part.push_back(c);
    const auto at = std::find(taking_part.begin(), taking_part.end(), context);
    if (at == taking_part.end() || lanes_ == 0) {
        process().fail(why_not_here(context));
        throw_if_failed();
    }
    const size_t index = static_cast<size_t>(at - taking_part.begin());

    std::shared_ptr<Meeting> meeting;
    for (const auto& m : open_) {
        const bool sits = occupant != nullptr && std::any_of(m->seats.begin(), m->seats.end(), [&](const auto& s) {
                              return s.context == index && s.occupant == occupant;
                          });
        if (m->draw.node == node && !sits && m->joined(index) < m->lanes) {
            meeting = m;
            break;
        }
    }
    if (!meeting) {
        meeting = std::make_shared<Meeting>();
        meeting->number = next_meeting_++;
        meeting->draw = {process().seed, id, node, calls_[node]++};
        meeting->contexts = taking_part;
        meeting->lanes = lanes_;
        open_.push_back(meeting);
    }
    meeting->seats.push_back({index, occupant});
    meeting->repeated = meeting->repeated || repeated;
    Place place{meeting, meeting->seats.size() - 1};
    if (meeting->seats.size() == meeting->replicas()) open_.erase(std::find(open_.begin(), open_.end(), meeting));
    return place;
}

Vector Layer::merge_moments(const Place& place, Type type, int64_t channels, Vector moments) {
    Vector total = meet(place, 0, Reduction::kMerge, type, channels, std::move(moments)).values;
    if (total[0] > 0) return total;
    const std::string why = "SyncBatchNorm '" + name + "': the batches of all replicas are empty, so there is no mean.";
    fail(why);
    throw Failure(why);
}

Vector Layer::add_gradients(Place& place, Type type, int64_t channels, Vector sums) {
    return meet(place, ++place.backwards, Reduction::kAdd, type, channels, std::move(sums)).values;
}

Total Layer::gather_moments(const Place& place, Type type, int64_t channels, Vector parts) {
    const size_t length = parts.size();
    Total total = meet(place, 0, Reduction::kGather, type, channels, std::move(parts));
    total.first += place.meeting->rank(place.seat) * length;  // everybody has sat down by now
    return total;
}

Total Layer::gather_gradients(Place& place, Type type, int64_t channels, Vector parts) {
    const size_t length = parts.size();
    Total total = meet(place, ++place.backwards, Reduction::kGather, type, channels, std::move(parts));
    total.first += place.meeting->rank(place.seat) * length;  // everybody has sat down by now
    return total;
}

Total Layer::meet(const Place& place, int phase_number, Reduction reduction, Type type, int64_t channels,
                  Vector payload) {
    Meeting& meeting = *place.meeting;
    Lock lock(process().mutex);
    throw_if_failed();
    Phase& phase = meeting.phases[phase_number];
    if (phase.entries.empty()) phase.entries.resize(meeting.replicas());
    check_equal(meeting, phase, place.seat, type, channels);
    phase.entries[place.seat] = {true, channels, type, std::move(payload)};  // (2)
    if (++phase.arrived < meeting.replicas()) return wait(meeting, phase, phase_number, lock);

    const Reach reach = reach_ == kDefault ? process().reach : reach_;
    const Hook hook = process().hook;
    lock.unlock();  // nobody else touches a phase that is complete
    Total total;
    std::string error;
    try {
        total = reduce(meeting, phase_number, reduction, reach, hook);  // (3)
    } catch (const std::exception& e) {
        error = e.what();
    }
    lock.lock();
    if (!error.empty()) fail_and_throw(meeting, error);
    throw_if_failed();
    phase.total = std::move(total);
    phase.done = true;
    phase.entries.clear();
    meeting.changed.notify_all();
    return phase.total;  // (4)
}

void Layer::check_equal(const Meeting& meeting, const Phase& phase, size_t seat, Type type, int64_t channels) const {
    for (size_t other = 0; other < meeting.seats.size(); ++other) {
        const auto& entry = phase.entries[other];
        if (!entry.arrived || (entry.channels == channels && entry.type == type)) continue;
        std::ostringstream why;
        why << "SyncBatchNorm '" << name << "': " << meeting.replica(seat) << " came with " << channels
            << " channels of " << name_of(type) << ", " << meeting.replica(other) << " with " << entry.channels
            << " channels of " << name_of(entry.type)
            << ". All replicas must run the same net on data of the same type.";
        process().fail(why.str());
        throw_if_failed();  // the waiters see it within a slice
    }
}

Total Layer::wait(Meeting& meeting, Phase& phase, int phase_number, Lock& lock) {
    const double limit = timeout();
    Stall stall;
    std::string seen;
    double seen_since = 0, complete_since = -1;
    while (true) {
        meeting.changed.wait_for(lock, kSlice);
        if (phase.done) return phase.total;  // (4)
        const std::string& failure = process().failure;
        if (!failure.empty())  // (5)
            throw Failure(failure + (names_layer(failure) ? "" : " " + describe(meeting, phase_number) + "."));
        stall.sample();
        const double waited = stall.waited();
        if (waited < kWatchAfter) continue;
        if (phase.arrived == meeting.replicas()) {  // the last to arrive makes the total, with a time limit of its own
            if (complete_since < 0) complete_since = waited;
            if (waited - complete_since < limit + kGrace) continue;
            fail_and_throw(meeting, describe(meeting, phase_number) + ". The KVStore has not answered for " +
                                        std::to_string(static_cast<int>(limit + kGrace)) + " s.");
        }
        watch_interrupts();
        std::ostringstream why;
        double stuck_after = 0;
        const std::string cause = likely_cause(meeting, phase_number, &stuck_after);
        const std::string who = describe(meeting, phase_number);
        if (seen != who + cause) {  // whoever was called just now is on the way
            seen = who + cause;
            seen_since = waited;
        }
        if (stall.asked_to_end()) {  // (6)
            why << who << ". The process was asked to end (Ctrl-C, or its main thread is gone) while they waited.";
        } else if (process().forking && ((!meeting.repeated && !all_issued(meeting)) || stall.idle_for(kForkIdle))) {
            why << who
                << ", and the process was forked (os.fork, multiprocessing, subprocess with preexec_fn) before they "
                   "were called. A fork has to wait for everything that MXNet has in flight: fork before a step or "
                   "after it, not between the calls of its replicas.";
        } else if (stuck_after > 0 && waited - seen_since >= stuck_after && stall.idle_for(kStuckIdle)) {
            why << who << ", and nothing has been computed for " << kStuckIdle << " s. " << cause;
        } else if (waited >= limit) {
            why << who << " after " << limit << " s. " << cause;
        } else {
            if (waited >= kWarnAfter && !phase.warned) {
                phase.warned = true;
                std::fprintf(stderr, "gluon_syncbn: %s after %.0f s; still waiting, until %.0f s. %s\n", who.c_str(),
                             waited, limit, cause.c_str());
            }
            continue;
        }
        fail_and_throw(meeting, why.str());
    }
}

// ---- settings ----------------------------------------------------------------------------------------------

void Layer::configure(std::vector<std::string> contexts, size_t replicas) {
    Lock lock(process().mutex);
    contexts_ = std::move(contexts);
    replicas_ = replicas;
    lanes_ = contexts_.empty() || replicas % contexts_.size() != 0 ? 0 : replicas / contexts_.size();
    forget_meetings();
}

void Layer::set_timeout(double seconds) {
    Lock lock(process().mutex);
    timeout_ = seconds;
}

double Layer::timeout() const { return timeout_ > 0 ? timeout_ : process().timeout; }

void Layer::set_reach(Reach reach) {
    Lock lock(process().mutex);
    reach_ = reach;
}

size_t Layer::lanes() const { return std::max<size_t>(1, lanes_); }

size_t Layer::replicas() {
    Lock lock(process().mutex);
    return std::max<size_t>(1, replicas_);
}

void Layer::restart_calls() { calls_.clear(); }

void Layer::issued(const std::string& context) {
    Lock lock(process().mutex);
    ++issued_[context];
}

void Layer::forget_meetings() {
    open_.clear();
    issued_.clear();
    joined_.clear();
}

}  // namespace syncbn
