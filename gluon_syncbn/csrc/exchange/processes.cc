#include "exchange/processes.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>

#include "exchange/python.h"
#include "failure.h"
#include "point.h"
#include "waiting/step.h"
#include "waiting/wait.h"

namespace syncbn {
namespace {

constexpr double kSleep = std::chrono::duration<double>(kSlice).count();
// Seconds to spin, and the limits of a yield: others ran long, or no other thread ran.
constexpr double kSpin = 5e-4, kTaken = 2e-4, kNobody = 1e-6;
constexpr double kSpinUnwoken = 3e-3;  // where no arrival wakes a sleeper, and a nap may come at each message
constexpr int kInVain = 4;
constexpr double kSkippedAfter = 0.5;
constexpr double kForEver = std::numeric_limits<double>::infinity();
// Up to this number of ranks, each sends its vector to all. More ranks send as many messages as the logarithm of the
// number.
constexpr size_t kFew = 4;
// A process that waits for waiting processes waits this much longer, so that the one next to the cause reports it.
constexpr double kLeaderLonger = 0.5, kMemberLonger = 1;

Ranks without(Ranks ranks, size_t rank) {
    ranks.erase(std::remove(ranks.begin(), ranks.end(), rank), ranks.end());
    return ranks;
}

// Waits for the vectors of some ranks under one label.
class WaitForRanks final : public WaitInTier {
  public:
    WaitForRanks(Tier& tier, const Names& names, const Ticket& ticket, const Label& label, Ranks from)
        : WaitInTier(tier, ticket.timeout),
          mail_(*tier.mail),
          names_(names),
          ticket_(ticket),
          label_(label),
          from_(std::move(from)),
          found_(from_.size()),
          ring_(mail_.ring_of(label)),
          began_(seconds()) {}

    // Whether all have come; waits at most so many seconds.
    bool comes_within(double limit) {
        const double until = limit > 0 ? seconds() + limit : 0;
        while (true) {
            const uint32_t heard = mail_.heard(ring_);
            if (have_come()) break;
            if (limit == 0) return false;
            check_members();
            look();
            if (polls(heard)) continue;
            const double left = until - seconds();
            if (left <= 0) return false;
            slept_ = true;
            mail_.sleep(ring_, heard, std::min(kSleep, left));
        }
        if (!slept_) mail_.wake(ring_);  // then the last to come finds all vectors at once
        return true;
    }
    const Ranks& from() const { return from_; }
    // The vectors of these ranks.
    const std::vector<Mailbox::Found>& found() const { return found_; }
    void done() {
        for (size_t i = 0; i < from_.size(); ++i) mail_.done(from_[i], label_, found_[i]);
    }
    void check_length(size_t i, size_t own) {
        if (found_[i].length != own)
            give_up("in " + name() + ", rank " + tier_.rank(from_[i]) + " sent " + std::to_string(found_[i].length) +
                    " values where rank " + tier_.rank(mail_.rank()) + " has " + std::to_string(own) +
                    ". All processes must build the same net and cast it alike.");
    }

  protected:
    std::string name() const override { return name_of_call(ticket_); }
    void throw_if_failed() override {
        if (const auto failure = step().failure()) give_up(failure->what());
    }
    // What only the kernel knows of the others, and what they do meanwhile.
    void check_others() override {
        for (size_t missing : awaited()) {
            if (!has_come(missing)) check_alive(missing);
            for (const Label& left : mail_.left_by(missing)) {
                if (left.piece != 0 || left.phase < 0) continue;
                const bool other_call =
                    left.key == label_.key && left.node == label_.node && left.phase == 0 && left.call != label_.call;
                // One that has come since, and gone on, has left its vector here. The order of calls in branches
                // differs between processes.
                if (other_call && label_.phase == 0 && waited() > kSkippedAfter && !mail_.is_here(left) &&
                    !has_come(missing))
                    give_up("rank " + tier_.rank(mail_.rank()) + " is in " + name() + ", but rank " +
                            tier_.rank(missing) + " is in number " + std::to_string(left.call + 1) +
                            ": one of them has skipped or repeated a step.");
                others_ = " Meanwhile rank " + tier_.rank(missing) + " is in " +
                          name_of_call({0, left.node, left.call, left.phase, names_.of(left.key).c_str(), 0, 0}) + ".";
            }
        }
    }
    std::string missing() const override {
        std::string ranks;
        for (size_t rank : awaited()) ranks += (ranks.empty() ? "" : ", ") + tier_.rank(rank);
        return ranks + (label_.piece < 0 ? ", the leader of this machine," : "");
    }
    std::string advice() override { return WaitInTier::advice() + others_; }

