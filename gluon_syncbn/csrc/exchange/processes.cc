#include "exchange/processes.h"

#include <sched.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "failure.h"

namespace syncbn {
namespace {

// Seconds in which a wait polls before the first nap, and of a yield in which no other thread ran.
constexpr double kPoll = 3e-3, kNobody = 1e-6;
constexpr int kInVain = 30;
constexpr double kSkippedAfter = 0.5;
// A rank waits so many seconds longer in each further hop, so that the one next to the cause reports it.
constexpr double kPerHop = 1;

// "the forward of call 2 of SyncBatchNorm 'bn0'". An exchange without a meeting has only a name.
std::string name_of_call(const Label& label, const std::string& name) {
    if (label.channel != Label::kVectors) return name;
    return std::string("the ") + (label.phase == 0 ? "forward" : "backward") + " of call " +
           std::to_string(label.sequence + 1) + " of " + title_of(name);
}

// The vectors of all, in the order of the ranks; `own` is the place of this one.
Total side_by_side(const std::vector<Mailbox::Taken>& parts, size_t own, const Agreed& agreed) {
    Total total;
    for (size_t i = 0; i < parts.size(); ++i) {
        if (i == own) total.first = total.values.size();
        const double* const values = parts[i].values.get();
        total.values.insert(total.values.end(), values, values + parts[i].length());
    }
    if (agreed.ranks.empty()) return total;
    const size_t length = parts[own].length() / agreed.replicas;
    Total of_members{{}, agreed.first * length, agreed.groups};
    for (const int member : agreed.members) {
        const auto vector = total.values.begin() + static_cast<int64_t>(length) * member;
        of_members.values.insert(of_members.values.end(), vector, vector + static_cast<int64_t>(length));
    }
    return of_members;
}

}  // namespace

// Waits for the vectors of some ranks under one label.
class Processes::WaitForVectors : public WaitForOthers {
  public:
    WaitForVectors(Processes& processes, const Label& label, std::string name, double timeout)
        : WaitForOthers(processes.mail_, label, timeout), processes_(processes), name_(std::move(name)) {}

    void expect(const Ranks& from) {
        from_ = from;
        taken_.assign(from.size(), {});
        began_ = seconds();
        in_vain_ = 0;
    }
    // Whether all have come until then.
    bool comes_until(double until) {
        while (true) {
            const uint32_t seen = mail_.arrivals();
            if (have_come()) return true;
            check_members();
            look();
            if (polls(seen)) continue;
            const double left = until - seconds();
            if (left <= 0) return false;
            mail_.nap(seen, left);
        }
    }
    const std::vector<Mailbox::Taken>& taken() const { return taken_; }

  protected:
    Processes& processes_;
    Ranks from_;

    std::string name() const override { return name_of_call(label_, name_); }
    bool is_missing(size_t rank) const override {
        const auto place = std::lower_bound(from_.begin(), from_.end(), rank);
        return (place != from_.end() && *place == rank && !has_come(static_cast<size_t>(place - from_.begin()))) ||
               std::binary_search(unsent_.begin(), unsent_.end(), rank);
    }
    // Also looks whether another rank is in another call of the layer.
    void check_others() override {
        WaitForOthers::check_others();
        if (label_.channel != Label::kVectors || label_.phase != 0 || seconds() - began_ < kSkippedAfter) return;
        for (const size_t rank : from_) {
            for (const Label& posted : mail_.posted_by(rank)) {
                const bool other_call = posted.channel == Label::kVectors && posted.piece == label_.piece &&
                                        posted.key == label_.key && posted.node == label_.node && posted.phase == 0 &&
                                        posted.sequence != label_.sequence;
                // One that has come since, and gone on, has posted its vector. The order of calls in branches
                // differs between processes.
                if (other_call && !is_here(posted) && is_missing(rank))
                    give_up("rank " + std::to_string(mail_.rank()) + " is in " + name() + ", but rank " +
                            std::to_string(rank) + " is in number " + std::to_string(posted.sequence + 1) +
                            ": one of them has skipped or repeated a step.");
            }
        }
    }

