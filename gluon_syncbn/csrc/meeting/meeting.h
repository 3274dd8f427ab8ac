// Lets threads meet: the replicas of a layer contribute their vectors, and all leave with the combined result.
//
//        replica 0          replica 1                      1. join, when a call is issued: take a position in the
//                                                             earliest meeting that has one
//        join ────┐    ┌──── join                          2. contribute the packed vector
//   contribute ──►│ Meeting │◄── contribute                3. the last to arrive calls the exchange with all vectors,
//        wait     │ phase 0 │    exchange                     in the order of the replicas, never in that of arrival
//       total ◄───│         │───► total                    4. all leave with the same total
//                  phase 1, 2 …: the backwards, same positions
//
// A wait ends with the total (4), or with a failure of any replica of the process (5). The waiter itself declares a
// failure (6) if time is up, the process was asked to end, or nobody is left to call a missing replica. After a failure
// nothing is exchanged until `reset`, because no total may come from half of a step.
//
// The n-th calls on all contexts meet. They may come from one thread, or from one thread for each context. A step that
// calls several replicas must have them in the same meetings. While its scope is open, no other step may call the same
// replica:
//
//                  cpu(0)   cpu(1)
//     meeting 1      A        B          A and B have begun at the same time, and each is about to call both:
//     meeting 2      B        A          cpu(0) of A would meet cpu(1) of B
//
// A layer has one lock, which guards its meetings and all their data. Waiting threads release it. The exchange (3)
// runs without it, because no other thread touches a complete phase. Code under the lock may ask `Step` for failures,
// and report them to it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "exchange/exchange.h"
#include "lock.h"
#include "meeting/scope.h"
#include "pooling/pooling.h"
#include "types.h"
#include "waiting/step.h"
#include "waiting/wait.h"

namespace syncbn {

// The treatment of statistics that are not finite: none; the running statistics stay; the step ends.
enum class Nonfinite : int { kPropagate = 0, kSkip = 1, kError = 2 };

struct Settings {
    double timeout = 300;  // seconds
    Asked exchange{std::make_shared<Exchange>()};
    std::vector<std::string> devices;  // contexts that alone may take part; empty means all
    uint64_t seed = 0;                 // of the permutations
    Nonfinite nonfinite = Nonfinite::kPropagate;
};

// What holds for a layer: a snapshot. Python says where the layer is, and what the processes have agreed on. The defaults
// stand in for what the layer has not of its own.
struct LayerConfig : Settings {
    double own_timeout = 0;                // 0: the default
    Asked own_exchange;                    // without a host: the default
    std::vector<std::string> contexts;     // that hold the parameters
    std::vector<std::string> taking_part;  // of these, in the same order
    std::shared_ptr<const Agreed> agreed;  // the last agreement, which holds for one exchange
    const Exchange* agreed_over = nullptr;
    std::shared_ptr<const Agreed> agreed_by(const Exchange& exchange) const {
        return agreed_over == &exchange ? agreed : nullptr;
    }
};
using LayerConfigPtr = std::shared_ptr<const LayerConfig>;

// The contribution of one replica.
struct Part {
    Type type;
    int64_t channels;
    Vector values;  // packed, [slots][...]; for vectors on a GPU, the samples of each slot
    std::shared_ptr<const cuda::OnDevice> device = nullptr;  // vectors on a GPU; its pointers stay valid
};

// One exchange: the forward of a meeting is phase 0, its k-th backward is phase k.
struct Phase {
    int number = 0;
    std::vector<std::optional<Part>> entries;  // [positions] of those that have arrived
    size_t arrived = 0;
    Vector row;                          // of all replicas' vectors, if the exchange takes them side by side
    Underway underway;                   // the running exchange; the last replica to arrive finishes it
    size_t last = 0;                     // the position of the last replica
    bool warned = false;                 // a waiting replica has warned
    std::shared_ptr<const Total> total;  // of all, once it is there
};

// What a layer is, for good.
struct LayerIdentity {
    const int64_t id;
    const std::string name;
    const Pooling pooling;
};

struct Meeting {
    const LayerIdentity layer;    // a copy: the layer may be gone when another one repeats a call (tape.h)
    const LayerConfigPtr config;  // at its beginning
    const Draw draw;              // draw.node: only calls of the same node of a graph meet
    const int64_t sequence;       // its number among the calls of the node, which none has had before
    const std::shared_ptr<Exchange> exchange;
    // [contexts] of the call there; null: it has not come. A position is the index of a context.
    std::vector<std::shared_ptr<Scope>> scopes;
    Meeting(const LayerIdentity& layer, LayerConfigPtr config, const Draw& draw, int64_t sequence,
            std::shared_ptr<Exchange> exchange)
        : layer(layer), config(std::move(config)), draw(draw), sequence(sequence), exchange(std::move(exchange)) {
        scopes.resize(contexts().size());
    }

