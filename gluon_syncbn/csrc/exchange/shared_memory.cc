#include "exchange/shared_memory.h"

#include <sched.h>

#include <algorithm>
#include <limits>
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
// Seconds to spin, and the limits of a yield: others ran long, or no other thread ran.
constexpr double kSpin = 5e-4, kTaken = 2e-4, kNobody = 1e-6;
constexpr int kInVain = 4;
constexpr double kSkippedAfter = 0.5;
constexpr double kForEver = std::numeric_limits<double>::infinity();
constexpr size_t kMostPieces = 16;  // of a vector; a longer one uses the transport

// A vector for the transport has only one piece here, which says so.
size_t pieces_of(size_t length) {
    const size_t pieces = std::max<size_t>(1, (length + Segment::kMostValues - 1) / Segment::kMostValues);
    return pieces > kMostPieces ? 1 : pieces;
}

bool has_room(size_t length) { return length <= kMostPieces * Segment::kMostValues; }

uint64_t bit(size_t rank) { return uint64_t{1} << rank; }

std::string what(int64_t call, int64_t phase, const std::string& layer) {
    return std::string("the ") + (phase == 0 ? "forward" : "backward") + " of call " + std::to_string(call + 1) +
           " of " + title_of(layer);
}

std::string what(const Ticket& ticket) { return what(ticket.call, ticket.phase, ticket.name); }

// For messages: the segment's ranks as ranks of the job, and the names of layers by their keys.
class Names {
  public:
    explicit Names(Members members) : members_(std::move(members)) {}
    std::string rank(size_t member) const { return std::to_string(members_.ranks[member]); }
    std::string of_all() const { return " of " + std::to_string(members_.of); }
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
    const Members members_;
    mutable std::mutex mutex_;  // guards the names
    std::map<int64_t, std::string> names_;
};

std::vector<size_t> ranks_of(uint64_t bits) {
    std::vector<size_t> ranks;
    for (size_t rank = 0; bits >> rank != 0 && rank < Segment::kMostRanks; ++rank)
        if ((bits & bit(rank)) != 0) ranks.push_back(rank);
    return ranks;
}

Members everybody_of(size_t ranks) {
    Members members{{}, ranks};
    for (size_t rank = 0; rank < ranks; ++rank) members.ranks.push_back(rank);
    return members;
}

}  // namespace

struct SharedMemory::State {
    explicit State(Members members) : names(std::move(members)) {}
    std::mutex posting;                // guards the outboxes of this rank
    std::mutex learning;               // guards the next one
    std::map<int64_t, Agreed> agreed;  // by layer
    Names names;
};

namespace {

// Waits for the vectors of some ranks under one label.
class Collecting {
  public:
    Collecting(Segment& segment, const Names& names, const Ticket& ticket, const Label& label, std::vector<size_t> from)
        : segment_(segment),
          names_(names),
          ticket_(ticket),
          label_(label),
          from_(std::move(from)),
          found_(from_.size()),
          ring_(segment.ring_of(label)),
          interrupts_(interrupts()),
          began_(seconds()) {}

    // Whether all have come; waits at most so many seconds.
    bool comes_within(double limit) {
        const double until = limit > 0 ? seconds() + limit : 0;
        while (true) {
            const uint32_t heard = segment_.heard(ring_);
            if (have_come()) break;
            if (limit == 0) return false;
            look_at_members();
            if (slept_ && seconds() - began_ > kSleep) look_around();
            if (spins(heard)) continue;
            const double left = until - seconds();
            if (left <= 0) return false;
            slept_ = true;
            segment_.sleep(ring_, heard, std::min(kSleep, left));
        }
        if (!slept_) segment_.wake(ring_);  // then the last to come finds all vectors at once
        return true;
    }
    const std::vector<size_t>& from() const { return from_; }
    // The vectors of these ranks.
    const std::vector<Segment::Found>& found() const { return found_; }
    void done() {
        for (size_t i = 0; i < from_.size(); ++i) segment_.done(from_[i], found_[i]);
    }
    [[noreturn]] void give_up(const std::string& reason) {
        segment_.leave(Segment::State::kFailed, reason);
        throw Failure(reason);
    }