  private:
    bool has_come(size_t rank) const { return mail_.find(rank, label_).values != nullptr; }
    bool have_come() {
        bool all = true;
        for (size_t i = 0; i < from_.size(); ++i) {
            if (found_[i].values == nullptr) found_[i] = mail_.find(from_[i], label_);
            all = all && found_[i].values != nullptr;
        }
        return all && mail_.is_out(label_);
    }
    Ranks awaited() const {
        Ranks ranks;
        for (size_t i = 0; i < from_.size(); ++i)
            if (found_[i].values == nullptr) ranks.push_back(from_[i]);
        return ranks;
    }
    // Polls for a moment, and yields meanwhile, because a wake-up takes longer. If other threads run, this thread may
    // come back late, so it sleeps from then on. With more processes than cores, a polling thread may keep a process
    // from its core. Linux lets another session's process run only at the end of the time slice (sched_autogroup), and
    // mpiexec gives each process a session. In this case the thread also sleeps when no other thread has run. Where no
    // arrival wakes it, it polls on, because late is still sooner than the end of a nap.
    bool polls(uint32_t heard) {
        const double most = mail_.wakes() ? kSpin : kSpinUnwoken;
        for (double now = seconds(); now - began_ < most && !yielded_ && in_vain_ < kInVain;) {
            sched_yield();
            if (mail_.heard(ring_) != heard) return true;
            const double then = now;
            now = seconds();
            yielded_ = mail_.wakes() && now - then > kTaken;
            if (now - then < kNobody && mail_.crowded()) ++in_vain_;
        }
        return false;
    }
    // Checks what is known of the other processes without asking them.
    void check_members() {
        check_own();
        for (size_t missing : awaited()) {
            const Mailbox::State state = mail_.state_of(missing);
            const bool has_left = state == Mailbox::State::kFailed || state == Mailbox::State::kEnded;
            if (has_left && !has_come(missing)) gone(missing);  // before that
        }
        if (!tier_.fails_together) return;
        for (size_t rank = 0; rank < mail_.ranks(); ++rank) {  // the missing rank may wait for this one
            if (mail_.state_of(rank) == Mailbox::State::kFailed) gone(rank);
            check_alive(rank);
        }
    }
    void check_alive(size_t other) {
        if (mail_.died(other) != 0) gone(other);
    }

    Mailbox& mail_;
    const Names& names_;
    const Ticket& ticket_;
    const Label label_;
    const Ranks from_;
    std::vector<Mailbox::Found> found_;  // of each of these ranks
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

// A vector of a rank.
struct Part {
    size_t rank, length;
    const double* values;
};

Total reduced(Combine combine, const std::vector<Part>& parts, int64_t key) {
    Total total{{}, 0, key};
    for (const Part& part : parts) {
        if (total.values.empty() && combine == Combine::kAdd) {  // saves a pass
            total.values.assign(part.values, part.values + part.length);
            continue;
        }
        total.values.resize(part.length);
        put(combine, total.values.data(), part.values, part.length);
    }
    return total;
}

// `replicas`: of this process in this step.
Total side_by_side(const std::vector<Part>& parts, size_t rank, const Agreed& agreed) {
    Total total{{}, 0, agreed.key};
    size_t own = 0;
    for (const Part& part : parts) {
        if (part.rank == rank) total.first = total.values.size(), own = part.length;
        total.values.insert(total.values.end(), part.values, part.values + part.length);
    }
    if (agreed.ranks.empty()) return total;
    const size_t length = own / static_cast<size_t>(agreed.replicas);
    Total of_members{{}, static_cast<size_t>(agreed.first) * length, agreed.key, agreed.groups};
    for (const int member : agreed.members) {
        const auto vector = total.values.begin() + static_cast<int64_t>(length) * member;
        of_members.values.insert(of_members.values.end(), vector, vector + static_cast<int64_t>(length));
    }
    return of_members;
}

}  // namespace

void Names::add(int64_t key, const char* name) {
    std::lock_guard<std::mutex> lock(mutex_);
    names_[key] = name;
}

std::string Names::of(int64_t key) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = names_.find(key);
    return found == names_.end() ? "number " + std::to_string(key + 1) : found->second;
}

// Gathers the vectors of this rank and of some others, and makes a total of them.
class Processes::Gathering : public Underway {
  public:
    // Gets the vectors in the order of the ranks.
    using Finish = std::function<Total(const std::vector<Part>&)>;
    // The ranks that read this rank's posts, and those that it reads, itself perhaps among them. `is_total`: the answer
    // of member 0.
    struct Way {
        const Ranks &readers, &from;
        bool is_total = false;
    };

