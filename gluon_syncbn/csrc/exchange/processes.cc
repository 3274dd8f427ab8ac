#include "exchange/processes.h"

#include <sched.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "failure.h"
#include "point.h"

namespace syncbn {
namespace {

// Seconds to spin, and the limits of a yield: others ran long, or no other thread ran.
constexpr double kSpin = 5e-4, kTaken = 2e-4, kNobody = 1e-6;
constexpr double kSpinUnwoken = 3e-3;  // where no arrival wakes a sleeper, and a nap may come at each message
constexpr int kInVain = 4;
constexpr double kSkippedAfter = 0.5;
// Seconds, or this part of the time limit, after which a rank says whom it waits for.
constexpr double kSayAfter = 1, kSayAfterPart = 0.25;
// Up to this number of ranks, each sends its vector to all. More ranks send as many messages as the logarithm of the
// number.
constexpr size_t kFew = 4;
// A process that waits for waiting processes waits so many seconds longer, so that the one next to the cause reports it,
// also on busy cores.
constexpr double kLeaderLonger = 2, kMemberLonger = 3;

// "the forward of call 2 of SyncBatchNorm 'bn0'". An exchange without a meeting has only a name.
std::string name_of_call(const Label& label, const std::string& name) {
    if (label.channel == Label::kBytes) return name;
    return std::string("the ") + (label.phase == 0 ? "forward" : "backward") + " of call " +
           std::to_string(label.sequence + 1) + " of " + title_of(name);
}

// The vectors of all, in the order of the ranks; `own` is the place of this one.
Total side_by_side(const std::vector<Mailbox::Found>& parts, size_t own, const Agreed& agreed) {
    Total total;
    for (size_t i = 0; i < parts.size(); ++i) {
        if (i == own) total.first = total.values.size();
        total.values.insert(total.values.end(), parts[i].values, parts[i].values + parts[i].length());
    }
    if (agreed.ranks.empty()) return total;
    const size_t length = parts[own].length() / agreed.replicas;
    Total of_members{{}, agreed.first * length, 0, agreed.groups};
    for (const int member : agreed.members) {
        const auto vector = total.values.begin() + static_cast<int64_t>(length) * member;
        of_members.values.insert(of_members.values.end(), vector, vector + static_cast<int64_t>(length));
    }
    return of_members;
}

}  // namespace

// Waits for the vectors of some ranks under one label.
class Processes::WaitForVectors final : public WaitForOthers {
  public:
    // `is_of_several`: hops of an exchange. `earlier`: nothing, or the wait of the hop before, whose time counts.
    template <typename... Earlier>
    WaitForVectors(const Processes& processes, Mailbox& mail, const char* name, const Label& label, const Ranks& from,
                   double timeout, bool is_of_several, const Earlier&... earlier)
        : WaitForOthers(earlier..., mail, timeout, &mail == &processes.job()),
          processes_(processes),
          name_(name),
          label_(label),
          from_(from),
          found_(from_.size()),
          event_(mail_.event_of(label)),
          began_(seconds()),
          says_after_(is_of_several ? std::min(kSayAfter, kSayAfterPart * timeout) : kForEver) {}

    // Whether all have come until then.
    bool comes_until(double until) {
        while (true) {
            const uint32_t seen = mail_.arrivals(event_);
            if (have_come()) break;
            check_members();
            look();
            if (polls(seen)) continue;
            const double left = until - seconds();
            if (left <= 0) return false;
            slept_ = true;
            mail_.sleep(event_, seen, std::min(kSleep, left));
        }
        if (!slept_) mail_.wake(event_);  // then the last to come finds all vectors at once
        return true;
    }
    const std::vector<Mailbox::Found>& found() const { return found_; }
    void done() {
        for (size_t i = 0; i < from_.size(); ++i) mail_.done(from_[i], found_[i]);
    }
    // `several`: each has a multiple of this length.
    void check_lengths(size_t length, bool several) {
        const size_t size = length * sizeof(double);
        for (size_t i = 0; i < from_.size(); ++i) {
            if (found_[i].size == size || (several && size > 0 && found_[i].size % size == 0)) continue;
            give_up("in " + name() + ", rank " + mail_.number_of(from_[i]) + " sent " +
                    std::to_string(found_[i].length()) + " values where rank " + mail_.number_of(mail_.rank()) +
                    " has " + std::to_string(length) + (several ? " of each replica" : "") +
                    ". All processes must build the same net and cast it alike.");
        }
    }