  private:
    bool is_here(const Label& label) const {
        std::lock_guard<std::mutex> lock(processes_.mutex_);
        return std::any_of(processes_.here_.begin(), processes_.here_.end(),
                           [&](const Label& here) { return here.is_of_call(label); });
    }
    bool has_come(size_t i) const {
        if (taken_[i].values == nullptr) taken_[i] = mail_.take(from_[i], label_);
        return taken_[i].values != nullptr;
    }
    bool have_come() {
        for (size_t i = 0; i < from_.size(); ++i)
            if (!has_come(i)) return false;
        unsent_ = mail_.unsent(label_);
        return unsent_.empty();
    }
    // Polls for a moment, and yields meanwhile: a nap would be longer than most waits. With more processes than cores, a
    // polling thread may keep a process from its core. Linux lets another session's process run only at the end of the
    // time slice (sched_autogroup), and mpiexec gives each process a session. So there the thread naps when no other
    // thread has run in its yields.
    bool polls(uint32_t seen) {
        for (double now = seconds(); now - began_ < kPoll && in_vain_ < kInVain;) {
            sched_yield();
            if (mail_.arrivals() != seen) return true;
            const double then = now;
            now = seconds();
            if (now - then < kNobody && mail_.crowded) ++in_vain_;
        }
        return false;
    }

    const std::string name_;
    mutable std::vector<Mailbox::Taken> taken_;  // of each of the ranks
    double began_ = 0;
    Ranks unsent_;
    int in_vain_ = 0;
};

// An exchange in hops. Each combines what comes in the order of the ranks, so that all have the same bits.
class Processes::Hops final : public WaitForVectors {
  public:
    Hops(Processes& processes, std::vector<Hop> hops, Combine combine, const CallId& id, const Contribution& own)
        : WaitForVectors(processes, {Label::kVectors, static_cast<int32_t>(id.phase), id.layer, id.node, id.sequence},
                         id.name, id.timeout),
          combine_(combine),
          id_(id),
          length_(own.length),
          total_{combined(combine, own)},
          hops_(std::move(hops)) {
        std::lock_guard<std::mutex> lock(processes_.mutex_);
        here_ = processes_.here_.insert(processes_.here_.end(), label_);
    }
    ~Hops() override {
        std::lock_guard<std::mutex> lock(processes_.mutex_);
        processes_.here_.erase(here_);
    }

    std::optional<Total> within(double limit) {
        const double until = seconds() + limit;
        try {
            for (; at_ < hops_.size(); ++at_, begun_ = false) {
                if (!std::exchange(begun_, true)) begin();
                if (!comes_until(until)) return std::nullopt;
                end();
            }
        } catch (const std::exception& error) {  // those who wait for this rank elsewhere hear of it, too
            mail_.report(Mailbox::State::kFailed, error.what());
            throw;
        }
        return std::move(total_);
    }

  private:
    void begin() {
        const Hop& hop = hops_[at_];
        mail_.check_open();
        label_.piece = hop.piece;
        if (at_ > 0) allow(kPerHop);
        expect(hop.others);
        mail_.post(label_, total_.values.data(), length_ * sizeof(double), hop.others);
    }
    void end() {
        const bool brings_all = combine_ == Combine::kSideBySide;
        std::vector<Mailbox::Taken> parts = taken();
        check_lengths(parts, brings_all ? length_ / id_.contexts.size() : length_, brings_all);
        const auto place = std::lower_bound(from_.begin(), from_.end(), mail_.rank()) - from_.begin();
        parts.insert(parts.begin() + place,
                     {{std::shared_ptr<void>(), total_.values.data()}, length_ * sizeof(double)});
        if (brings_all) {
            total_ = side_by_side(parts, static_cast<size_t>(place), *id_.agreed);
        } else {
            Contribution rows{{}, length_};
            for (const Mailbox::Taken& part : parts) rows.rows.push_back(part.values.get());
            total_.values = combined(combine_, rows);
        }
    }
    // `several`: each has a multiple of this length.
    void check_lengths(const std::vector<Mailbox::Taken>& parts, size_t length, bool several) {
        const size_t size = length * sizeof(double);
        for (size_t i = 0; i < from_.size(); ++i) {
            if (parts[i].size == size || (several && size > 0 && parts[i].size % size == 0)) continue;
            give_up("in " + name() + ", rank " + std::to_string(from_[i]) + " sent " +
                    std::to_string(parts[i].length()) + " values where rank " + std::to_string(mail_.rank()) + " has " +
                    std::to_string(length) + (several ? " of each replica" : "") +
                    ". All processes must build the same net and cast it alike.");
        }
    }

