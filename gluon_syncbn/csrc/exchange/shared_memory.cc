#include "exchange/shared_memory.h"

#include <sched.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>

#include "clock.h"
#include "failure.h"
#include "log.h"
#include "point.h"
#include "waiting/stall.h"
#include "waiting/step.h"
#include "waiting/wait.h"

namespace syncbn {
namespace {

constexpr double kSleep = std::chrono::duration<double>(kSlice).count();
constexpr double kSpin = 5e-4, kTaken = 2e-4;  // seconds
constexpr double kSkippedAfter = 0.5;
constexpr size_t kMostPieces = 16;  // of a vector; a longer one goes by the transport

size_t pieces_of(size_t length) {
    return std::max<size_t>(1, (length + Segment::kMostValues - 1) / Segment::kMostValues);
}

std::string what(int64_t call, int64_t phase, const std::string& layer) {
    return std::string("the ") + (phase == 0 ? "forward" : "backward") + " of call " + std::to_string(call + 1) +
           " of SyncBatchNorm '" + layer + "'";
}

std::string what(const Ticket& ticket) { return what(ticket.call, ticket.phase, ticket.name); }

// The names of layers by their keys, for messages.
class Names {
  public:
    void add(int64_t key, const char* name) {
        std::lock_guard<std::mutex> lock(mutex_);
        names_[key] = name;
    }
    std::string of(int64_t key) const {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto found = names_.find(key);
        return found == names_.end() ? "number " + std::to_string(key + 1) : found->second;
    }

  private:
    mutable std::mutex mutex_;  // guards the names
    std::map<int64_t, std::string> names_;
};

std::string ranks_of(const std::vector<size_t>& ranks) {
    std::string text;
    for (size_t rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
    return text;
}

}  // namespace

struct SharedMemory::State {
    std::mutex posting;                // guards the outboxes of this rank
    std::mutex learning;               // guards the next one, and is held while the transport asks the other processes
    std::map<int64_t, Agreed> agreed;  // by layer
    Names names;
};

namespace {

// One wait for the vectors of all ranks under one label.
class Collecting {
  public:
    Collecting(Segment& segment, const Names& names, const Ticket& ticket, const Label& label)
        : segment_(segment),
          names_(names),
          ticket_(ticket),
          label_(label),
          interrupts_(interrupts()),
          began_(seconds()) {}

    // [ranks], that of this rank empty.
    std::vector<Segment::Found> all() {
        const uint32_t ring = segment_.ring_of(label_);
        std::vector<Segment::Found> found(segment_.ranks());
        bool slept = false;
        while (true) {
            const uint32_t heard = segment_.heard(ring);
            missing_.clear();
            for (size_t rank = 0; rank < found.size(); ++rank) {
                if (rank == segment_.rank() || found[rank].values != nullptr) continue;
                found[rank] = segment_.find(rank, label_);
                if (found[rank].values == nullptr) missing_.push_back(rank);
            }
            if (missing_.empty()) break;
            look_at_members();
            if (spins(ring, heard)) continue;
            slept = true;
            segment_.sleep(ring, heard, kSleep);
            if (seconds() - began_ > kSleep) look_around();
        }
        if (!slept) segment_.wake(ring);  // the last to come finds all vectors at once
        return found;
    }
    [[noreturn]] void give_up(const std::string& reason) {
        segment_.leave(Segment::State::kFailed, reason);
        throw Failure(reason);
    }

