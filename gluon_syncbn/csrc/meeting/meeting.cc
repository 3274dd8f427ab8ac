#include "meeting/meeting.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <sstream>
#include <stdexcept>

#include "clock.h"
#include "log.h"
#include "meeting/diagnosis.h"
#include "meeting/timing.h"
#include "point.h"
#include "waiting/stall.h"
#include "waiting/step.h"
#include "waiting/wait.h"

namespace syncbn {
namespace {

const char* const kForgotten =
    "the step has been forgotten (gluon_syncbn.reset, or another thread's step that began after a failure) before all "
    "replicas had come.";
constexpr double kWatchAfter = 0.05;  // seconds until a wait counts as long enough to look around
constexpr double kGrace = 2;          // seconds that an exchange gets to report its own failure
constexpr double kStuckIdle = 3;      // seconds without computing that show it
constexpr double kForkIdle = 1;       // the same, where a fork waits

// Ends the step, and throws the reason why it ended, which may be another one.
[[noreturn]] void fail_and_throw(const Failure& failure) {
    step().fail(failure);
    throw Failure(*step().failure());
}

// So does one whose step has been forgotten, but the step that goes on now has nothing to do with it.
void fail_here(Meeting& meeting, const Failure& failure) {
    if (step().goes_on(meeting.step))
        step().fail(failure);
    else if (meeting.failure == nullptr)
        meeting.failure = std::make_shared<const Failure>(failure);
    meeting.changed.notify_all();
}

std::shared_ptr<const Failure> failure_of(const Meeting& meeting) {
    return meeting.failure != nullptr ? meeting.failure : step().failure();
}

[[noreturn]] void fail_and_throw(Meeting& meeting, const Failure& failure) {
    fail_here(meeting, failure);
    throw Failure(*failure_of(meeting));
}

void throw_if_failed(const Meeting& meeting) {
    if (const auto failure = failure_of(meeting)) throw Failure(*failure);
}

std::string name_of_call(const Meeting& meeting, int phase) {
    return (phase == 0 ? "forward of call " : "backward of call ") + std::to_string(meeting.number + 1);
}

// That which this replica has come to last.
int phase_of(const Place& place, Direction direction) { return direction == Direction::kForward ? 0 : place.backwards; }

Ticket ticket_of(const Terms& terms, const Place& place, Direction direction) {
    const Draw& draw = place.meeting->draw;
    return {terms.layer, draw.node, draw.call, phase_of(place, direction), terms.name.c_str(), terms.timeout};
}

void check_equal(const Terms& terms, Meeting& meeting, const Phase& phase, size_t seat, Type type, int64_t channels) {
    for (size_t other = 0; other < meeting.seats.size(); ++other) {
        const auto& entry = phase.entries[other];
        if (!entry.arrived || (entry.channels == channels && entry.type == type)) continue;
        std::ostringstream why;
        why << meeting.replica(seat) << " came with " << channels << " channels of " << name_of(type) << ", "
            << meeting.replica(other) << " with " << entry.channels << " channels of " << name_of(entry.type)
            << ". All replicas must run the same net on data of the same type.";
        fail_and_throw(meeting, {terms.name, "", "", why.str()});
    }
}

// What the replicas of this process contribute, with the room of what was made of their vectors for it.
struct Rows {
    Contribution contribution;
    std::vector<Vector> made;
};

// One row of all vectors, in the order of the replicas.
Rows side_by_side(const Meeting& meeting, const Phase& phase) {
    const size_t length = phase.entries[0].values.size();
    Rows rows;
    rows.made.emplace_back(meeting.replicas() * length);
    for (size_t seat = 0; seat < meeting.replicas(); ++seat) {
        const Vector& own = phase.entries[seat].values;
        std::copy(own.begin(), own.end(), rows.made[0].begin() + static_cast<int64_t>(meeting.rank(seat) * length));
    }
    rows.contribution = {{rows.made[0].data()}, rows.made[0].size()};
    return rows;
}

// One row for each context, in their order and never in that of arrival: so the bits of the result do not depend on who came
// first. The calls of one context's replicas have no order, so their vectors decide it.
Rows row_of_each_context(const Meeting& meeting, const Phase& phase, Combine combine) {
    const size_t length = phase.entries[0].values.size();
    std::vector<std::vector<const double*>> parts(meeting.contexts.size());
    for (size_t seat = 0; seat < meeting.replicas(); ++seat)
        parts[meeting.seats[seat].context].push_back(phase.entries[seat].values.data());
    Rows rows;
    rows.contribution.length = length;
    for (auto& of_context : parts) {
        if (of_context.size() == 1) {
            rows.contribution.rows.push_back(of_context[0]);
            continue;
        }
        std::sort(of_context.begin(), of_context.end(),
                  [&](const double* a, const double* b) { return std::memcmp(a, b, length * sizeof(double)) < 0; });
        rows.made.emplace_back(length, 0.0);
        for (const double* part : of_context) put(combine, rows.made.back().data(), part, length);
        rows.contribution.rows.push_back(rows.made.back().data());  // a vector keeps its place when it is moved
    }
    return rows;
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

void MeetingRoom::issued(const Terms& terms, const std::string& context, int64_t node) {
    const auto& scope = current_scope();
    scope->throw_if_ended();
    Lock lock(mutex_);
    if (terms.lanes == 1 && !within_graph()) rounds_.add(terms, context, node, scope);
    ++attendance_.issued[context];
}

void MeetingRoom::issued_again(const Terms& terms, const std::string& context, int64_t graph) {
    const auto& scope = current_scope();
    scope->throw_if_ended();
    Lock lock(mutex_);
    if (terms.lanes == 1) rounds_.add(terms, context, graph, scope);
}

Place MeetingRoom::join(const Terms& terms, const std::string& context, int64_t node, const void* occupant,
                        bool repeated) {  // (1)
    Lock lock(mutex_);
    step().throw_if_failed();
    ++attendance_.joined[context];
    const auto index_among = [&](const std::vector<std::string>& contexts) {
        return static_cast<size_t>(std::find(contexts.begin(), contexts.end(), context) - contexts.begin());
    };
    if (index_among(terms.taking_part) == terms.taking_part.size() || terms.lanes == 0)
        fail_and_throw({terms.name, context, "", why_not_here(terms, context)});

    std::shared_ptr<Meeting> meeting;
    for (const auto& m : open_) {
        const size_t index = index_among(m->contexts);  // other contexts may have taken part when it began
        if (index == m->contexts.size()) continue;
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
        meeting->draw = {terms.seed, terms.layer, node, calls_[node]++};
        meeting->contexts = terms.taking_part;
        meeting->lanes = terms.lanes;
        meeting->exchange = terms.exchange;
        open_.push_back(meeting);
    }
    meeting->seats.push_back({index_among(meeting->contexts), occupant});
    meeting->repeated = meeting->repeated || repeated;
    Place place{meeting, meeting->seats.size() - 1};
    if (meeting->seats.size() == meeting->replicas()) open_.erase(std::find(open_.begin(), open_.end(), meeting));
    return place;
}

bool MeetingRoom::hand_in(const Terms& terms, Place& place, Direction direction, Sharing sharing, Type type,
                          int64_t channels, Vector values) {
    const Combine combine = direction == Direction::kForward ? Combine::kMerge : Combine::kAdd;
    SYNCBN_POINT("before_hand_in");
    const bool complete = hand_in(terms, place, direction, {true, channels, type, std::move(values), nullptr},
                                  [&](const Meeting& meeting, const Phase& phase, const Ticket& ticket) {
                                      const Rows rows = sharing == Sharing::kEach
                                                            ? side_by_side(meeting, phase)
                                                            : row_of_each_context(meeting, phase, combine);
                                      if (sharing == Sharing::kEach)
                                          return meeting.exchange->allgather(ticket, rows.contribution);
                                      return meeting.exchange->allreduce(combine, ticket, rows.contribution);
                                  });
    SYNCBN_POINT("after_hand_in");
    return complete;
}

Total MeetingRoom::collect(const Terms& terms, const Place& place, Direction direction, Sharing sharing,
                           size_t length) const {
    SYNCBN_POINT("before_total");
    Total total = collect(terms, place, direction);
    SYNCBN_POINT("after_total");
    if (sharing == Sharing::kEach) total.first += place.meeting->rank(place.seat) * length;
    return total;
}

Total MeetingRoom::share(const Terms& terms, Place& place, Direction direction, Type type, int64_t channels,
                         Vector counts, std::shared_ptr<const OnDevice> device, const Collective& collective) {
    const size_t length = counts.size();
    SYNCBN_POINT("before_hand_in");
    hand_in(terms, place, direction, {true, channels, type, std::move(counts), std::move(device)},
            [&](const Meeting& meeting, const Phase& phase, const Ticket& ticket) {
                const size_t replicas = meeting.replicas();
                std::vector<OnDevice> parts(replicas);
                Vector all(replicas * length);
                for (size_t seat = 0; seat < replicas; ++seat) {
                    const size_t rank = meeting.rank(seat);
                    const Vector& own = phase.entries[seat].values;
                    parts[rank] = *phase.entries[seat].device;
                    std::copy(own.begin(), own.end(), all.begin() + static_cast<int64_t>(rank * length));
                }
                return collective(parts, std::move(all), ticket);
            });
    SYNCBN_POINT("before_total");
    Total total = collect(terms, place, direction);
    SYNCBN_POINT("after_total");
    total.first += place.meeting->rank(place.seat) * length;
    return total;
}

int64_t MeetingRoom::spread(const Terms& terms, const Place& place, Direction direction) const {
    Meeting& meeting = *place.meeting;
    std::lock_guard<std::mutex> lock(meeting.deciding);
    if (meeting.spread < 0) {
        if (terms.spread < 0)
            terms.spread = meeting.exchange->gpus_of_all_processes(ticket_of(terms, place, direction));
        meeting.spread = terms.spread;
    }
    return meeting.spread;
}

void MeetingRoom::fail(Meeting& meeting, const Failure& failure) const {
    Lock lock(mutex_);
    fail_here(meeting, failure);
}

void MeetingRoom::look_out(const Terms& terms, const Place& place, Direction direction) const {
    place.meeting->exchange->check(ticket_of(terms, place, direction));
}

bool MeetingRoom::hand_in(const Terms& terms, Place& place, Direction direction, Phase::Entry entry,
                          const Finish& finish) {
    Meeting& meeting = *place.meeting;
    if (direction == Direction::kBackward) ++place.backwards;
    const int number = phase_of(place, direction);
    Lock lock(mutex_);
    throw_if_failed(meeting);
    Phase& phase = meeting.phases[number];
    if (phase.entries.empty()) phase.entries.resize(meeting.replicas());
    check_equal(terms, meeting, phase, place.seat, entry.type, entry.channels);
    if (debugging()) entry.at = seconds();
    phase.entries[place.seat] = std::move(entry);  // (2)
    if (++phase.arrived < meeting.replicas()) return false;
    const Ticket ticket = ticket_of(terms, place, direction);
    lock.unlock();  // nobody else touches a phase that is complete
    std::string error;
    Total total;
    try {
        SYNCBN_POINT("before_reduce");
        total = finish(meeting, phase, ticket);  // (3)
        SYNCBN_POINT("after_reduce");
    } catch (const std::exception& e) {
        error = e.what();
    }
    lock.lock();
    if (!error.empty()) fail_and_throw(meeting, {terms.name, "", "", error});
    throw_if_failed(meeting);
    if (debugging()) record_meeting(terms.name, name_of_call(meeting, number), meeting, phase);
    phase.total = std::move(total);
    phase.done = true;
    phase.entries.clear();
    meeting.changed.notify_all();
    return true;
}

Total MeetingRoom::collect(const Terms& terms, const Place& place, Direction direction) const {
    const int number = phase_of(place, direction);
    Lock lock(mutex_);
    Phase& phase = place.meeting->phases[number];
    if (!phase.done) wait(terms, *place.meeting, phase, number, lock);
    return phase.total;  // (4)
}

bool MeetingRoom::comes_within(const Place& place, Direction direction, double seconds) const {
    Lock lock(mutex_);
    const Phase& phase = place.meeting->phases[phase_of(place, direction)];
    place.meeting->changed.wait_for(lock, std::chrono::duration<double>(seconds),
                                    [&] { return phase.done || failure_of(*place.meeting) != nullptr; });
    return phase.done;
}

void MeetingRoom::wait(const Terms& terms, Meeting& meeting, Phase& phase, int number, Lock& lock) const {
    Stall stall;
    std::string seen;
    double seen_since = 0, complete_since = -1;
    const std::string call = name_of_call(meeting, number);
    while (true) {
        meeting.changed.wait_for(lock, kSlice);
        if (phase.done) return;                          // (4)
        if (const auto failure = failure_of(meeting)) {  // (5)
            if (!failure->layer.empty()) throw Failure(*failure);
            throw Failure(terms.name, "", call, describe(meeting, number) + ". " + failure->reason);
        }
        stall.sample();
        const double waited = stall.waited();
        if (waited < kWatchAfter) continue;
        const auto give_up = [&](const std::string& why) {
            fail_and_throw(meeting, {terms.name, "", call, describe(meeting, number) + why});
        };
        watch_interrupts();
        if (stall.asked_to_end())  // (6)
            give_up(". The process was asked to end (Ctrl-C, or its main thread is gone) while they waited.");
        if (phase.arrived == meeting.replicas()) {  // the last to arrive makes the total, with a time limit of its own
            if (complete_since < 0) complete_since = waited;
            if (waited - complete_since < terms.timeout + kGrace) continue;
            give_up(". The KVStore has not answered for " + std::to_string(static_cast<int>(terms.timeout + kGrace)) +
                    " s.");
        }
        const Cause cause = likely_cause(meeting, number, attendance_);
        const std::string here = describe(meeting, number) + cause.text;
        if (seen != here) {  // whoever was called just now is on the way
            seen = here;
            seen_since = waited;
        }
        std::ostringstream after;
        const bool nobody_comes = !meeting.repeated && !all_issued(meeting, attendance_);
        if (step().forking && (nobody_comes || stall.idle_for(kForkIdle))) {
            give_up(
                ", and the process was forked (os.fork, multiprocessing, subprocess with preexec_fn) before they were "
                "called. A fork has to wait for everything that MXNet has in flight: fork before a step or after it, "
                "not between the calls of its replicas.");
        } else if (step().waiting && (nobody_comes || (meeting.repeated && stall.idle_for(kStuckIdle)))) {
            give_up(
                ", and the thread that should call them waits for everything that MXNet has in flight "
                "(mxnet.nd.waitall, which gluon.data.DataLoader calls as it is made). Wait, and make a DataLoader, "
                "before a step or after it, not between the calls of its replicas.");
        } else if (cause.stuck_after > 0 && waited - seen_since >= cause.stuck_after && stall.idle_for(kStuckIdle)) {
            after << ", and nothing has been computed for " << kStuckIdle << " s. " << cause.text;
            give_up(after.str());
        } else if (waited >= terms.timeout) {
            after << " after " << terms.timeout << " s. " << cause.text;
            give_up(after.str());
        } else if (waited >= kWarnAfter && !phase.warned) {
            phase.warned = true;
            after << " after " << static_cast<int>(waited) << " s; still waiting, until " << terms.timeout << " s. "
                  << cause.text;
            log(Level::kWarning, Failure(terms.name, "", call, describe(meeting, number) + after.str()).what());
        }
    }
}

void MeetingRoom::forget() {
    Lock lock(mutex_);
    for (const auto& meeting : open_)
        if (!step().goes_on(meeting->step)) fail_here(*meeting, Failure(kForgotten));
    open_.clear();
    attendance_ = {};
    rounds_.forget();
}

void MeetingRoom::restart_calls() {
    Lock lock(mutex_);
    calls_.clear();
}

void MeetingRoom::forked() {
    new (&mutex_) std::mutex;  // another thread, which is not here, may have held it
    rounds_.forked();
    forget();
}

}  // namespace syncbn