    // Posts the row of this rank, which must stay valid. `equal`: another length than ours is a Failure.
    Gathering(const Job& job, Tier& tier, const Ticket& ticket, int64_t key, Way way, Row own, bool equal,
              Finish finish)
        : ticket_(ticket),
          mail_(*tier.mail),
          label_{key, ticket.node, ticket.call, ticket.phase, way.is_total ? -1 : 0},
          own_(std::move(own)),
          equal_(equal),
          finish_(std::move(finish)),
          wait_(tier, job.names, ticket_, label_, without(way.from, mail_.rank())) {
        tier.check_open();
        SYNCBN_POINT("before_post");
        const Ranks readers = without(way.readers, mail_.rank());
        if (!readers.empty()) {
            // A vector that has no space here shows its length.
            tier.post(label_, own_.values, own_.length <= mail_.most_values() ? own_.length : 0, own_.length, readers);
            // If all read from all, the last to come wakes the others.
            if (way.readers != way.from) mail_.wake(mail_.ring_of(label_));
        } else if (!wait_.from().empty() && own_.values != nullptr) {
            tier.post(label_, own_.values, 0, own_.length, {mail_.rank()});  // shows that this rank has come here
        }
        SYNCBN_POINT("after_post");
    }

    bool comes_within(double seconds) override {
        if (complete_) return true;
        if (!wait_.comes_within(seconds)) return false;
        SYNCBN_POINT("after_collect");
        for (size_t i = 0; equal_ && i < wait_.from().size(); ++i) wait_.check_length(i, own_.length);
        return complete_ = true;
    }

    Total total() override {
        comes_within(kForEver);
        std::vector<Part> all;
        if (own_.values != nullptr) all.push_back({mail_.rank(), own_.length, own_.values});
        for (size_t i = 0; i < wait_.from().size(); ++i) {
            const Part part{wait_.from()[i], wait_.found()[i].length, wait_.found()[i].values};
            all.insert(part.rank < mail_.rank() ? all.end() - (own_.values != nullptr) : all.end(), part);
        }
        Total total = finish_(all);
        wait_.done();
        mail_.forget(label_);
        return total;
    }

    static std::unique_ptr<Gathering> reduction(const Job& job, Tier& tier, Combine combine, const Ticket& ticket,
                                                int64_t key, Way way, Row own) {
        return std::make_unique<Gathering>(
            job, tier, ticket, key, way, std::move(own), true,
            [combine, key](const std::vector<Part>& parts) { return reduced(combine, parts, key); });
    }

