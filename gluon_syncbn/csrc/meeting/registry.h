// Keeps all layers and their settings.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lock.h"
#include "meeting/meeting.h"
#include "pooling/pooling.h"

namespace syncbn {

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
    using Lock = std::lock_guard<std::mutex>;

    // Makes the layer's next config; the caller holds the lock.
    template <typename Work>
    void renew(Layer& layer, const Work& work) {
        auto config = std::make_shared<LayerConfig>(*layer.config());
        work(*config);
        static_cast<Settings&>(*config) = defaults_;
        if (config->own_timeout > 0) config->timeout = config->own_timeout;
        if (config->own_exchange.host != nullptr) config->exchange = config->own_exchange;
        config->taking_part.clear();
        const auto& devices = config->devices;
        for (const std::string& context : config->contexts)
            if (devices.empty() || std::find(devices.begin(), devices.end(), context) != devices.end())
                config->taking_part.push_back(context);
        layer.set_config(std::move(config));
    }

    mutable Mutex mutex_;  // guards the rest
    std::map<int64_t, std::shared_ptr<Layer>> layers_;
    int64_t next_id_ = 1;
    Settings defaults_;
};

inline Registry& registry() {
    static Registry* instance = new Registry;  // outlives the threads that wait at exit
    return *instance;
}

}  // namespace syncbn