  private:
    std::string rank() const {
        return "rank " + std::to_string(segment_.rank()) + " of " + std::to_string(segment_.ranks());
    }
    // Looks for a moment, and lets others run meanwhile, whether something was posted: to be woken takes longer. Where
    // others do run, this thread may come back late, so that it sleeps from then on.
    bool spins(uint32_t ring, uint32_t heard) {
        for (double now = seconds(); now - began_ < kSpin && !yielded_;) {
            sched_yield();
            if (segment_.heard(ring) != heard) return true;
            const double then = now;
            now = seconds();
            yielded_ = now - then > kTaken;
        }
        return false;
    }
    // What is known of the other processes without asking anybody.
    void look_at_members() {
        if (segment_.state_of(segment_.rank()) != Segment::State::kPresent)
            throw Failure("in " + what(ticket_) + ", " + rank() + ": " + segment_.reason_of(segment_.rank()));
        for (size_t missing : missing_) {
            const Segment::State state = segment_.state_of(missing);
            if (state == Segment::State::kPresent || state == Segment::State::kAbsent) continue;
            if (segment_.find(missing, label_).values != nullptr) continue;  // it came before that
            std::string fate = "has ended";
            if (state == Segment::State::kFailed) fate = "has failed: " + segment_.reason_of(missing);
            gone(missing, fate);
        }
    }
    [[noreturn]] void gone(size_t other, const std::string& fate) {
        give_up("rank " + std::to_string(other) + " of " + std::to_string(segment_.ranks()) + " " + fate + " (rank " +
                std::to_string(segment_.rank()) + " was in " + what(ticket_) + ")");
    }
    void look_around() {
        if (!stall_) stall_.emplace(interrupts_);
        watch_interrupts();
        stall_->sample();
        if (const auto failure = step().failure()) give_up(failure->what());
        if (stall_->asked_to_end())
            give_up(rank() + " was asked to end, or its step failed, in " + what(ticket_) + ".");
        for (size_t missing : missing_)
            if (segment_.has_died(missing) && segment_.find(missing, label_).values == nullptr)
                gone(missing, "has ended without a word (process " + std::to_string(segment_.process_of(missing)) +
                                  "; was it killed?)");
        std::string others;
        for (size_t missing : missing_)
            for (const Label& left : segment_.left_by(missing, uint64_t{1} << segment_.rank())) {
                if (left.piece != 0) continue;
                const bool other_call =
                    left.key == label_.key && left.node == label_.node && left.phase == 0 && left.call != label_.call;
                if (other_call && label_.phase == 0 && stall_->waited() > kSkippedAfter && !is_here(left))
                    give_up("rank " + std::to_string(segment_.rank()) + " is in " + what(ticket_) + ", but rank " +
                            std::to_string(missing) + " is in number " + std::to_string(left.call + 1) +
                            ": one of them has skipped or repeated a step.");
                others =
                    "rank " + std::to_string(missing) + " is in " + what(left.call, left.phase, names_.of(left.key));
            }
        const double waited = stall_->waited();
        const std::string waits = rank() + " waits for rank " + ranks_of(missing_) + " in " + what(ticket_) + " after ";
        if (waited > ticket_.timeout) {
            std::ostringstream text;
            text << waits << static_cast<int>(ticket_.timeout)
                 << " s. A process that is missing has ended, hangs, or makes other calls: every process must run the "
                    "same number of steps with the same net.";
            if (!others.empty()) text << " Meanwhile " << others << ".";
            give_up(text.str());
        }
        if (waited > kWarnAfter && !warned_) {
            warned_ = true;
            std::ostringstream text;
            text << waits << static_cast<int>(waited) << " s. Still waiting, until "
                 << static_cast<int>(ticket_.timeout) << " s.";
            log(Level::kWarning, text.str());
        }
    }
    // Whether this process has come there, too: calls of branches may come in another order in each process.
    bool is_here(const Label& left) const {
        const std::vector<Label> own = segment_.left_by(segment_.rank(), ~uint64_t{0});
        return std::find(own.begin(), own.end(), left) != own.end();
    }

