// Keeps all layers and their settings, and where the replicas of each meet: see meeting.h.
//
// The registry has one lock. It is held while settings are read or written, but never during a wait, and no other lock
// is taken under it. The settings of a layer are handed out as a snapshot that never changes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lock.h"
#include "meeting/meeting.h"
#include "meeting/tape.h"
#include "pooling/pooling.h"

namespace syncbn {

// Holds the meetings whose forwards are not done.
class Layer : public LayerIdentity {
  public:
    std::atomic<bool> spoke_of_one_value{false};  // a warning comes once

    Layer(int64_t id, const std::string& name, const Pooling& pooling) : LayerIdentity{id, name, pooling} {}

    LayerConfigPtr config() const;

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
    // The forwards in executors. With memory mirroring (MXNET_BACKWARD_DO_MIRROR, or `force_mirroring` on a node), an
    // executor has an operator more for a node, with a state of its own, which computes the forward again for a backward
    // (src/executor/graph_executor.cc). Nothing tells the two apart, nor which of them runs first: the first one is new.
    // Called when all operators of earlier forwards have run on this context, and those of the next one come now.
    void announce_forward(const std::string& context);
    // Sets the recall of the forward that begins now. Returns false, and leaves it, if no executor has announced any.
    bool begin_forward(const std::string& context, Recall* recall);
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
    friend class Registry;
    using Lock = std::unique_lock<std::mutex>;
    using Key = std::pair<int64_t, std::string>;  // node and context

    // Refuses a call on a layer that is in the middle of a step of another thread. The caller holds the lock, here and
    // in the next function.
    void check_step(const LayerConfig& config, const Key& key);
    Place join_locked(const LayerConfigPtr& config, const Key& key);
    // Called by the last replica: begins the exchange, and returns whether there is a total, for which it waits at most so
    // many seconds.
    bool exchange(Meeting& meeting, Phase& phase, double seconds) const;

    LayerConfigPtr config_ = std::make_shared<LayerConfig>();  // the registry's lock guards it
    mutable Mutex mutex_;                                      // guards the rest
    std::deque<std::shared_ptr<Meeting>> open_;                // until they are settled, too
    std::map<Key, std::deque<Place>> announced_;
    std::map<Key, std::shared_ptr<Scope>> last_;      // the scope of the last call
    std::map<int64_t, int64_t> calls_, before_seed_;  // numbers of calls, of each node
    struct Forwards {
        int announced = 0;
        std::shared_ptr<Memo> last;
    };
    std::map<std::string, Forwards> forwards_;  // of each context
    std::atomic<bool> is_announced_{false};     // some calls have been: else no forward takes the lock for these
};

class Registry {
  public:
    std::shared_ptr<Layer> create(const std::string& name, const Pooling& pooling) {
        Lock lock(mutex_);
        auto layer = std::make_shared<Layer>(next_id_++, name, pooling);
        renew(*layer, [](LayerConfig&) {});
        return layers_[layer->id] = layer;
    }
    // Returns null if it is gone.
    std::shared_ptr<Layer> find(int64_t id) const {
        Lock lock(mutex_);
        const auto it = layers_.find(id);
        return it == layers_.end() ? nullptr : it->second;
    }
    // Operators in flight keep it alive.
    void drop(int64_t id) {
        Lock lock(mutex_);
        layers_.erase(id);
    }
    std::vector<std::shared_ptr<Layer>> all() const {
        Lock lock(mutex_);
        std::vector<std::shared_ptr<Layer>> out;
        for (const auto& entry : layers_) out.push_back(entry.second);
        return out;
    }

    Settings defaults() const {
        Lock lock(mutex_);
        return defaults_;
    }
    // Changes the defaults, or the settings of a layer, by a function of them.
    template <typename Work>
    void change(const Work& work) {
        Lock lock(mutex_);
        work(defaults_);
        for (const auto& entry : layers_) renew(*entry.second, [](LayerConfig&) {});
    }
    template <typename Work>
    void change(Layer& layer, const Work& work) {
        Lock lock(mutex_);
        renew(layer, work);
    }

  private:
    friend class Layer;
    using Lock = std::lock_guard<std::mutex>;

    // Makes the layer's next config; the caller holds the lock.
    template <typename Work>
    void renew(Layer& layer, const Work& work) {
        auto config = std::make_shared<LayerConfig>(*layer.config_);
        work(*config);
        static_cast<Settings&>(*config) = defaults_;
        if (config->own_timeout > 0) config->timeout = config->own_timeout;
        if (config->own_exchange.host != nullptr) config->exchange = config->own_exchange;
        config->taking_part.clear();
        const auto& devices = config->devices;
        for (const std::string& context : config->contexts)
            if (devices.empty() || std::find(devices.begin(), devices.end(), context) != devices.end())
                config->taking_part.push_back(context);
        layer.config_ = std::move(config);
    }

    mutable Mutex mutex_;  // guards everything below, and the settings of the layers
    std::map<int64_t, std::shared_ptr<Layer>> layers_;
    int64_t next_id_ = 1;
    Settings defaults_;
};

inline Registry& registry() {
    static Registry* instance = new Registry;  // outlives the threads that wait at exit
    return *instance;
}

inline LayerConfigPtr Layer::config() const {
    Registry::Lock lock(registry().mutex_);
    return config_;
}

}  // namespace syncbn
