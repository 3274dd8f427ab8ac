#include "meeting/meeting.h"

#include <chrono>
#include <optional>
#include <sstream>
#include <utility>

#include "log.h"
#include "meeting/diagnosis.h"

namespace syncbn {
namespace {

const char* const kForgotten =
    "the step was reset (gluon_syncbn.reset, or a new step of another thread after a failure) before all replicas "
    "arrived.";
constexpr double kGrace = 2;         // seconds that an exchange gets to report its own failure
constexpr double kDoubtAfter = 0.5;  // seconds; the next doubt comes after twice as many
constexpr double kAskAfter = 0.2;    // seconds: replicas that are about to come seldom take longer

// Fails the step of a meeting. If that step has been forgotten, only the meeting fails, and not the current step.
void fail_here(Meeting& meeting, const Failure& failure) {
    (step().number == meeting.step ? step() : meeting.own_failure).fail(failure);
    meeting.changed->notify_all();
}

std::shared_ptr<const Failure> failure_of(const Meeting& meeting) {
    const auto own = meeting.own_failure.failure();
    return own != nullptr ? own : step().failure();
}

[[noreturn]] void fail_and_throw(Meeting& meeting, const Failure& failure) {
    fail_here(meeting, failure);
    throw Failure(*failure_of(meeting));
}

void throw_if_failed(const Meeting& meeting) {
    if (const auto failure = failure_of(meeting)) throw Failure(*failure);
}

std::string name_of_call(const Meeting& meeting, const Phase& phase) {
    return (phase.number == 0 ? "forward of call " : "backward of call ") + std::to_string(meeting.sequence + 1);
}

void check_equal(Meeting& meeting, const Phase& phase, size_t position, const Part& own) {
    for (size_t other = 0; other < meeting.replicas(); ++other) {
        const auto& entry = phase.entries[other];
        if (!entry || (entry->channels == own.channels && entry->type == own.type)) continue;
        std::ostringstream why;
        why << meeting.contexts()[position] << " came with " << own.channels << " channels of " << name_of(own.type)
            << ", " << meeting.contexts()[other] << " with " << entry->channels << " channels of "
            << name_of(entry->type) << ". All replicas must run the same net on data of the same type.";
        fail_and_throw(meeting, {meeting.layer.name, "", "", why.str()});
    }
}

// (3)
Underway begin_exchange(const Meeting& meeting, Phase& phase) {
    Exchange& exchange = *meeting.exchange;
    const LayerIdentity& layer = meeting.layer;
    const LayerConfig& config = *meeting.config;
    const CallId id{meeting.draw.layer, meeting.draw.node, meeting.sequence,           phase.number,
                    layer.name.c_str(), config.timeout,    config.agreed_by(exchange), config.taking_part};
    if (exchange.on_devices() || sharing_of(layer.pooling) == Sharing::kEach) {
        std::vector<cuda::OnDevice> devices;
        for (const auto& part : phase.entries) {
            phase.row.insert(phase.row.end(), part->values.begin(), part->values.end());
            if (exchange.on_devices()) devices.push_back(*part->device);
        }
        return exchange.begin(Combine::kSideBySide, id, {{phase.row.data()}, phase.row.size(), std::move(devices)});
    }
    Contribution own{{}, phase.entries[0]->values.size()};
    for (const auto& part : phase.entries) own.rows.push_back(part->values.data());
    return exchange.begin(phase.number == 0 ? Combine::kMerge : Combine::kAdd, id, own);
}

// Runs under the layer's lock, also when all have arrived: the last one computes the total, with its own time
// limit.
class WaitForReplicas : public Wait {
  public:
    WaitForReplicas(Meeting& meeting, Phase& phase, size_t position)
        : Wait(meeting.config->timeout),
          meeting_(meeting),
          phase_(phase),
          position_(position),
          call_(name_of_call(meeting, phase)) {}
    ~WaitForReplicas() override { long_waits->end(this); }

  protected:
    void throw_if_failed() override {  // (5)
        const auto failure = failure_of(meeting_);
        if (failure == nullptr) return;
        if (!failure->layer.empty()) throw Failure(*failure);
        throw Failure(layer_, "", call_, describe(meeting_, phase_) + ". " + failure->reason);
    }
    [[noreturn]] void give_up(const std::string& text) override {  // (6)
        const auto first = meeting_.full() && !all_here() && !is_asked_to_end() ? long_waits->first() : std::nullopt;
        if (first)
            fail_and_throw(meeting_, {first->layer, "", first->call,
                                      first->state + ". Nobody has called the layer there. " + kCallAll +
                                          long_waits->meanwhile(*first)});
        fail_and_throw(meeting_, {layer_, "", call_, text + long_waits->meanwhile(as_long())});
    }
    void warn(const std::string& text) override {
        if (!std::exchange(phase_.warned, true)) log(Level::kWarning, Failure(layer_, "", call_, text).what());
    }
    bool is_asked_to_end() override { return Wait::is_asked_to_end() || (step().exiting && !complete_); }
    void check_others() override;
    std::string state() override {
        if (!all_here()) return describe(meeting_, phase_);
        const char* const within = meeting_.exchange->on_devices() ? "NCCL" : "The KVStore";
        return describe(meeting_, phase_) + ". " +
               (meeting_.exchange->spans_processes() ? "The exchange with the other processes" : within) +
               " has not answered";
    }
    std::string advice() override {
        return all_here() ? "That includes the wait for the replicas. If it is only slow, raise the timeout."
                          : likely_cause(meeting_, phase_);
    }

