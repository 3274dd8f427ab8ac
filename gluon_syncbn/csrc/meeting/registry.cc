#include "meeting/registry.h"

#include <algorithm>
#include <new>

namespace syncbn {

using Lock = std::lock_guard<std::mutex>;

Registry& registry() {
    static Registry* instance = new Registry;  // outlives the threads that wait at exit
    return *instance;
}

LayerConfigPtr Layer::config() const {
    Lock lock(registry().mutex_);
    return config_;
}

std::shared_ptr<Layer> Registry::create(const std::string& name, const Pooling& pooling) {
    Lock lock(mutex_);
    auto layer = std::make_shared<Layer>(next_id_++, name, pooling);
    renew(*layer);
    layers_[layer->id] = layer;
    return layer;
}

std::shared_ptr<Layer> Registry::find(int64_t id) const {
    Lock lock(mutex_);
    const auto it = layers_.find(id);
    return it == layers_.end() ? nullptr : it->second;
}

void Registry::drop(int64_t id) {
    Lock lock(mutex_);
    const auto it = layers_.find(id);
    if (it == layers_.end()) return;
    sharing_ -= it->second->config_->per_context > 1;
    layers_.erase(it);
}

std::vector<std::shared_ptr<Layer>> Registry::all() const {
    Lock lock(mutex_);
    std::vector<std::shared_ptr<Layer>> out;
    for (const auto& entry : layers_) out.push_back(entry.second);
    return out;
}

std::shared_ptr<Layer> Registry::of_token(const std::string& token) const {
    const bool mine = !process.empty() && token.compare(0, process.size(), process) == 0;
    return mine ? find(std::stoll(token.substr(process.size()))) : nullptr;
}

void Registry::place(Layer& layer, std::vector<std::string> contexts, size_t replicas) {
    bool same = false;
    change(layer, [&](Layer::Own& own) {
        same = own.contexts == contexts && own.replicas == replicas;
        own.contexts = std::move(contexts);
        own.replicas = replicas;
    });
    // `reset_ctx` to the same contexts does not wait, and a step may be running.
    if (!same) layer.rendezvous.forget();
}

Settings Registry::defaults() const {
    Lock lock(mutex_);
    return defaults_;
}

void Registry::forked() {
    new (&mutex_) std::mutex;  // a thread that the child does not have may have held it
    for (const auto& layer : all()) layer->rendezvous.forked();
}

void Registry::renew(Layer& layer) {
    const Layer::Own& own = layer.own_;
    auto config = std::make_shared<LayerConfig>();
    static_cast<Settings&>(*config) = defaults_;
    if (own.timeout > 0) config->timeout = own.timeout;
    if (own.exchange.host != nullptr) config->exchange = own.exchange;
    config->layer = layer.id;
    config->name = layer.name;
    config->sharing = sharing_of(layer.pooling);
    config->contexts = own.contexts;
    config->replicas = own.replicas;
    const size_t contexts = own.contexts.size();
    config->per_context = contexts == 0 || own.replicas % contexts != 0 ? 0 : own.replicas / contexts;
    const auto& devices = config->devices;
    for (const std::string& context : own.contexts)
        if (devices.empty() || std::find(devices.begin(), devices.end(), context) != devices.end())
            config->taking_part.push_back(context);
    sharing_ += (config->per_context > 1) - (layer.config_ != nullptr && layer.config_->per_context > 1);
    layer.config_ = std::move(config);
}

}  // namespace syncbn