  protected:
    std::string name() const override { return name_of_call(label_, name_); }
    bool is_missing(size_t rank) const override {
        return (std::binary_search(from_.begin(), from_.end(), rank) && mail_.find(rank, label_).values == nullptr) ||
               std::binary_search(unsent_.begin(), unsent_.end(), rank);
    }
    // Of ranks that have said whom they wait for, names those: the cause may be some hops away.
    std::string missing() const override {
        if (label_.channel == Label::kOfLeader) return WaitForOthers::missing() + ", the leader of this machine,";
        Ranks ranks = missing_ranks();
        std::string causes, between;
        for (size_t i = 0; i < ranks.size(); ++i) {
            const Ranks further = without(mail_.awaited_by(ranks[i], label_), mail_.rank());
            std::string& list = further.empty() ? causes : between;
            list += (list.empty() ? "" : ", ") + mail_.number_of(ranks[i]);
            for (const size_t rank : further)
                if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
        }
        return causes.empty() || between.empty() ? causes + between : causes + ", through rank " + between + ",";
    }
    // Also looks at what the others do meanwhile.
    void check_others() override {
        WaitForOthers::check_others();
        if (seconds() - began_ > says_after_ && missing_ranks() != said_)
            mail_.say_awaited(label_, said_ = missing_ranks());
        for (const size_t rank : from_) {
            if (!is_missing(rank)) continue;
            for (const Label& posted : mail_.posted_by(rank)) {
                if (posted.channel != Label::kVectors || posted.piece != 0) continue;
                const bool other_call = posted.key == label_.key && posted.node == label_.node && posted.phase == 0 &&
                                        posted.sequence != label_.sequence;
                // One that has come since, and gone on, has posted its vector. The order of calls in branches
                // differs between processes.
                if (other_call && label_.phase == 0 && seconds() - began_ > kSkippedAfter && !is_here(posted) &&
                    is_missing(rank))
                    give_up("rank " + mail_.number_of(mail_.rank()) + " is in " + name() + ", but rank " +
                            mail_.number_of(rank) + " is in number " + std::to_string(posted.sequence + 1) +
                            ": one of them has skipped or repeated a step.");
                const bool recorded_otherwise = posted.key == label_.key && (posted.node < 0) != (label_.node < 0);
                others_ = " Meanwhile rank " + mail_.number_of(rank) + " is in " +
                          name_of_call(posted, name_of(posted.key)) + "." +
                          (recorded_otherwise ? " Hybridize the net in all processes, or in none." : "");
            }
        }
    }
    std::string advice() override { return WaitForOthers::advice() + others_; }

  private:
    bool is_here(const Label& label) const {
        std::lock_guard<std::mutex> lock(processes_.mutex_);
        return std::find(processes_.here_.begin(), processes_.here_.end(), label) != processes_.here_.end();
    }
    std::string name_of(int64_t key) const {
        std::lock_guard<std::mutex> lock(processes_.mutex_);
        const auto found = processes_.agreed_.find(key);
        const auto agreed = found == processes_.agreed_.end() ? nullptr : found->second.lock();
        return agreed != nullptr ? agreed->name : "number " + std::to_string(key + 1);
    }
    bool have_come() {
        bool all = true;
        for (size_t i = 0; i < from_.size(); ++i) {
            if (found_[i].values == nullptr) found_[i] = mail_.find(from_[i], label_);
            all = all && found_[i].values != nullptr;
        }
        if (!all) return false;
        unsent_ = mail_.unsent(label_);
        return unsent_.empty();
    }
    Ranks missing_ranks() const {
        Ranks ranks;
        for (const size_t rank : mail_.everybody)
            if (is_missing(rank)) ranks.push_back(rank);
        return ranks;
    }
    // Polls for a moment, and yields meanwhile, because a wake-up takes longer. If other threads run, this thread may
    // come back late, so it sleeps from then on. With more processes than cores, a polling thread may keep a process
    // from its core. Linux lets another session's process run only at the end of the time slice (sched_autogroup), and
    // mpiexec gives each process a session. In this case the thread also sleeps when no other thread has run. Where no
    // arrival wakes it, it polls on, because late is still sooner than the end of a nap.
    bool polls(uint32_t seen) {
        const double most = mail_.wakes() ? kSpin : kSpinUnwoken;
        for (double now = seconds(); now - began_ < most && !yielded_ && in_vain_ < kInVain;) {
            sched_yield();
            if (mail_.arrivals(event_) != seen) return true;
            const double then = now;
            now = seconds();
            yielded_ = mail_.wakes() && now - then > kTaken;
            if (now - then < kNobody && mail_.crowded) ++in_vain_;
        }
        return false;
    }