  private:
    std::string rank() const { return "rank " + names_.rank(segment_.rank()) + names_.of_all(); }
    std::string text_of(const std::vector<size_t>& members) const {
        std::string text;
        for (size_t member : members) text += (text.empty() ? "" : ", ") + names_.rank(member);
        return text;
    }
    bool have_come() {
        bool all = true;
        for (size_t i = 0; i < from_.size(); ++i) {
            if (found_[i].values == nullptr) found_[i] = segment_.find(from_[i], label_);
            all = all && found_[i].values != nullptr;
        }
        return all;
    }
    std::vector<size_t> missing() const {
        std::vector<size_t> ranks;
        for (size_t i = 0; i < from_.size(); ++i)
            if (found_[i].values == nullptr) ranks.push_back(from_[i]);
        return ranks;
    }
    // Spins for a moment, and yields meanwhile, because a wake-up takes longer. If other threads run, this thread may
    // come back late, so it sleeps from then on. With more processes than cores, a spinning thread may keep a process
    // from its core. Linux lets another session's process run only at the end of the time slice (sched_autogroup), and
    // mpiexec gives each process a session. In this case the thread also sleeps when no other thread has run.
    bool spins(uint32_t heard) {
        for (double now = seconds(); now - began_ < kSpin && !yielded_ && in_vain_ < kInVain;) {
            sched_yield();
            if (segment_.heard(ring_) != heard) return true;
            const double then = now;
            now = seconds();
            yielded_ = now - then > kTaken;
            if (now - then < kNobody && segment_.crowded()) ++in_vain_;
        }
        return false;
    }
    // Checks what is known of the other processes without asking them.
    void look_at_members() {
        if (segment_.state_of(segment_.rank()) != Segment::State::kPresent)
            throw Failure("in " + what(ticket_) + ", " + rank() + ": " + segment_.reason_of(segment_.rank()));
        for (size_t missing : missing()) {
            const Segment::State state = segment_.state_of(missing);
            if (state == Segment::State::kPresent || state == Segment::State::kAbsent) continue;
            if (segment_.find(missing, label_).values != nullptr) continue;  // it came before that
            std::string fate = "has ended";
            if (state == Segment::State::kFailed) fate = "has failed: " + segment_.reason_of(missing);
            gone(missing, fate);
        }
    }
    [[noreturn]] void gone(size_t other, const std::string& fate) {
        give_up("rank " + names_.rank(other) + names_.of_all() + " " + fate + " (rank " + names_.rank(segment_.rank()) +
                " was in " + what(ticket_) + ")");
    }
    void look_around() {
        if (!stall_) stall_.emplace(interrupts_);
        watch_interrupts();
        stall_->sample();
        if (const auto failure = step().failure()) give_up(failure->what());
        if (stall_->asked_to_end())
            give_up(rank() + " was asked to end, or its step failed, in " + what(ticket_) + ".");
        const std::vector<size_t> missing_ranks = missing();
        for (size_t missing : missing_ranks)
            if (segment_.has_died(missing) && segment_.find(missing, label_).values == nullptr)
                gone(missing, "has ended without a word (process " + std::to_string(segment_.process_of(missing)) +
                                  "; was it killed?)");
        std::string others;
        for (size_t missing : missing_ranks)
            for (const Label& left : segment_.left_by(missing, uint64_t{1} << segment_.rank())) {
                if (left.piece != 0) continue;
                const bool other_call =
                    left.key == label_.key && left.node == label_.node && left.phase == 0 && left.call != label_.call;
                // A rank that came meanwhile, and went on, has left its vector here.
                if (other_call && label_.phase == 0 && stall_->waited() > kSkippedAfter && !is_here(left) &&
                    segment_.find(missing, label_).values == nullptr)
                    give_up("rank " + names_.rank(segment_.rank()) + " is in " + what(ticket_) + ", but rank " +
                            names_.rank(missing) + " is in number " + std::to_string(left.call + 1) +
                            ": one of them has skipped or repeated a step.");
                others = "rank " + names_.rank(missing) + " is in " + what(left.call, left.phase, names_.of(left.key));
            }
        const double waited = stall_->waited();
        const std::string waits = rank() + " waits for rank " + text_of(missing_ranks) +
                                  (label_.piece < 0 ? ", which speaks for this machine," : "") + " in " +
                                  what(ticket_) + " after ";
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
    // Whether this process has reached the call, too: the order of calls in branches differs between processes.
    bool is_here(const Label& left) const {
        const std::vector<Label> own = segment_.left_by(segment_.rank(), ~uint64_t{0});
        return std::find(own.begin(), own.end(), left) != own.end();
    }

    Segment& segment_;
    const Names& names_;
    const Ticket& ticket_;
    const Label label_;
    const std::vector<size_t> from_;     // in their order
    std::vector<Segment::Found> found_;  // of each of these ranks
    const uint32_t ring_;
    const long interrupts_;
    const double began_;
    std::optional<Stall> stall_;
    bool warned_ = false, yielded_ = false, slept_ = false;
    int in_vain_ = 0;
};

Vector combined(Combine combine, const Contribution& own) {
    Vector here(own.length, 0.0);
    for (const double* row : own.rows) put(combine, here.data(), row, own.length);
    return here;
}

}  // namespace

SharedMemory::SharedMemory(std::unique_ptr<Segment> segment, std::shared_ptr<Exchange> transport)
    : segment_(std::move(segment)),
      transport_(std::move(transport)),
      state_(std::make_unique<State>(everybody_of(segment_->ranks()))) {}

SharedMemory::SharedMemory(std::unique_ptr<Segment> segment, std::shared_ptr<Exchange> transport, Members members)
    : segment_(std::move(segment)),
      transport_(std::move(transport)),
      state_(std::make_unique<State>(std::move(members))) {}

SharedMemory::~SharedMemory() = default;

// Gathers the vectors of this rank and of some others.
class SharedMemory::Gathering {
  public:
    // Bits of the ranks that read this rank's posts, and of those that it reads. `is_total`: the answer of member 0.
    struct Way {
        uint64_t readers, from;
        bool is_total = false;
    };