    Segment& segment_;
    const Names& names_;
    const Ticket& ticket_;
    const Label label_;
    const long interrupts_;
    const double began_;
    std::vector<size_t> missing_;
    std::optional<Stall> stall_;
    bool warned_ = false, yielded_ = false;
};

}  // namespace

SharedMemory::SharedMemory(std::unique_ptr<Segment> segment, std::shared_ptr<Exchange> transport)
    : segment_(std::move(segment)), transport_(std::move(transport)), state_(std::make_unique<State>()) {}

SharedMemory::~SharedMemory() = default;

Agreed SharedMemory::known(const Ticket& ticket) {
    std::lock_guard<std::mutex> lock(state_->learning);
    const auto found = state_->agreed.find(ticket.layer);
    if (found != state_->agreed.end()) return found->second;
    const Agreed agreed = transport_->agreed(ticket);
    state_->names.add(agreed.key, ticket.name);
    return state_->agreed[ticket.layer] = agreed;
}

template <typename Use>
bool SharedMemory::exchange(const Ticket& ticket, int64_t key, const double* own, size_t length, bool equal,
                            const Use& use) {
    if (!segment_->is_own())
        throw Failure("this process was forked from rank " + std::to_string(segment_->rank()) + " of " +
                      std::to_string(segment_->ranks()) +
                      " and is no member of its job; only processes that the launcher has started are");
    if (segment_->state_of(segment_->rank()) != Segment::State::kPresent)
        throw Failure("nothing is exchanged any more, because: " + segment_->reason_of(segment_->rank()) +
                      " Start the job again.");
    const size_t ranks = segment_->ranks(), rank = segment_->rank();
    const uint64_t others = (ranks < 64 ? (uint64_t{1} << ranks) - 1 : ~uint64_t{0}) & ~(uint64_t{1} << rank);
    const auto post = [&](size_t piece) {
        const size_t begin = std::min(length, piece * Segment::kMostValues);
        const Label label{key, ticket.node, ticket.call, ticket.phase, static_cast<int64_t>(piece)};
        std::lock_guard<std::mutex> lock(state_->posting);
        segment_->post(label, own + begin, std::min(length - begin, Segment::kMostValues), length, others);
        return label;
    };
    const auto done = [&](const std::vector<Segment::Found>& found) {
        for (size_t other = 0; other < ranks; ++other)
            if (other != rank) segment_->done(other, found[other]);
    };
    // The first piece says how long each vector is.
    SYNCBN_POINT("before_post");
    Collecting first(*segment_, state_->names, ticket, post(0));
    SYNCBN_POINT("after_post");
    const std::vector<Segment::Found> heads = first.all();
    SYNCBN_POINT("after_collect");
    size_t pieces = pieces_of(length);
    for (size_t other = 0; other < ranks; ++other) {
        if (other == rank) continue;
        pieces = std::max(pieces, pieces_of(heads[other].length));
        if (equal && heads[other].length != length)
            first.give_up("in " + what(ticket) + ", rank " + std::to_string(other) + " sent " +
                          std::to_string(heads[other].length) + " values where rank " + std::to_string(rank) + " has " +
                          std::to_string(length) + ". All processes must build the same net and cast it alike.");
    }
    if (pieces == 1) {
        for (size_t other = 0; other < ranks; ++other) {
            const bool mine = other == rank;
            use(other, mine ? own : heads[other].values, mine ? length : heads[other].length);
        }
        done(heads);
        return true;
    }
    std::vector<Vector> whole(ranks);
    const auto add = [&](const std::vector<Segment::Found>& found) {
        for (size_t other = 0; other < ranks; ++other)
            if (other != rank)
                whole[other].insert(whole[other].end(), found[other].values, found[other].values + found[other].count);
        done(found);
    };
    add(heads);
    if (pieces > kMostPieces) return false;
    std::vector<Label> labels;
    for (size_t piece = 1; piece < pieces; ++piece) labels.push_back(post(piece));
    for (const Label& label : labels) add(Collecting(*segment_, state_->names, ticket, label).all());
    for (size_t other = 0; other < ranks; ++other)
        use(other, other == rank ? own : whole[other].data(), other == rank ? length : whole[other].size());
    return true;
}

Total SharedMemory::allreduce(Combine combine, const Ticket& ticket, const Contribution& own) {
    const Agreed agreed = known(ticket);
    Vector here(own.length, 0.0);
    for (const double* row : own.rows) put(combine, here.data(), row, own.length);
    Total total{Vector(own.length, 0.0), 0, agreed.key};
    const bool done =
        exchange(ticket, agreed.key, here.data(), own.length, true,
                 [&](size_t, const double* part, size_t n) { put(combine, total.values.data(), part, n); });
    return done ? total : transport_->allreduce(combine, ticket, own);
}

Total SharedMemory::allgather(const Ticket& ticket, const Contribution& own) {
    const Agreed agreed = known(ticket);
    if (agreed.in_groups) return transport_->allgather(ticket, own);  // of some ranks alone
    Total total{{}, 0, agreed.key};
    const bool done =
        exchange(ticket, agreed.key, own.rows[0], own.length, false, [&](size_t rank, const double* part, size_t n) {
            if (rank == segment_->rank()) total.first = total.values.size();
            total.values.insert(total.values.end(), part, part + n);
        });
    return done ? total : transport_->allgather(ticket, own);
}

void SharedMemory::fail(const std::string& reason) { segment_->leave(Segment::State::kFailed, reason); }

void SharedMemory::end() { segment_->leave(Segment::State::kEnded, ""); }

}  // namespace syncbn