    const Processes& processes_;
    const char* const name_;
    const Label label_;
    const Ranks& from_;
    std::vector<Mailbox::Found> found_;  // of each of these ranks
    const uint32_t event_;
    const double began_;
    const double says_after_;  // seconds; others may wait for this rank meanwhile, where it is one of several hops
    Ranks unsent_, said_;
    std::string others_;  // what they do meanwhile
    bool yielded_ = false, slept_ = false;
    int in_vain_ = 0;
};

// An exchange in hops. Each combines what comes in the order of the ranks, so that all have the same bits.
class Processes::Hops {
  public:
    Hops(Processes& processes, const std::vector<Hop>& hops, Combine combine, const CallId& id, const Contribution& own)
        : processes_(processes), combine_(combine), id_(id), length_(own.length), values_(own.rows[0]), hops_(hops) {
        if (own.rows.size() > 1) reduce(combine, own);
        std::lock_guard<std::mutex> lock(processes_.mutex_);
        processes_.here_.push_back(label());
    }
    ~Hops() {
        std::lock_guard<std::mutex> lock(processes_.mutex_);
        processes_.here_.erase(std::find(processes_.here_.begin(), processes_.here_.end(), label()));
    }

    // Its hops have one time limit together.
    std::optional<Total> within(double limit) {
        const double until = seconds() + limit;
        try {
            for (; at_ < hops_.size(); ++at_, begun_ = false) {
                if (!std::exchange(begun_, true)) begin();
                if (!wait_->comes_until(until)) return std::nullopt;
                SYNCBN_POINT("after_collect");
                end();
            }
        } catch (const std::exception& error) {  // those who wait for this rank elsewhere hear of it, too
            processes_.report(Mailbox::State::kFailed, error.what());
            throw;
        }
        total_.key = id_.agreed->key;
        return std::move(total_);
    }

  private:
    Label label(Label::Channel channel = Label::kVectors, int64_t piece = 0) const {
        return {channel, static_cast<int32_t>(id_.phase), id_.agreed->key, id_.node, id_.sequence, piece};
    }
    void reduce(Combine combine, const Contribution& rows) {
        total_.values = combined(combine, rows);
        values_ = total_.values.data();
    }
    void begin() {
        const Hop& hop = hops_[at_];
        const Label own = label(hop.channel, hop.piece);
        Mailbox& mail = *hop.mail;
        mail.check_open();
        SYNCBN_POINT("before_post");
        const auto waits = [&](const auto&... earlier) {
            return std::make_unique<WaitForVectors>(processes_, mail, id_.name, own, hop.from, id_.timeout + hop.longer,
                                                    hops_.size() > 1, earlier...);
        };
        wait_ = wait_ == nullptr ? waits() : waits(*wait_);
        mail.post(own, values_, length_ * sizeof(double), hop.readers);
        // If all read from all, the last to come wakes the others.
        if (hop.readers != hop.from) mail.wake(mail.event_of(own));
        SYNCBN_POINT("after_post");
    }
    void end() {
        const Hop& hop = hops_[at_];
        const bool brings_all = combine_ == Combine::kSideBySide;
        wait_->check_lengths(brings_all ? length_ / id_.contexts.size() : length_, brings_all);
        std::vector<Mailbox::Found> parts = wait_->found();
        const auto place = std::lower_bound(hop.from.begin(), hop.from.end(), hop.mail->rank()) - hop.from.begin();
        if (hop.contributes) parts.insert(parts.begin() + place, Mailbox::Found{values_, length_ * sizeof(double)});
        if (brings_all) {
            total_ = side_by_side(parts, static_cast<size_t>(place), *id_.agreed);
        } else {
            Contribution rows{{}, length_};
            for (const Mailbox::Found& part : parts) rows.rows.push_back(part.values);
            reduce(combine_, rows);
        }
        wait_->done();
    }