    // Posts this rank's vector, which must stay valid; null to read only. `equal`: another length than ours is a
    // Failure.
    Gathering(SharedMemory& memory, const Ticket& ticket, int64_t key, uint64_t ranks, const double* own, size_t length,
              bool equal)
        : Gathering(memory, ticket, key, Way{ranks, ranks}, own, length, equal) {}
    Gathering(SharedMemory& memory, const Ticket& ticket, int64_t key, Way way, const double* own, size_t length,
              bool equal)
        : segment_(*memory.segment_),
          state_(*memory.state_),
          ticket_(ticket),
          key_(key),
          readers_(way.readers & ~bit(segment_.rank())),
          from_(way.from & ~bit(segment_.rank())),
          is_total_(way.is_total),
          own_(own),
          length_(length),
          equal_(equal) {
        if (!segment_.is_own())
            throw Failure("this process was forked from rank " + state_.names.rank(segment_.rank()) +
                          state_.names.of_all() +
                          " and is no member of its job; only processes that the launcher has started are");
        if (segment_.state_of(segment_.rank()) != Segment::State::kPresent)
            throw Failure("nothing is exchanged any more, because: " + segment_.reason_of(segment_.rank()) +
                          " Start the job again.");
        SYNCBN_POINT("before_post");
        for (size_t piece = 0; readers_ != 0 && piece < pieces_of(length); ++piece) post(piece, readers_);
        // The empty post shows others that this rank has come here.
        if (readers_ == 0 && from_ != 0 && own != nullptr) post(0, bit(segment_.rank()));
        SYNCBN_POINT("after_post");
        collecting_.emplace(segment_, state_.names, ticket_, label(0), ranks_of(from_));
    }

