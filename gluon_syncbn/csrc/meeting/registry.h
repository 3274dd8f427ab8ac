// Keeps all layers and their settings.
//
// The registry has one lock. It is held while settings are read or written, but never during a wait, and no other lock
// is taken under it. The settings of a layer are handed out as a snapshot that never changes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
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

class Layer {
  public:
    const int64_t id;
    const std::string name;
    const Pooling pooling;
    Rendezvous rendezvous;                        // where its replicas meet; has a lock of its own
    Forwards forwards;                            // in executors; the same
    std::atomic<bool> spoke_of_one_value{false};  // a warning comes once

    Layer(int64_t id, std::string name, Pooling pooling) : id(id), name(std::move(name)), pooling(pooling) {}

    LayerConfigPtr config() const;

  private:
    friend class Registry;
    LayerConfigPtr config_ = std::make_shared<LayerConfig>();  // the registry's lock guards it
};

class Registry {
  public:
    std::shared_ptr<Layer> create(const std::string& name, const Pooling& pooling) {
        Lock lock(mutex_);
        auto layer = std::make_shared<Layer>(next_id_++, name, pooling);
        renew(*layer, [&](LayerConfig& config) {
            config.layer = layer->id;
            config.name = name;
            config.sharing = sharing_of(pooling);
        });
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

    // A layer's name in a graph is this and its number. It is unique among processes, so that a saved graph is recognised.
    std::string process;
    // Returns the layer of that name; null if it is of another process, or gone.
    std::shared_ptr<Layer> of_token(const std::string& token) const {
        const bool mine = !process.empty() && token.compare(0, process.size(), process) == 0;
        return mine ? find(std::stoll(token.substr(process.size()))) : nullptr;
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