    Processes& processes_;
    const Combine combine_;
    const CallId id_;
    const size_t length_;
    const double* values_;  // what this rank has: its row, or a total
    Total total_;
    const std::vector<Hop> hops_;
    size_t at_ = 0;
    bool begun_ = false;                    // the hop
    std::unique_ptr<WaitForVectors> wait_;  // of the hop, or the one before
};

Processes::Processes(std::unique_ptr<Mailbox> job) : job_(std::move(job)), in_job_(between(job_->everybody)) {}

void Processes::meet(std::shared_ptr<Segment> memory, Ranks ranks, Ranks leaders, const Mpi* mpi, size_t adds_from) {
    machine_ = memory != nullptr ? memory : machine_;
    memory_of_sums_ = memory != nullptr ? std::move(memory) : std::make_shared<Segment>(1, 0, "");
    memory_of_sums_->members = {std::move(ranks), job_->ranks()};
    if (machine_ == memory_of_sums_) in_levels_ = levels(leaders);
    std::unique_ptr<Machines> machines;
    if (leaders.size() > 1 && memory_of_sums_->rank() == 0)
        machines = std::make_unique<Machines>(*job_, std::move(leaders), mpi, adds_from);
    const auto fail = [this](const std::string& reason) { report(Mailbox::State::kFailed, reason); };
    sums_ = std::make_unique<Sums>(*memory_of_sums_, std::move(machines), fail);
}

// The hops of a reduction: in the machine, between the leaders, and back.
std::vector<Processes::Hop> Processes::levels(const Ranks& leaders) const {
    const Ranks others = without(machine_->everybody, machine_->rank());
    if (leaders.size() == 1) return {{machine_.get(), 0, others, others}};
    if (machine_->rank() != 0)
        return {{machine_.get(), 0, {0}, {}}, {machine_.get(), 0, {}, {0}, kMemberLonger, false, Label::kOfLeader}};
    std::vector<Hop> hops = {{machine_.get(), 0, {}, others}};
    for (Hop& hop : between(leaders)) {
        hop.longer = kLeaderLonger;
        hops.push_back(std::move(hop));
    }
    hops.push_back({machine_.get(), 0, others, {}, 0, true, Label::kOfLeader});
    return hops;
}

// The hops between ranks of the job. Many need as many messages as the logarithm of their number: neighbours combine
// until their number is a power of two. Then each holds the total of 1, 2, 4 ... of them, and swaps it with a rank that
// holds a total of as many.
std::vector<Processes::Hop> Processes::between(const Ranks& ranks) const {
    Mailbox* const all = job_.get();
    const Ranks others = without(ranks, all->rank());
    if (ranks.size() <= kFew) return {{all, 0, others, others}};
    const auto own = static_cast<size_t>(std::lower_bound(ranks.begin(), ranks.end(), all->rank()) - ranks.begin());
    size_t power = 1;
    while (2 * power <= ranks.size()) power *= 2;
    const size_t pairs = ranks.size() - power;
    const bool paired = own < 2 * pairs;
    if (paired && own % 2 == 0) return {{all, 0, {ranks[own + 1]}, {}}, {all, 1, {}, {ranks[own + 1]}, 0, false}};
    std::vector<Hop> hops;
    if (paired) hops.push_back({all, 0, {}, {ranks[own - 1]}});
    const size_t place = paired ? own / 2 : own - pairs;
    for (size_t distance = 1; distance < power; distance *= 2) {
        const size_t other = place ^ distance;
        const Ranks partner{ranks[other < pairs ? 2 * other + 1 : other + pairs]};
        hops.push_back({all, static_cast<int64_t>(1 + distance), partner, partner});
    }
    if (paired) hops.push_back({all, 1, {ranks[own - 1]}, {}});
    return hops;
}

std::shared_ptr<const Agreed> Processes::agree(int64_t key, const std::string& name, const Pooling& pooling,
                                               size_t channels, const std::vector<size_t>& replicas) {
    const size_t rank = job_->rank();
    const size_t longest =
        *std::max_element(replicas.begin(), replicas.end()) * static_cast<size_t>(pooling.slots()) * (1 + 2 * channels);
    const auto agreed =
        std::make_shared<const Agreed>(Agreed{reach_of(pooling, replicas, rank), key, name, replicas[rank], longest});
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = agreed_.begin(); it != agreed_.end();) it = it->second.expired() ? agreed_.erase(it) : std::next(it);
    agreed_.emplace(key, agreed);
    return agreed;
}