    bool comes_within(double seconds) {
        while (!complete_) {
            if (!collecting_->comes_within(seconds)) return false;
            take();
        }
        return true;
    }
    // Calls `use` with each rank, its vector and the length of that, in the order of the ranks. Returns false if a
    // vector is too long.
    template <typename Use>
    bool all(const Use& use) {
        comes_within(kForEver);
        const bool fits = has_room(length_) && std::all_of(parts_.begin(), parts_.end(),
                                                           [](const Part& part) { return has_room(part.length); });
        if (fits) {
            auto part = parts_.begin();
            for (; part != parts_.end() && part->rank < segment_.rank(); ++part)
                use(part->rank, part->values(), part->length);
            if (own_ != nullptr) use(segment_.rank(), own_, length_);
            for (; part != parts_.end(); ++part) use(part->rank, part->values(), part->length);
        }
        if (pieces_ == 1) collecting_->done();  // they were read in place
        if (readers_ == 0 && from_ != 0 && own_ != nullptr)
            segment_.done(segment_.rank(), segment_.find(segment_.rank(), label(0)));
        return fits;
    }

  private:
    struct Part {
        size_t rank, length;
        const double* in_place;  // if it is in one piece
        Vector whole;
        const double* values() const { return in_place != nullptr ? in_place : whole.data(); }
    };

    Label label(size_t piece) const {
        const auto number = static_cast<int64_t>(piece);
        return {key_, ticket_.node, ticket_.call, ticket_.phase, is_total_ ? -1 - number : number};
    }
    void post(size_t piece, uint64_t readers) {
        const size_t begin = piece * Segment::kMostValues, count = std::min(length_ - begin, Segment::kMostValues);
        std::lock_guard<std::mutex> lock(state_.posting);
        segment_.post(label(piece), own_ + begin, count, length_, readers);
        // If all read from all, the last to come wakes the others.
        if (readers_ != from_) segment_.wake(segment_.ring_of(label(piece)));
    }
    // Takes the pieces that have come; the first piece has the length of its vector.
    void take() {
        SYNCBN_POINT("after_collect");
        const std::vector<Segment::Found>& found = collecting_->found();
        if (piece_ == 0) {
            for (size_t i = 0; i < found.size(); ++i) {
                const size_t rank = collecting_->from()[i];
                parts_.push_back({rank, found[i].length, found[i].values, {}});
                pieces_ = std::max(pieces_, pieces_of(found[i].length));
                if (equal_ && found[i].length != length_)
                    collecting_->give_up("in " + what(ticket_) + ", rank " + state_.names.rank(rank) + " sent " +
                                         std::to_string(found[i].length) + " values where rank " +
                                         state_.names.rank(segment_.rank()) + " has " + std::to_string(length_) +
                                         ". All processes must build the same net and cast it alike.");
            }
            complete_ = pieces_ == 1;
            if (complete_) return;
        }
        size_t at = 0;
        for (Part& part : parts_) {
            if (pieces_of(part.length) <= piece_) continue;
            part.in_place = nullptr;
            part.whole.insert(part.whole.end(), found[at].values, found[at].values + found[at].count);
            ++at;
        }
        collecting_->done();
        complete_ = ++piece_ == pieces_;
        if (complete_) return;
        std::vector<size_t> from;
        for (const Part& part : parts_)
            if (pieces_of(part.length) > piece_) from.push_back(part.rank);
        collecting_.emplace(segment_, state_.names, ticket_, label(piece_), std::move(from));
    }