  private:
    const Ticket ticket_;
    Mailbox& mail_;
    const Label label_;
    const Row own_;
    const bool equal_;
    const Finish finish_;
    WaitForRanks wait_;
    bool complete_ = false;
};

// A reduction in as many messages as the logarithm of the number of ranks. Neighbours combine until their number is a
// power of two. Then each holds the total of 1, 2, 4 ... of them, and swaps it with a rank that holds a total of as
// many. Both put the lower ranks first, for the same bits.
class Processes::Doubling : public Underway {
  public:
    Doubling(const Job& job, Tier& tier, Combine combine, const Ticket& ticket, int64_t key, const Ranks& members,
             const Row& own)
        : job_(job),
          tier_(tier),
          mail_(*tier.mail),
          combine_(combine),
          ticket_(ticket),
          total_{Vector(own.values, own.values + own.length), 0, key} {
        tier_.check_open();
        const size_t size = members.size();
        const auto own_place =
            static_cast<size_t>(std::find(members.begin(), members.end(), mail_.rank()) - members.begin());
        size_t power = 1;
        while (2 * power <= size) power *= 2;
        const size_t pairs = size - power;
        const bool paired = own_place < 2 * pairs, lower = own_place % 2 == 0;
        if (paired && lower) {
            steps_ = {{0, members[own_place + 1], true, Theirs::kNone},
                      {1, members[own_place + 1], false, Theirs::kInstead}};
        } else {
            if (paired) steps_.push_back({0, members[own_place - 1], false, Theirs::kFirst});
            const size_t place = paired ? own_place / 2 : own_place - pairs;
            int64_t piece = 2;
            for (size_t distance = 1; distance < power; distance *= 2) {
                const size_t other = place ^ distance;
                steps_.push_back({piece++, members[other < pairs ? 2 * other + 1 : other + pairs], true,
                                  place < other ? Theirs::kLast : Theirs::kFirst});
            }
            if (paired) steps_.push_back({1, members[own_place - 1], true, Theirs::kNone});
        }
        begin();
    }
    bool comes_within(double seconds) override {
        while (at_ < steps_.size()) {
            if (!wait_->comes_within(seconds)) return false;
            take();
            ++at_;
            begin();
        }
        return true;
    }
    Total total() override {
        comes_within(kForEver);
        mail_.forget(label(0));
        return total_;
    }

  private:
    enum class Theirs { kNone, kFirst, kLast, kInstead };
    struct Step {
        int64_t piece;
        size_t rank;
        bool sends;
        Theirs theirs;
    };
    Label label(int64_t piece) const { return {total_.key, ticket_.node, ticket_.call, ticket_.phase, piece}; }
    void begin() {
        if (at_ == steps_.size()) return;
        const Step& step = steps_[at_];
        const Vector& own = total_.values;
        if (step.sends) tier_.post(label(step.piece), own.data(), own.size(), own.size(), {step.rank});
        wait_.emplace(tier_, job_.names, ticket_, label(step.piece),
                      step.theirs == Theirs::kNone ? Ranks{} : Ranks{step.rank});
    }
    void take() {
        const Step& step = steps_[at_];
        if (step.theirs == Theirs::kNone) return;
        Vector& own = total_.values;
        wait_->check_length(0, own.size());
        const double* theirs = wait_->found()[0].values;
        if (step.theirs == Theirs::kLast) {
            put(combine_, own.data(), theirs, own.size());
        } else {
            Vector both(theirs, theirs + own.size());
            if (step.theirs == Theirs::kFirst) put(combine_, both.data(), own.data(), own.size());
            own = std::move(both);
        }
        wait_->done();
    }