Underway Processes::begin(Combine combine, const CallId& id, const Contribution& own) {
    const Agreed* const agreed = id.agreed.get();
    if (agreed == nullptr)
        throw Failure(
            "the processes have not agreed on this layer, because nothing has announced this call to them: call "
            "the layer itself, or a Gluon block that contains it.");
    const auto begun = [&](const std::vector<Hop>& way) -> Underway {
        const auto hops = std::make_shared<Hops>(*this, way, combine, id, own);
        return [hops](double seconds) { return hops->within(seconds); };
    };
    if (combine != Combine::kSideBySide)
        return begun(machine_ != nullptr && own.length <= Segment::kMostValues ? in_levels_ : in_job_);
    if (!agreed->ranks.empty()) {
        const size_t replicas = id.contexts.size();
        if (replicas != agreed->replicas) {  // they form groups of their own
            const std::vector<int>& groups = agreed->groups;
            const std::string reach = agreed->ranks.size() > 1 ? "reach from " + job_->name_of(job_->rank()) : "";
            if (!reach.empty() ||
                replicas % static_cast<size_t>(std::count(groups.begin(), groups.end(), groups[0])) != 0)
                throw Failure("groups " + (reach.empty() ? "do not divide these" : reach + " to others") + ", so all " +
                              std::to_string(agreed->replicas) +
                              " devices of this process take part in every step, not " + std::to_string(replicas) +
                              ": call the layer on all of them.");
            const Total total{combined(combine, own), 0, agreed->key};
            return [total](double) { return total; };
        }
    }
    Mailbox* mail = job_.get();
    if (machine_ != nullptr && machine_->ranks() == job_->ranks() && agreed->longest <= Segment::kMostValues)
        mail = machine_.get();
    const Ranks others = without(agreed->ranks.empty() ? mail->everybody : agreed->ranks, mail->rank());
    return begun({{mail, 0, others, others}});
}

std::string Processes::bytes_of(int64_t key, const char* what, double timeout, const std::vector<std::string>& own) {
    Mailbox& mail = *job_;
    mail.check_open();
    const Label label{Label::kBytes, 0, key};
    const Ranks others = without(mail.everybody, mail.rank());
    for (size_t i = 0; i < own.size(); ++i)
        mail.post(label, own[i].data(), own[i].size(), own.size() == 1 ? others : without({i}, mail.rank()));
    WaitForVectors wait(*this, mail, what, label, others, timeout, false);
    wait.comes_until(kForEver);
    std::vector<Mailbox::Found> parts = wait.found();
    const std::string& mine = own[mail.rank() % own.size()];
    const auto place = parts.begin() + static_cast<int64_t>(mail.rank());
    parts.insert(place, {reinterpret_cast<const double*>(mine.data()), mine.size()});
    std::string all;
    for (const auto& part : parts) all.append(reinterpret_cast<const char*>(&part.size), sizeof part.size);
    for (const auto& part : parts) all.append(reinterpret_cast<const char*>(part.values), part.size);
    wait.done();
    return all;
}

void Processes::report(Mailbox::State state, const std::string& reason) {
    for (Mailbox* const mail : std::initializer_list<Mailbox*>{machine_.get(), memory_of_sums_.get(), job_.get()})
        if (mail != nullptr) mail->report(state, reason);
}

}  // namespace syncbn