    Segment& segment_;
    State& state_;
    const Ticket ticket_;
    const int64_t key_;
    const uint64_t readers_, from_;
    const bool is_total_;
    const double* const own_;
    const size_t length_;
    const bool equal_;
    size_t piece_ = 0, pieces_ = 1;
    std::vector<Part> parts_;               // of the others, in their order
    std::optional<Collecting> collecting_;  // the current or last wait
    bool complete_ = false;
};

class SharedMemory::Reduction : public Underway {
  public:
    Reduction(SharedMemory& memory, Combine combine, const Ticket& ticket, const Contribution& own,
              const Agreed& agreed)
        : transport_(*memory.transport_),
          combine_(combine),
          ticket_(ticket),
          own_(own),
          key_(agreed.key),
          here_(own.rows.size() == 1 ? Vector() : combined(combine, own)),
          gathering_(memory, ticket, agreed.key, memory.everybody(), here_.empty() ? own.rows[0] : here_.data(),
                     own.length, true) {}
    bool comes_within(double seconds) override { return gathering_.comes_within(seconds); }
    Total total() override {
        Total total{{}, 0, key_};
        const bool done = gathering_.all([&](size_t, const double* part, size_t n) {
            if (total.values.empty() && combine_ == Combine::kAdd) {  // saves a pass
                total.values.assign(part, part + n);
                return;
            }
            total.values.resize(n);
            put(combine_, total.values.data(), part, n);
        });
        return done ? total : transport_.allreduce(combine_, ticket_, own_);
    }

  private:
    Exchange& transport_;
    const Combine combine_;
    const Ticket ticket_;
    const Contribution own_;
    const int64_t key_;
    const Vector here_;
    Gathering gathering_;
};

class SharedMemory::SideBySide : public Underway {
  public:
    SideBySide(SharedMemory& memory, const Ticket& ticket, const Contribution& own, const Agreed& agreed)
        : transport_(*memory.transport_),
          ticket_(ticket),
          own_(own),
          agreed_(agreed),
          rank_(memory.segment_->rank()),
          gathering_(memory, ticket, agreed.key, agreed.in_groups ? agreed.ranks : memory.everybody(), own.rows[0],
                     own.length, false) {}
    bool comes_within(double seconds) override { return gathering_.comes_within(seconds); }
    Total total() override {
        Total total{{}, 0, agreed_.key};
        const bool done = gathering_.all([&](size_t rank, const double* part, size_t n) {
            if (rank == rank_) total.first = total.values.size();
            total.values.insert(total.values.end(), part, part + n);
        });
        if (!done) return transport_.allgather(ticket_, own_);
        if (!agreed_.in_groups) return total;
        const size_t length = own_.length / static_cast<size_t>(agreed_.replicas);
        const auto at = [&](int64_t replica) { return static_cast<int64_t>(length) * replica; };
        const Vector& all = total.values;
        return {Vector(all.begin() + at(agreed_.begin), all.begin() + at(agreed_.end)),
                total.first - static_cast<size_t>(at(agreed_.begin)), agreed_.key};
    }

  private:
    Exchange& transport_;
    const Ticket ticket_;
    const Contribution own_;
    const Agreed agreed_;
    const size_t rank_;
    Gathering gathering_;
};

// Contributes to member 0, and receives the total of all from it.
class SharedMemory::Contributing : public Underway {
  public:
    Contributing(SharedMemory& memory, Combine combine, const Ticket& ticket, const Contribution& own, int64_t key)
        : combine_(combine),
          key_(key),
          here_(own.rows.size() == 1 ? Vector() : combined(combine, own)),
          gathering_(memory, ticket, key,
                     memory.speaks() ? Gathering::Way{0, memory.everybody()} : Gathering::Way{1, 0},
                     here_.empty() ? own.rows[0] : here_.data(), own.length, true) {}
    bool comes_within(double seconds) override { return gathering_.comes_within(seconds); }
    Total total() override {
        Total total{{}, 0, key_};
        gathering_.all([&](size_t, const double* part, size_t n) {
            total.values.resize(n);
            put(combine_, total.values.data(), part, n);
        });
        return total;
    }