    const Job& job_;
    Tier& tier_;
    Mailbox& mail_;
    const Combine combine_;
    const Ticket ticket_;
    Total total_;
    std::vector<Step> steps_;
    size_t at_ = 0;
    std::optional<WaitForRanks> wait_;
};

// A reduction over several machines. This process has contributed to its machine.
class Processes::Levels : public Underway {
  public:
    Levels(Processes& processes, Combine combine, const Ticket& ticket, const Contribution& own, int64_t key)
        : processes_(processes), machine_(*processes.machine_), combine_(combine), ticket_(ticket), key_(key) {
        const bool leads = machine_.mail->rank() == 0;
        here_ = Gathering::reduction(
            *processes.job_, machine_, combine, ticket, key,
            leads ? Gathering::Way{kNobody_, machine_.everybody} : Gathering::Way{kLeader_, kNobody_},
            combined(combine, own));
        if (leads) return;
        Ticket longer = ticket;
        longer.timeout += kMemberLonger;
        total_ = Gathering::reduction(*processes.job_, machine_, Combine::kAdd, longer, key, {kNobody_, kLeader_, true},
                                      {{}, nullptr, own.length});
    }
    bool comes_within(double seconds) override {
        return guarded([&] {
            if (total_ == nullptr) {
                if (!here_->comes_within(seconds)) return false;
                begin_total();
            }
            return total_->comes_within(seconds);
        });
    }
    Total total() override {
        return guarded([&] {
            if (total_ == nullptr) begin_total();
            Total all = total_->total();
            if (machine_.mail->rank() == 0)
                Gathering::reduction(*processes_.job_, machine_, Combine::kAdd, ticket_, key_,
                                     {machine_.everybody, kNobody_, true}, {{}, all.values.data(), all.values.size()});
            return all;
        });
    }

  private:
    // In a leader.
    void begin_total() {
        of_machine_ = here_->total().values;
        total_ = processes_.reduce_in_job(combine_, ticket_, {{of_machine_.data()}, of_machine_.size()}, key_,
                                          processes_.leaders_, kLeaderLonger);
    }
    template <typename Work>
    auto guarded(const Work& work) -> decltype(work()) {
        try {
            return work();
        } catch (const std::exception& e) {
            machine_.mail->leave(Mailbox::State::kFailed, e.what());
            throw;
        }
    }

