#include "exchange/turns.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "clock.h"
#include "failure.h"
#include "waiting/step.h"
#include "waiting/wait.h"

namespace syncbn {
namespace {

constexpr int64_t kAtOnce = 3;                         // ballots in vain, until the next one waits for a moment
constexpr auto kPause = std::chrono::milliseconds(2);  // such a moment, which ends with a call that is ready
constexpr double kSkippedAfter = 0.5;                  // seconds after which another call is a skipped step
enum Kind : int64_t { kCalls = 1, kId = 2 };           // of messages

std::atomic<int64_t> channels{0};

}  // namespace

class Turns::WaitForTurn : public Wait {
  public:
    WaitForTurn(Turns& turns, const Ticket& ticket, const Agreed& agreed, const Call& call)
        : Wait(ticket.timeout), turns_(turns), ticket_(ticket), agreed_(agreed), call_(call), began_(seconds()) {}
    double waited() const { return seconds() - began_; }

  protected:
    [[noreturn]] void give_up(const std::string& text) override {
        turns_.processes_.fail(text);
        throw Failure(text);
    }
    void throw_if_failed() override {
        if (const auto failure = step().failure()) give_up(failure->what());
    }
    std::string text(Why why) override;

  private:
    Turns& turns_;
    const Ticket& ticket_;
    const Agreed& agreed_;
    const Call call_;
    const double began_;
};

std::string Turns::WaitForTurn::text(Why why) {
    std::vector<int64_t> ranks;
    {
        const std::lock_guard<std::mutex> lock(turns_.mutex_);
        ranks = turns_.missing_[call_];
    }
    for (int64_t one = 0; ranks.empty() && one < agreed_.processes; ++one)
        if (one != agreed_.rank) ranks.push_back(one);
    std::string missing;
    for (const int64_t one : ranks) missing += (missing.empty() ? "" : ", ") + std::to_string(one);
    const std::string rank = "rank " + std::to_string(agreed_.rank) + " of " + std::to_string(agreed_.processes);
    return text_of_wait(why, ticket_, rank, missing, limit(), Wait::waited());
}

Turns::Turns(Exchange& processes, std::function<std::string()> new_id)
    : processes_(processes), new_id_(std::move(new_id)), channel_(channels++) {}

Agreed Turns::agreed(const Ticket& ticket, size_t here) {
    const std::pair<int64_t, size_t> known{ticket.layer, here};
    {
        const Lock lock(mutex_);
        const auto found = agreed_.find(known);
        if (found != agreed_.end()) return found->second;
    }
    const Agreed agreed = processes_.agreed(ticket, static_cast<int64_t>(here));
    const Lock lock(mutex_);
    return agreed_[known] = agreed;
}

Turn Turns::next(const Ticket& ticket, const DeviceContribution& own) {
    const Agreed agreed = this->agreed(ticket, own.parts.size());
    if (agreed.alone) {
        Turn turn;
        turn.world = own.parts.size();
        turn.counts = own.counts;
        turn.key = agreed.key;
        turn.groups = agreed.groups;
        return turn;
    }
    const Call call{agreed.key, ticket.node, ticket.call, ticket.phase};
    Part part{{}, own.counts};
    for (const cuda::OnDevice& one : own.parts) part.devices.push_back(one.device);
    WaitForTurn wait(*this, ticket, agreed, call);
    Lock lock(mutex_);
    ready_[call] = std::move(part);
    changed_.notify_all();
    while (true) {
        const auto found = numbered_.find(call);
        if (found != numbered_.end()) {
            Turn turn = std::move(found->second);
            numbered_.erase(found);
            return turn;
        }
        if (asks_) {
            changed_.wait_for(lock, kSlice);
            lock.unlock();
        } else {
            asks_ = true;
            const Parts brought = ready_;
            lock.unlock();
            const auto done = [&] {
                lock.lock();
                asks_ = false;
                changed_.notify_all();
            };
            try {
                ask(ticket, agreed, call, brought, wait.waited());
            } catch (...) {
                done();
                throw;
            }
            done();
            if (numbered_.count(call) > 0) continue;
            lock.unlock();
        }
        wait.look();
        lock.lock();
    }
}

void Turns::ask(const Ticket& ticket, const Agreed& agreed, const Call& call, const Parts& brought, double waited) {
    // [key, node, call, phase, devices, counts, ...] of each call
    Vector own;
    for (const auto& [one, part] : brought) {
        own.insert(own.end(), one.begin(), one.end());
        own.insert(own.end(), {static_cast<double>(part.devices.size()), static_cast<double>(part.counts.size())});
        own.insert(own.end(), part.devices.begin(), part.devices.end());
        own.insert(own.end(), part.counts.begin(), part.counts.end());
    }
    std::vector<std::vector<std::pair<Call, Part>>> everyone;  // by rank, each in the order of its calls
    for (const Vector& theirs : processes_.ballot(ticket, kCalls, ballots_, own)) {
        everyone.emplace_back();
        for (auto at = theirs.begin(); at != theirs.end();) {
            std::pair<Call, Part> one;
            std::copy(at, at + 4, one.first.begin());
            const auto devices = at + 6, counts = devices + static_cast<int64_t>(at[4]);
            at = counts + static_cast<int64_t>(at[5]);
            one.second = {{devices, counts}, {counts, at}};
            everyone.back().push_back(std::move(one));
        }
    }
    ++ballots_;
    std::map<Call, std::vector<Part>> agreed_on;
    for (const auto& theirs : everyone)
        for (const auto& [one, part] : theirs) agreed_on[one].push_back(part);
    bool any = false;
    for (const auto& [one, part] : everyone[0]) {
        const std::vector<Part>& parts = agreed_on[one];
        if (parts.size() < everyone.size()) continue;
        any = true;
        Turn turn = turn_of(ticket, agreed, parts);
        turn.key = one[0];
        const Lock lock(mutex_);
        ready_.erase(one);
        missing_.erase(one);
        numbered_[one] = std::move(turn);
    }
    {
        const Lock lock(mutex_);
        for (const auto& [one, part] : brought) {
            if (agreed_on[one].size() == everyone.size()) continue;
            std::vector<int64_t>& missing = missing_[one];
            missing.clear();
            for (size_t rank = 0; rank < everyone.size(); ++rank)
                if (std::none_of(everyone[rank].begin(), everyone[rank].end(),
                                 [&, &sought = one](const auto& theirs) { return theirs.first == sought; }))
                    missing.push_back(static_cast<int64_t>(rank));
        }
    }
    in_vain_ = any ? 0 : in_vain_ + 1;
    if (any) return;
    refuse_a_skipped_step(ticket, agreed, call, everyone, waited);
    if (in_vain_ <= kAtOnce) return;
    Lock lock(mutex_);
    changed_.wait_for(lock, kPause, [&] { return ready_.size() != brought.size(); });
}

Turn Turns::turn_of(const Ticket& ticket, const Agreed& agreed, const std::vector<Part>& parts) {
    Turn turn;
    std::vector<std::vector<int>> devices;
    for (const Part& part : parts) {
        if (static_cast<int64_t>(devices.size()) < agreed.rank) turn.first += part.devices.size();
        turn.world += part.devices.size();
        devices.push_back(part.devices);
        turn.counts.insert(turn.counts.end(), part.counts.begin(), part.counts.end());
    }
    const auto known = static_cast<int64_t>(cliques_.size());
    turn.clique = cliques_.emplace(std::move(devices), known).first->second;
    if (turn.clique == known) {
        Vector own;
        if (agreed.rank == 0) {
            const std::string made = new_id_();
            own.resize((made.size() + sizeof(double) - 1) / sizeof(double));
            std::memcpy(own.data(), made.data(), made.size());
        }
        const Vector id = processes_.ballot(ticket, kId, turn.clique, own)[0];
        turn.id.assign(reinterpret_cast<const char*>(id.data()), id.size() * sizeof(double));
    }
    turn.channel = channel_;
    turn.number = numbers_++;
    return turn;
}

void Turns::refuse_a_skipped_step(const Ticket& ticket, const Agreed& agreed, const Call& call,
                                  const std::vector<std::vector<std::pair<Call, Part>>>& everyone,
                                  double waited) const {
    if (ticket.phase > 0 || waited < kSkippedAfter) return;
    for (size_t rank = 0; rank < everyone.size(); ++rank) {
        const Call* other = nullptr;
        bool there = false;
        for (const auto& [theirs, part] : everyone[rank]) {
            if (theirs[0] != call[0] || theirs[1] != call[1] || theirs[3] != call[3]) continue;
            there = there || theirs == call;
            if (other == nullptr) other = &theirs;
        }
        if (there || other == nullptr) continue;
        const std::string reason = "rank " + std::to_string(agreed.rank) + " is in " + name_of_call(ticket) +
                                   ", but rank " + std::to_string(rank) + " is in number " +
                                   std::to_string((*other)[2] + 1) + ": one of them has skipped or repeated a step.";
        processes_.fail(reason);
        throw Failure(reason);
    }
}

}  // namespace syncbn