  private:
    const Combine combine_;
    const int64_t key_;
    const Vector here_;
    Gathering gathering_;
};

class SharedMemory::Hearing : public Underway {
  public:
    Hearing(SharedMemory& memory, const Ticket& ticket, size_t length, int64_t key)
        : key_(key), gathering_(memory, ticket, key, Gathering::Way{0, 1, true}, nullptr, length, true) {}
    bool comes_within(double seconds) override { return gathering_.comes_within(seconds); }
    Total total() override {
        Total total{{}, 0, key_};
        gathering_.all([&](size_t, const double* part, size_t n) { total.values.assign(part, part + n); });
        return total;
    }

  private:
    const int64_t key_;
    Gathering gathering_;
};

bool SharedMemory::speaks() const { return segment_->rank() == 0; }

bool SharedMemory::has_room(size_t length) { return syncbn::has_room(length); }

std::unique_ptr<Underway> SharedMemory::begin_reduce(Combine combine, const Ticket& ticket, const Contribution& own) {
    return std::make_unique<Contributing>(*this, combine, ticket, own, learned(ticket).key);
}

std::unique_ptr<Underway> SharedMemory::begin_hearing(const Ticket& ticket, size_t length) {
    return std::make_unique<Hearing>(*this, ticket, length, learned(ticket).key);
}

void SharedMemory::broadcast(const Ticket& ticket, const Vector& total) {
    Gathering(*this, ticket, learned(ticket).key, Gathering::Way{everybody(), 0, true}, total.data(), total.size(),
              true);
}

uint64_t SharedMemory::everybody() const {
    const size_t ranks = segment_->ranks();
    return ranks < 64 ? bit(ranks) - 1 : ~uint64_t{0};
}

const Agreed* SharedMemory::known(const Ticket& ticket) const {
    std::lock_guard<std::mutex> lock(state_->learning);
    const auto found = state_->agreed.find(ticket.layer);
    return found == state_->agreed.end() ? nullptr : &found->second;
}

const Agreed& SharedMemory::learned(const Ticket& ticket) {
    if (const Agreed* agreed = known(ticket)) return *agreed;
    const Agreed agreed = transport_->agreed(ticket);
    state_->names.add(agreed.key, ticket.name);
    std::lock_guard<std::mutex> lock(state_->learning);
    return state_->agreed.emplace(ticket.layer, agreed).first->second;
}

std::unique_ptr<Underway> SharedMemory::gather(const Ticket& ticket, const Contribution& own, const Agreed& agreed) {
    if (agreed.in_groups) {
        const int64_t of_replica = 2 * agreed.channels + (ticket.phase == 0);
        // Not all replicas take part: the transport reports the error.
        if (static_cast<int64_t>(own.length) != agreed.replicas * of_replica)
            return later([this, ticket, own] { return transport_->allgather(ticket, own); }, false);
    }
    return std::make_unique<SideBySide>(*this, ticket, own, agreed);
}

// The first call asks later for the agreement, because that may take a while.
std::unique_ptr<Underway> SharedMemory::begin_allreduce(Combine combine, const Ticket& ticket,
                                                        const Contribution& own) {
    const Agreed* agreed = known(ticket);
    if (agreed == nullptr) return Exchange::begin_allreduce(combine, ticket, own);
    return std::make_unique<Reduction>(*this, combine, ticket, own, *agreed);
}

std::unique_ptr<Underway> SharedMemory::begin_allgather(const Ticket& ticket, const Contribution& own) {
    const Agreed* agreed = known(ticket);
    return agreed == nullptr ? Exchange::begin_allgather(ticket, own) : gather(ticket, own, *agreed);
}

Total SharedMemory::allreduce(Combine combine, const Ticket& ticket, const Contribution& own) {
    return Reduction(*this, combine, ticket, own, learned(ticket)).total();
}

Total SharedMemory::allgather(const Ticket& ticket, const Contribution& own) {
    return gather(ticket, own, learned(ticket))->total();
}

void SharedMemory::fail(const std::string& reason) { segment_->leave(Segment::State::kFailed, reason); }

void SharedMemory::end() { segment_->leave(Segment::State::kEnded, ""); }

}  // namespace syncbn
