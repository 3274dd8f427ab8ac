#include "exchange/shared_memory.h"

#include <sched.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <optional>

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

bool has_space(size_t length) { return length <= kMostPieces * Segment::kMostValues; }

uint64_t bit(size_t rank) { return uint64_t{1} << rank; }

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
class WaitForRanks final : public Wait {
  public:
    WaitForRanks(Segment& segment, const Names& names, const Ticket& ticket, const Label& label,
                 std::vector<size_t> from)
        : Wait(ticket.timeout),
          segment_(segment),
          names_(names),
          ticket_(ticket),
          label_(label),
          from_(std::move(from)),
          found_(from_.size()),
          ring_(segment.ring_of(label)),
          began_(seconds()) {}

    // Whether all have come; waits at most so many seconds.
    bool comes_within(double limit) {
        const double until = limit > 0 ? seconds() + limit : 0;
        while (true) {
            const uint32_t heard = segment_.heard(ring_);
            if (have_come()) break;
            if (limit == 0) return false;
            check_members();
            look();
            if (polls(heard)) continue;
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
    [[noreturn]] void give_up(const std::string& reason) override {
        segment_.leave(Segment::State::kFailed, reason);
        throw Failure(reason);
    }

  protected:
    void throw_if_failed() override {
        if (const auto failure = step().failure()) give_up(failure->what());
    }
    // What only the kernel knows of the others, and what they do meanwhile.
    void check_others() override {
        for (size_t missing : missing()) {
            if (segment_.has_died(missing) && !has_come(missing))
                gone(missing, "has ended without a word (process " + std::to_string(segment_.process_of(missing)) +
                                  "; was it killed?)");
            for (const Label& left : segment_.left_by(missing, bit(segment_.rank()))) {
                if (left.piece != 0) continue;
                const bool other_call =
                    left.key == label_.key && left.node == label_.node && left.phase == 0 && left.call != label_.call;
                // One that has come since, and gone on, has left its vector here.
                if (other_call && label_.phase == 0 && waited() > kSkippedAfter && !is_here(left) && !has_come(missing))
                    give_up("rank " + names_.rank(segment_.rank()) + " is in " + name_of_call(ticket_) + ", but rank " +
                            names_.rank(missing) + " is in number " + std::to_string(left.call + 1) +
                            ": one of them has skipped or repeated a step.");
                others_ = " Meanwhile rank " + names_.rank(missing) + " is in " +
                          name_of_call({0, left.node, left.call, left.phase, names_.of(left.key).c_str(), 0, 0}) + ".";
            }
        }
    }
    std::string text(Why why) override {
        const char* leader = label_.piece < 0 ? ", the leader of this machine," : "";
        return text_of_wait(why, name_of_call(ticket_), rank(), text_of(missing()) + leader, limit(), waited()) +
               (why == Why::kLate ? others_ : "");
    }

  private:
    std::string rank() const { return "rank " + names_.rank(segment_.rank()) + names_.of_all(); }
    std::string text_of(const std::vector<size_t>& members) const {
        std::string text;
        for (size_t member : members) text += (text.empty() ? "" : ", ") + names_.rank(member);
        return text;
    }
    bool has_come(size_t rank) const { return segment_.find(rank, label_).values != nullptr; }
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
    // Polls for a moment, and yields meanwhile, because a wake-up takes longer. If other threads run, this thread may
    // come back late, so it sleeps from then on. With more processes than cores, a polling thread may keep a process
    // from its core. Linux lets another session's process run only at the end of the time slice (sched_autogroup), and
    // mpiexec gives each process a session. In this case the thread also sleeps when no other thread has run.
    bool polls(uint32_t heard) {
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
    void check_members() {
        if (segment_.state_of(segment_.rank()) != Segment::State::kPresent)
            throw Failure("in " + name_of_call(ticket_) + ", " + rank() + ": " + segment_.reason_of(segment_.rank()));
        for (size_t missing : missing()) {
            const Segment::State state = segment_.state_of(missing);
            if (state == Segment::State::kPresent || state == Segment::State::kAbsent) continue;
            if (has_come(missing)) continue;  // before that
            std::string fate = "has ended";
            if (state == Segment::State::kFailed) fate = "has failed: " + segment_.reason_of(missing);
            gone(missing, fate);
        }
    }
    [[noreturn]] void gone(size_t other, const std::string& fate) {
        give_up("rank " + names_.rank(other) + names_.of_all() + " " + fate + " (rank " + names_.rank(segment_.rank()) +
                " was in " + name_of_call(ticket_) + ")");
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
    const double began_;
    std::string others_;  // what they do meanwhile
    bool yielded_ = false, slept_ = false;
    int in_vain_ = 0;
};

// What this process contributes to a total.
struct Row {
    Vector made;           // of several rows
    const double* values;  // null where it contributes nothing
    size_t length;
};

Row only_row(const Contribution& own) { return {{}, own.rows[0], own.length}; }

Row combined(Combine combine, const Contribution& own) {
    if (own.rows.size() == 1) return only_row(own);
    Row row{Vector(own.length, 0.0), nullptr, own.length};
    row.values = row.made.data();  // which stays where it is when the vector is moved
    for (const double* part : own.rows) put(combine, row.made.data(), part, own.length);
    return row;
}

}  // namespace

SharedMemory::SharedMemory(std::unique_ptr<Segment> segment, std::shared_ptr<Exchange> transport)
    : SharedMemory(std::move(segment), std::move(transport), everybody_of(segment->ranks())) {}

SharedMemory::SharedMemory(std::unique_ptr<Segment> segment, std::shared_ptr<Exchange> transport, Members members)
    : segment_(std::move(segment)),
      transport_(std::move(transport)),
      sums_(*segment_, members),
      state_(std::make_unique<State>(std::move(members))) {}

SharedMemory::~SharedMemory() = default;

// Gathers the vectors of this rank and of some others. The classes below make the total.
class SharedMemory::Gathering : public Underway {
  public:
    // Bits of the ranks that read this rank's posts, and of those that it reads. `is_total`: the answer of member 0.
    struct Way {
        uint64_t readers, from;
        bool is_total = false;
    };

    // Posts the row of this rank, which must stay valid. `equal`: another length than ours is a Failure.
    Gathering(SharedMemory& memory, const Ticket& ticket, int64_t key, Way way, Row own, bool equal)
        : ticket_(ticket),
          key_(key),
          label_{key, ticket.node, ticket.call, ticket.phase, 0},
          transport_(*memory.transport_),
          segment_(*memory.segment_),
          state_(*memory.state_),
          readers_(way.readers & ~bit(segment_.rank())),
          from_(way.from & ~bit(segment_.rank())),
          is_total_(way.is_total),
          own_(std::move(own)),
          equal_(equal) {
        if (!segment_.is_own())
            throw Failure("this process was forked from rank " + state_.names.rank(segment_.rank()) +
                          state_.names.of_all() +
                          " and is no member of its job; only processes that the launcher has started are");
        if (segment_.state_of(segment_.rank()) != Segment::State::kPresent)
            throw Failure("nothing is exchanged any more. Start the job again. The first error was: " +
                          segment_.reason_of(segment_.rank()));
        SYNCBN_POINT("before_post");
        for (size_t piece = 0; readers_ != 0 && piece < pieces_of(own_.length); ++piece) post(piece, readers_);
        // The empty post shows others that this rank has come here.
        if (marks_) post(0, bit(segment_.rank()));
        SYNCBN_POINT("after_post");
        wait_.emplace(segment_, state_.names, ticket_, label(0), ranks_of(from_));
    }

    bool comes_within(double seconds) override {
        while (!complete_) {
            if (!wait_->comes_within(seconds)) return false;
            take();
        }
        return true;
    }

  protected:
    // Calls `use` with each rank, its vector and the length of that, in the order of the ranks. Returns false if a
    // vector is too long.
    template <typename Use>
    bool all(const Use& use) {
        comes_within(kForEver);
        const bool fits = has_space(own_.length) && std::all_of(parts_.begin(), parts_.end(), [](const Part& part) {
                              return has_space(part.length);
                          });
        if (fits) {
            auto part = parts_.begin();
            for (; part != parts_.end() && part->rank < segment_.rank(); ++part)
                use(part->rank, part->values(), part->length);
            if (own_.values != nullptr) use(segment_.rank(), own_.values, own_.length);
            for (; part != parts_.end(); ++part) use(part->rank, part->values(), part->length);
        }
        if (pieces_ == 1) wait_->done();  // they were read in place
        if (marks_) segment_.done(segment_.rank(), segment_.find(segment_.rank(), label(0)));
        return fits;
    }
    size_t rank() const { return segment_.rank(); }

    const Ticket ticket_;
    const int64_t key_;
    const Label label_;  // of the first piece
    Exchange& transport_;

  private:
    struct Part {
        size_t rank, length;
        const double* in_place;  // if it is in one piece
        Vector whole;
        const double* values() const { return in_place != nullptr ? in_place : whole.data(); }
    };

    Label label(size_t piece) const {
        const auto number = static_cast<int64_t>(piece);
        Label label = label_;
        label.piece = is_total_ ? -1 - number : number;
        return label;
    }
    void post(size_t piece, uint64_t readers) {
        const size_t begin = piece * Segment::kMostValues, count = std::min(own_.length - begin, Segment::kMostValues);
        std::lock_guard<std::mutex> lock(state_.posting);
        segment_.post(label(piece), own_.values + begin, count, own_.length, readers);
        // If all read from all, the last to come wakes the others.
        if (readers_ != from_) segment_.wake(segment_.ring_of(label(piece)));
    }
    // Takes the pieces that have come; the first piece has the length of its vector.
    void take() {
        SYNCBN_POINT("after_collect");
        const std::vector<Segment::Found>& found = wait_->found();
        if (piece_ == 0) {
            for (size_t i = 0; i < found.size(); ++i) {
                const size_t rank = wait_->from()[i];
                parts_.push_back({rank, found[i].length, found[i].values, {}});
                pieces_ = std::max(pieces_, pieces_of(found[i].length));
                if (equal_ && found[i].length != own_.length)
                    wait_->give_up("in " + name_of_call(ticket_) + ", rank " + state_.names.rank(rank) + " sent " +
                                   std::to_string(found[i].length) + " values where rank " +
                                   state_.names.rank(segment_.rank()) + " has " + std::to_string(own_.length) +
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
        wait_->done();
        complete_ = ++piece_ == pieces_;
        if (complete_) return;
        std::vector<size_t> from;
        for (const Part& part : parts_)
            if (pieces_of(part.length) > piece_) from.push_back(part.rank);
        wait_.emplace(segment_, state_.names, ticket_, label(piece_), std::move(from));
    }

    Segment& segment_;
    State& state_;
    const uint64_t readers_, from_;
    const bool is_total_;
    const Row own_;
    const bool equal_;
    const bool marks_ = readers_ == 0 && from_ != 0 && own_.values != nullptr;  // posts for nobody
    size_t piece_ = 0, pieces_ = 1;
    std::vector<Part> parts_;           // of the others, in their order
    std::optional<WaitForRanks> wait_;  // the current or last wait
    bool complete_ = false;
};

class SharedMemory::Reduction : public Gathering {
  public:
    Reduction(SharedMemory& memory, Combine combine, const Ticket& ticket, const Contribution& own, int64_t key)
        : Reduction(memory, combine, ticket, own, key, {memory.everybody(), memory.everybody()},
                    combined(combine, own)) {}
    Reduction(SharedMemory& memory, Combine combine, const Ticket& ticket, const Contribution& own, int64_t key,
              Way way, Row row)
        : Gathering(memory, ticket, key, way, std::move(row), true), combine_(combine), own_(own) {}
    Total total() override {
        Total total{{}, 0, key_};
        const bool done = all([&](size_t, const double* part, size_t n) {
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
    const Combine combine_;
    const Contribution own_;
};

class SharedMemory::SideBySide : public Gathering {
  public:
    SideBySide(SharedMemory& memory, const Ticket& ticket, const Contribution& own, const Agreed& agreed)
        : SideBySide(memory, ticket, own, agreed, agreed.in_groups ? agreed.ranks : memory.everybody()) {}
    Total total() override {
        Total total{{}, 0, key_};
        const bool done = all([&](size_t rank, const double* part, size_t n) {
            if (rank == this->rank()) total.first = total.values.size();
            total.values.insert(total.values.end(), part, part + n);
        });
        if (!done) return transport_.allgather(ticket_, own_);
        if (!agreed_.in_groups) return total;
        const size_t length = own_.length / static_cast<size_t>(agreed_.replicas);
        Total of_members{{}, static_cast<size_t>(agreed_.first) * length, key_, agreed_.groups};
        for (const int member : agreed_.members) {
            const auto vector = total.values.begin() + static_cast<int64_t>(length) * member;
            of_members.values.insert(of_members.values.end(), vector, vector + static_cast<int64_t>(length));
        }
        return of_members;
    }

  private:
    SideBySide(SharedMemory& memory, const Ticket& ticket, const Contribution& own, const Agreed& agreed,
               uint64_t ranks)
        : Gathering(memory, ticket, agreed.key, {ranks, ranks}, only_row(own), false), own_(own), agreed_(agreed) {}

    const Contribution own_;
    const Agreed& agreed_;  // stays as long as the exchange
};

bool SharedMemory::speaks() const { return segment_->rank() == 0; }

bool SharedMemory::has_space(size_t length) { return syncbn::has_space(length); }

std::unique_ptr<Underway> SharedMemory::begin_reduce(Combine combine, const Ticket& ticket, const Contribution& own) {
    const Gathering::Way way = speaks() ? Gathering::Way{0, everybody()} : Gathering::Way{bit(0), 0};
    return std::make_unique<Reduction>(*this, combine, ticket, own, learned(ticket).key, way, combined(combine, own));
}

std::unique_ptr<Underway> SharedMemory::begin_hearing(const Ticket& ticket, size_t length) {
    return std::make_unique<Reduction>(*this, Combine::kAdd, ticket, Contribution{{}, length}, learned(ticket).key,
                                       Gathering::Way{0, bit(0), true}, Row{{}, nullptr, length});
}

void SharedMemory::broadcast(const Ticket& ticket, const Vector& total) {
    Reduction(*this, Combine::kAdd, ticket, {}, learned(ticket).key, {everybody(), 0, true},
              {{}, total.data(), total.size()});
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
    return std::make_unique<Reduction>(*this, combine, ticket, own, agreed->key);
}

std::unique_ptr<Underway> SharedMemory::begin_allgather(const Ticket& ticket, const Contribution& own) {
    const Agreed* agreed = known(ticket);
    return agreed == nullptr ? Exchange::begin_allgather(ticket, own) : gather(ticket, own, *agreed);
}

Total SharedMemory::allreduce(Combine combine, const Ticket& ticket, const Contribution& own) {
    return Reduction(*this, combine, ticket, own, learned(ticket).key).total();
}

Total SharedMemory::allgather(const Ticket& ticket, const Contribution& own) {
    return gather(ticket, own, learned(ticket))->total();
}

void SharedMemory::fail(const std::string& reason) { segment_->leave(Segment::State::kFailed, reason); }

void SharedMemory::end() { segment_->leave(Segment::State::kEnded, ""); }

}  // namespace syncbn