    const Ranks kNobody_{}, kLeader_{0};
    Processes& processes_;
    Tier& machine_;
    const Combine combine_;
    const Ticket ticket_;
    const int64_t key_;
    Vector of_machine_;
    std::unique_ptr<Underway> here_, total_;  // no total yet in a leader that waits for its machine
};

Processes::Processes(std::shared_ptr<Job> job) : job_(std::move(job)) {}

Processes::Processes(std::shared_ptr<Job> job, std::unique_ptr<Segment> segment, Members members, Ranks leaders,
                     const Mpi* mpi, size_t carried_from)
    : job_(std::move(job)),
      machine_(std::make_unique<Tier>(std::move(segment), std::move(members))),
      leaders_(std::move(leaders)),
      sums_(std::make_unique<Sums>(*machine_)) {
    if (leaders_.size() > 1 && machine_->mail->rank() == 0)
        sums_->between(machines(job_->all, leaders_, mpi, carried_from));
}

Processes::~Processes() = default;

const Agreed* Processes::known(const Ticket& ticket) const {
    std::lock_guard<std::mutex> lock(learning_);
    const auto found = agreed_.find(ticket.layer);
    return found == agreed_.end() ? nullptr : &found->second;
}

const Agreed& Processes::learned(const Ticket& ticket) {
    if (const Agreed* agreed = known(ticket)) return *agreed;
    const Agreed agreed = agreed_in_python(job_->number, ticket, 0);
    job_->names.add(agreed.key, ticket.name);
    std::lock_guard<std::mutex> lock(learning_);
    return agreed_.emplace(ticket.layer, agreed).first->second;
}

std::unique_ptr<Underway> Processes::reduce(Combine combine, const Ticket& ticket, const Contribution& own,
                                            int64_t key) {
    if (machine_ == nullptr || own.length > machine_->mail->most_values())
        return reduce_in_job(combine, ticket, own, key, job_->all.everybody, 0);
    if (leaders_.size() > 1) return std::make_unique<Levels>(*this, combine, ticket, own, key);
    const Ranks& all = machine_->everybody;
    return Gathering::reduction(*job_, *machine_, combine, ticket, key, {all, all}, combined(combine, own));
}

std::unique_ptr<Underway> Processes::reduce_in_job(Combine combine, const Ticket& given, const Contribution& own,
                                                   int64_t key, const Ranks& ranks, double longer) {
    Ticket ticket = given;
    ticket.timeout += longer;
    if (ranks.size() > kFew)
        return std::make_unique<Doubling>(*job_, job_->all, combine, ticket, key, ranks, combined(combine, own));
    return Gathering::reduction(*job_, job_->all, combine, ticket, key, {ranks, ranks}, combined(combine, own));
}

std::unique_ptr<Underway> Processes::gather(const Ticket& ticket, const Contribution& own, const Agreed& agreed) {
    if (!agreed.ranks.empty()) {
        const int64_t replicas = static_cast<int64_t>(own.length) / (2 * agreed.channels + (ticket.phase == 0));
        if (replicas != agreed.replicas)
            return later(
                [this, ticket, own, replicas] {
                    const Agreed of_step = agreed_in_python(job_->number, ticket, replicas);
                    return gather_in(job_->all, ticket, own, of_step)->total();
                },
                false);
    }
    const bool in_memory = machine_ != nullptr && leaders_.size() == 1;
    return gather_in(in_memory ? *machine_ : job_->all, ticket, own, agreed);
}

std::unique_ptr<Underway> Processes::gather_in(Tier& tier, const Ticket& ticket, const Contribution& own,
                                               const Agreed& agreed) {
    const Ranks& ranks = agreed.ranks.empty() ? tier.everybody : agreed.ranks;
    const auto finish = [this, &tier, ticket, own, agreed](const std::vector<Part>& parts) {
        for (const Part& part : parts)
            if (part.length > tier.mail->most_values()) return gather_in(job_->all, ticket, own, agreed)->total();
        return side_by_side(parts, tier.mail->rank(), agreed);
    };
    return std::make_unique<Gathering>(*job_, tier, ticket, agreed.key, Gathering::Way{ranks, ranks}, only_row(own),
                                       false, finish);
}

// The first call asks later for the agreement, because that may take a while.
std::unique_ptr<Underway> Processes::begin_allreduce(Combine combine, const Ticket& ticket, const Contribution& own) {
    const Agreed* agreed = known(ticket);
    if (agreed == nullptr) return Exchange::begin_allreduce(combine, ticket, own);
    return reduce(combine, ticket, own, agreed->key);
}

std::unique_ptr<Underway> Processes::begin_allgather(const Ticket& ticket, const Contribution& own) {
    const Agreed* agreed = known(ticket);
    return agreed == nullptr ? Exchange::begin_allgather(ticket, own) : gather(ticket, own, *agreed);
}

Total Processes::allreduce(Combine combine, const Ticket& ticket, const Contribution& own) {
    return reduce(combine, ticket, own, learned(ticket).key)->total();
}

Total Processes::allgather(const Ticket& ticket, const Contribution& own) {
    return gather(ticket, own, learned(ticket))->total();
}

std::string Processes::bytes_of(int64_t key, const char* what, double timeout, const std::vector<std::string>& own) {
    Tier& tier = job_->all;
    tier.check_open();
    const Label label{key, 0, 0, -1, 0};
    const size_t own_rank = tier.mail->rank();
    const Ranks others = without(tier.everybody, own_rank);
    for (size_t i = 0; i < own.size(); ++i)
        tier.post_bytes(label, own[i].data(), own[i].size(), own.size() == 1 ? others : without({i}, own_rank));
    const Ticket ticket{0, 0, 0, label.phase, what, timeout, 0};
    WaitForRanks wait(tier, job_->names, ticket, label, others);
    wait.comes_within(kForEver);
    std::string all(tier.everybody.size() * sizeof(size_t), 0);
    auto found = wait.found().begin();
    for (const size_t rank : tier.everybody) {
        const size_t before = all.size();
        if (rank == own_rank) {
            all += own[rank % own.size()];
        } else {
            all.append(reinterpret_cast<const char*>(found->values), found->length);
            ++found;
        }
        const size_t size = all.size() - before;
        std::memcpy(&all[rank * sizeof size], &size, sizeof size);
    }
    wait.done();
    tier.mail->forget(label);
    return all;
}

void Processes::leave(Mailbox::State state, const std::string& reason) {
    if (machine_ != nullptr) machine_->mail->leave(state, reason);
    job_->all.mail->leave(state, reason);
}

}  // namespace syncbn