  private:
    LongWait as_long() const {
        return {began_,
                meeting_.contexts()[position_],
                replicas_of(meeting_, phase_, false),
                layer_,
                call_,
                describe(meeting_, phase_),
                meeting_.full()};
    }
    bool all_here() const { return phase_.arrived == meeting_.replicas(); }

    Meeting& meeting_;
    const std::string& layer_ = meeting_.layer.name;
    Phase& phase_;
    const size_t position_;
    const std::string call_;
    std::string seen_;  // the replicas that are here, and what those wait for that could call the others
    double seen_since_ = 0;
    const double began_ = seconds();
    double doubts_after_ = kDoubtAfter;
    bool complete_ = false;
};

void WaitForReplicas::check_others() {
    if (all_here()) {
        // An exchange between processes has a limit of its own in each of its waits, and knows who is missing. A KVStore is
        // code of others.
        const bool is_bounded = meeting_.exchange->spans_processes();
        if (!std::exchange(complete_, true)) extend(is_bounded ? kForEver : meeting_.config->timeout, kGrace);
        return;
    }
    if (waited() >= kAskAfter) long_waits->note(this, as_long());
    if (meeting_.full()) {
        if (waited() < doubts_after_) return;
        doubts_after_ *= 2;
        return log(Level::kDoubt, "");
    }
    if (step().forking)
        give_up(state() + ", and the process was forked (os.fork, multiprocessing, subprocess with preexec_fn). " +
                "Fork before a step or after it, not between the calls of its replicas.");
    if (step().exiting) end_as_asked();
    const Callers others = waited() < kAskAfter ? Callers() : callers(began_);
    if (seen_ != state() + others.wait) {  // a replica that was called just now is on the way
        seen_ = state() + others.wait;
        seen_since_ = waited();
    }
    if (!others.wait.empty() && waited() - seen_since_ >= others.patience)
        give_up(state() + ". Nobody has called the layer there, and " + others.wait + ". " + kCallAll);
}

void refuse(const std::string& layer, const std::string& context, Scope& caller, Scope& other) {
    if (step().failure() != nullptr) return;  // the call fails anyway, for the first reason
    const std::string why =
        caller.thread == other.thread
            ? "in a new step, while an earlier step of that thread has not called all replicas. After a step that "
              "broke off, call gluon_syncbn.reset()."
            : "while it is in a step of thread '" + other.thread +
                  "', and the replicas of the two would meet. Hold one lock around each whole step (record, backward, "
                  "update), or let each thread call one replica.";
    const Failure failure(layer, context, "", "thread '" + caller.thread + "' calls the layer " + why);
    caller.why_ended.fail(failure);
    other.why_ended.fail(failure);
    step().fail(failure);
    throw Failure(failure);
}

}  // namespace

void Layer::check_step(const LayerConfig& config, const Key& key) {
    const std::string& context = key.second;
    const std::shared_ptr<Scope>& scope = current_scope();
    scope->throw_if_ended();
    // Without others that it could meet, nothing tells steps apart.
    if (config.taking_part.size() == 1 && !config.exchange.host->spans_processes()) return;
    // The last caller's thread may not have passed its call to MXNet's engine, which orders calls anew for each
    // context.
    std::shared_ptr<Scope>& last = last_[key];
    if (last && last != scope && last->open) refuse(name, context, *scope, *last);
    if (scope->open) {
        const Meeting* own = nullptr;  // the first in which this replica is free
        for (const auto& meeting : open_) {
            if (meeting->draw.node != key.first) continue;
            const auto scope_on = [](const Meeting& meeting, const std::string& context) -> Scope* {
                const size_t position = meeting.position_of(context);
                return position < meeting.replicas() ? meeting.scopes[position].get() : nullptr;
            };
            Scope* const before = scope_on(*meeting, context);
            if (before == nullptr && own == nullptr) own = meeting.get();
            for (size_t i = 0; i < meeting->replicas(); ++i) {
                if (meeting->scopes[i] != scope) continue;
                // This step has called another replica where another step has called this one. Or here, another step
                // has called a replica that this step has called later.
                Scope* const other = own == nullptr ? before : scope_on(*own, meeting->contexts()[i]);
                if (other != nullptr && other != scope.get()) refuse(name, context, *scope, *other);
            }
        }
        scope->step = step().number;
    }
    last = scope;
}

Place Layer::join_locked(const LayerConfigPtr& config, const Key& key) {  // (1)
    const auto& contexts = config->taking_part;
    if (std::find(contexts.begin(), contexts.end(), key.second) == contexts.end())
        step().fail(Failure(name, key.second, "", why_not_here(*config, key.second)));
    if (step().failure() != nullptr) return {};
    const auto over = [](const auto& meeting) { return meeting->settled() && meeting->phases[0].total != nullptr; };
    open_.erase(std::remove_if(open_.begin(), open_.end(), over), open_.end());

    const auto has_room = [&](const auto& meeting) {
        const size_t position = meeting->position_of(key.second);
        return meeting->draw.node == key.first && position < meeting->replicas() && !meeting->scopes[position];
    };
    auto found = std::find_if(open_.begin(), open_.end(), has_room);
    if (found == open_.end()) {
        auto exchange = chosen(config->exchange, config->taking_part);
        const int64_t sequence = calls_[key.first]++;
        const auto agreed = config->agreed_by(*exchange);
        const Draw draw{config->seed, agreed ? agreed->key : id, key.first, sequence - before_seed_[key.first]};
        found = open_.insert(found, std::make_shared<Meeting>(*this, config, draw, sequence, std::move(exchange)));
    }
    const size_t position = (*found)->position_of(key.second);
    (*found)->scopes[position] = current_scope();
    return {*found, position};
}

Place Layer::join(const LayerConfigPtr& config, const std::string& context, int64_t node, bool announces) {
    const Lock lock(mutex_);
    const Key key{node, context};
    check_step(*config, key);
    const Place place = join_locked(config, key);
    if (announces && place.meeting) announced_[key].push_back(place);
    return place;
}

Place Layer::announced(const LayerConfigPtr& config, const std::string& context, int64_t node) {
    const Lock lock(mutex_);
    if (announced_.empty()) {
        step().fail(Failure(name, context, "",
                            "an executor of simple_bind or bind does not know the replicas that "
                            "train with it: train the symbol in a Module or a SymbolBlock."));
        step().throw_if_failed();
    }
    std::deque<Place>& places = announced_[{node, context}];
    if (places.empty()) places.push_back(join_locked(config, {node, context}));
    Place place = std::move(places.front());
    places.pop_front();
    step().throw_if_failed();
    if (!place.meeting) throw Failure(kForgotten);
    return place;
}

void Layer::fail(Meeting& meeting, const Failure& failure) const {
    Lock lock(mutex_);
    fail_here(meeting, failure);
}

bool Layer::contribute(const Place& place, Part part, double seconds) {
    Meeting& meeting = *place.meeting;
    Lock lock(mutex_);
    throw_if_failed(meeting);
    Phase& phase = meeting.phases[place.phase];
    phase.number = place.phase;
    if (phase.entries.empty()) phase.entries.resize(meeting.replicas());
    check_equal(meeting, phase, place.position, part);
    phase.entries[place.position] = std::move(part);  // (2)
    if (++phase.arrived < meeting.replicas()) {
        const auto ended = [&] { return phase.total != nullptr || failure_of(meeting) != nullptr; };
        meeting.changed->wait_for(lock, std::chrono::duration<double>(seconds), ended);
        return phase.total != nullptr;
    }
    phase.last = place.position;
    lock.unlock();  // no other thread touches a complete phase
    return exchange(meeting, phase, seconds);
}

bool Layer::exchange(Meeting& meeting, Phase& phase, double seconds) const {
    std::optional<Total> total;
    try {
        if (!phase.underway) phase.underway = begin_exchange(meeting, phase);
        total = phase.underway(seconds);
    } catch (const std::exception& error) {
        Lock lock(mutex_);
        fail_and_throw(meeting, {meeting.layer.name, "", "", reason_of(error)});
    }
    if (!total) return false;
    Lock lock(mutex_);
    throw_if_failed(meeting);
    total->stride = phase.row.size() / meeting.replicas();
    phase.total = std::make_shared<const Total>(std::move(*total));
    phase.entries.clear();
    phase.row.clear();
    phase.underway = nullptr;
    meeting.changed->notify_all();
    return true;
}

std::shared_ptr<const Total> Layer::total(const Place& place) const {
    Meeting& meeting = *place.meeting;
    Lock lock(mutex_);
    Phase& phase = meeting.phases[place.phase];
    if (!phase.total && phase.arrived == meeting.replicas() && phase.last == place.position) {
        lock.unlock();
        exchange(meeting, phase, kForEver);
        lock.lock();
    }
    if (!phase.total) {
        WaitForReplicas wait(meeting, phase, place.position);
        while (!phase.total) {
            meeting.changed->wait_for(lock, kSlice);
            if (!phase.total) wait.look();
        }
    }
    return phase.total;  // (4)
}

void Layer::forget() {
    Lock lock(mutex_);
    for (const auto& meeting : open_) {
        for (const auto& scope : meeting->scopes) {
            if (meeting->settled() || !scope || !scope->open || scope == current_scope()) continue;
            scope->why_ended.fail(
                Failure("the step of thread '" + scope->thread +
                        "' is over: another thread has called gluon_syncbn.reset() before all replicas were "
                        "called."));
        }
        if (step().number != meeting->step && !meeting->phases[0].total) fail_here(*meeting, Failure(kForgotten));
    }
    open_.clear();
    for (auto& [key, places] : announced_) places.clear();
    last_.clear();
}

}  // namespace syncbn