    const int64_t step = syncbn::step().number;
    FirstFailure own_failure;  // if its step has been forgotten
    std::map<int, Phase> phases;
    Condition changed;

    const std::vector<std::string>& contexts() const { return config->taking_part; }
    size_t replicas() const { return scopes.size(); }
    // Whether every replica has been called.
    bool full() const {
        return std::all_of(scopes.begin(), scopes.end(), [](const auto& scope) { return scope != nullptr; });
    }
    // Whether no later call can be of another step than these.
    bool settled() const {
        return full() && (std::all_of(scopes.begin(), scopes.end(), [&](auto& scope) { return scope == scopes[0]; }) ||
                          std::none_of(scopes.begin(), scopes.end(), [](auto& scope) { return !!scope->open; }));
    }
    // The position of a context; `replicas()` if it takes no part.
    size_t position_of(const std::string& context) const {
        return std::find(contexts().begin(), contexts().end(), context) - contexts().begin();
    }
};

// A replica's place in a meeting. Its forward and its backward meet the same partners.
struct Place {
    std::shared_ptr<Meeting> meeting;
    size_t position = 0;
    int phase = 0;  // that it has reached
};

// Holds the meetings whose forwards are not done.
class Layer : public LayerIdentity {
  public:
    std::atomic<bool> spoke_of_one_value{false};  // a warning comes once

    Layer(int64_t id, const std::string& name, const Pooling& pooling) : LayerIdentity{id, name, pooling} {}

    LayerConfigPtr config() const {
        std::lock_guard<std::mutex> lock(config_mutex_);
        return config_;
    }
    void set_config(LayerConfigPtr config) {
        std::lock_guard<std::mutex> lock(config_mutex_);
        config_ = std::move(config);
    }

    // Called by the thread that issues a call: takes the position of `context` in the earliest meeting of this graph node
    // where it is free. In a failed step takes none; on a context that is none of the layer's, the step fails. Throws
    // Failure if the layer is in the middle of a step of another thread. `announces`: MXNet has made the operator before,
    // and executes it now.
    Place join(const LayerConfigPtr& config, const std::string& context, int64_t node, bool announces = false);
    // Returns the first place that was announced for this node, or joins: a body of a loop runs more often than that. Fails
    // if nobody announces calls of this layer: in an executor of no Module, nobody knows the replicas.
    Place announced(const LayerConfigPtr& config, const std::string& context, int64_t node);
    // Called once for the forward of a call, and once for each of its backwards. Waits at most so long for all replicas
    // and processes; returns whether they have come. A missing one is no failure. The last one calls the exchange.
    bool contribute(const Place& place, Part part, double seconds);
    // Waits for all contributions and returns them: combined, or side by side in the order of their ranks.
    std::shared_ptr<const Total> total(const Place& place) const;
    // A replica has failed: fails the step or, if that has been forgotten, only the meeting.
    void fail(Meeting& meeting, const Failure& failure) const;
    void forget();          // all that has not ended
    void restart_draws() {  // of permutations
        Lock lock(mutex_);
        before_seed_ = calls_;
    }
    // The processes have agreed on the layer, which may have trained here before: from now on its calls, and its draws, have
    // the same numbers in all of them.
    void restart_calls() {
        Lock lock(mutex_);
        calls_.clear();
        before_seed_.clear();
    }

  private:
    using Lock = std::unique_lock<std::mutex>;
    using Key = std::pair<int64_t, std::string>;  // node and context

    // Refuses a call on a layer that is in the middle of a step of another thread. The caller holds the lock, here and
    // in the next function.
    void check_step(const LayerConfig& config, const Key& key);
    Place join_locked(const LayerConfigPtr& config, const Key& key);
    // Called by the last replica: begins the exchange, and returns whether there is a total, for which it waits at most so
    // many seconds.
    bool exchange(Meeting& meeting, Phase& phase, double seconds) const;

    mutable Mutex config_mutex_;  // guards the next one
    LayerConfigPtr config_ = std::make_shared<LayerConfig>();
    mutable Mutex mutex_;                             // guards the rest
    std::deque<std::shared_ptr<Meeting>> open_;       // until they are settled, too
    std::map<Key, std::deque<Place>> announced_;      // with a key for each that ever was
    std::map<Key, std::shared_ptr<Scope>> last_;      // the scope of the last call
    std::map<int64_t, int64_t> calls_, before_seed_;  // numbers of calls, of each node
};

}  // namespace syncbn