    const Combine combine_;
    const CallId id_;
    const size_t length_;
    Total total_;  // of this rank and those that it has heard of
    const std::vector<Hop> hops_;
    size_t at_ = 0;
    bool begun_ = false;  // the hop
    std::list<Label>::iterator here_;
};

Processes::Processes(const Mpi& mpi, size_t rank, size_t ranks)
    : mail_(mpi, rank, ranks), hops_(hops()), gradients_(*this) {}

// The hops of a reduction, one for each prime factor of the number of ranks, so that many of them send few messages: of 12,
// pairs of neighbours, then pairs of these, and then three of those. Each holds the total of 1, 2, 4 ... ranks, and swaps it
// with those that hold totals of as many.
std::vector<Processes::Hop> Processes::hops() const {
    const size_t own = mail_.rank(), ranks = mail_.everybody.size();
    std::vector<Hop> hops;
    for (size_t apart = 1, factor = 2; apart < ranks; apart *= factor) {
        while (ranks / apart % factor != 0) ++factor;
        Ranks all;
        for (size_t i = 0; i < factor; ++i) all.push_back(own + i * apart - own / apart % factor * apart);
        hops.push_back({static_cast<int64_t>(apart), without(all, own)});
    }
    return hops;
}

Underway Processes::begin(Combine combine, const CallId& id, const Contribution& own) {
    const Agreed* const agreed = id.agreed.get();
    if (agreed == nullptr)
        throw Failure(
            "the processes have not agreed on this layer, because nothing has announced this call to them: call "
            "the layer itself, or a Gluon block that contains it.");
    std::vector<Hop> way = hops_;
    if (combine == Combine::kSideBySide) {
        const size_t replicas = id.contexts.size();
        if (!agreed->ranks.empty() && replicas != agreed->replicas) {  // they form groups of their own
            const std::vector<int>& groups = agreed->groups;
            const std::string reach = agreed->ranks.size() > 1 ? "reach from " + mail_.name_of(mail_.rank()) : "";
            if (!reach.empty() ||
                replicas % static_cast<size_t>(std::count(groups.begin(), groups.end(), groups[0])) != 0)
                throw Failure("groups " + (reach.empty() ? "do not divide these" : reach + " to others") + ", so all " +
                              std::to_string(agreed->replicas) +
                              " devices of this process take part in every step, not " + std::to_string(replicas) +
                              ": call the layer on all of them.");
            return Exchange::begin(combine, id, own);
        }
        way = {{0, without(agreed->ranks.empty() ? mail_.everybody : agreed->ranks, mail_.rank())}};
    }
    const auto hops = std::make_shared<Hops>(*this, std::move(way), combine, id, own);
    return [hops](double seconds) { return hops->within(seconds); };
}

std::vector<std::string> Processes::bytes_of(const Label& label, const std::string& what, double timeout,
                                             const std::vector<std::string>& own) {
    mail_.check_open();
    const size_t rank = mail_.rank();
    const Ranks others = without(mail_.everybody, rank);
    for (size_t i = 0; i < own.size(); ++i)
        mail_.post(label, own[i].data(), own[i].size(), own.size() == 1 ? others : without({i}, rank));
    WaitForVectors wait(*this, label, what, timeout);
    wait.expect(others);
    wait.comes_until(kForEver);
    std::vector<std::string> all;
    for (const Mailbox::Taken& part : wait.taken())
        all.emplace_back(reinterpret_cast<const char*>(part.values.get()), part.size);
    all.insert(all.begin() + static_cast<int64_t>(rank), own[rank % own.size()]);
    return all;
}

}  // namespace syncbn
