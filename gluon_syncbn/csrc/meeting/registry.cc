#include "meeting/registry.h"

#include <algorithm>
#include <fstream>
#include <new>
#include <sstream>
#include <stdexcept>

namespace syncbn {
namespace {

using Lock = std::lock_guard<std::mutex>;

const std::string& process_token() {
    static const std::string token = [] {
        // Not std::random_device: its code is spread over several versions of the C++ library. A wheel and an old
        // library would each have some of it (tools/old_symbols.py).
        uint64_t number;
        std::ifstream random("/dev/urandom", std::ios::binary);
        if (!random.read(reinterpret_cast<char*>(&number), sizeof number))
            throw std::runtime_error("cannot read /dev/urandom");
        std::ostringstream out;
        out << std::hex << number << ':';
        return out.str();
    }();
    return token;
}

}  // namespace

Registry& registry() {
    static Registry* instance = new Registry;  // outlives the threads that wait at exit
    return *instance;
}

std::shared_ptr<const Terms> Layer::terms() const {
    Lock lock(registry().mutex_);
    return terms_;
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
    sharing_ -= it->second->terms_->per_context > 1;
    layers_.erase(it);
}

size_t Registry::count() const {
    Lock lock(mutex_);
    return layers_.size();
}

std::string Registry::token_of(const Layer& layer) const { return process_token() + std::to_string(layer.id); }

std::shared_ptr<Layer> Registry::of_token(const std::string& token) const {
    const std::string& mine = process_token();
    if (token.compare(0, mine.size(), mine) != 0) return nullptr;
    return find(std::stoll(token.substr(mine.size())));
}

void Registry::place(Layer& layer, std::vector<std::string> contexts, size_t replicas) {
    bool same = false;
    change(
        [&] {
            same = layer.contexts_ == contexts && layer.replicas_ == replicas;
            layer.contexts_ = std::move(contexts);
            layer.replicas_ = replicas;
        },
        &layer);
    // `reset_ctx` to the same contexts does not wait, and a step may be running.
    if (!same) layer.rendezvous.forget();
}

double Registry::default_timeout() const {
    Lock lock(mutex_);
    return timeout_;
}

void Registry::set_seed(uint64_t seed) {
    change([&] { seed_ = seed; });
    for (const auto& layer : all()) layer->rendezvous.restart_calls();
}

void Registry::forget_meetings() {
    for (const auto& layer : all()) layer->rendezvous.forget();
}

void Registry::forked() {
    new (&mutex_) std::mutex;  // a thread that the child does not have may have held it
    for (const auto& layer : all()) layer->rendezvous.forked();
}

std::vector<std::shared_ptr<Layer>> Registry::all() const {
    Lock lock(mutex_);
    std::vector<std::shared_ptr<Layer>> out;
    for (const auto& entry : layers_) out.push_back(entry.second);
    return out;
}

void Registry::renew(Layer& layer) {
    auto terms = std::make_shared<Terms>();
    terms->layer = layer.id;
    terms->name = layer.name;
    terms->contexts = layer.contexts_;
    terms->replicas = layer.replicas_;
    const size_t contexts = layer.contexts_.size();
    terms->per_context = contexts == 0 || layer.replicas_ % contexts != 0 ? 0 : layer.replicas_ / contexts;
    for (const std::string& context : layer.contexts_)
        if (devices_.empty() || std::find(devices_.begin(), devices_.end(), context) != devices_.end())
            terms->taking_part.push_back(context);
    terms->devices = devices_;
    terms->seed = seed_;
    terms->timeout = layer.timeout_ > 0 ? layer.timeout_ : timeout_;
    terms->sharing = sharing_of(layer.pooling);
    terms->nonfinite = nonfinite_;
    terms->asked = layer.exchange_.host != nullptr ? layer.exchange_ : exchange_;
    sharing_ += (terms->per_context > 1) - (layer.terms_ != nullptr && layer.terms_->per_context > 1);
    layer.terms_ = std::move(terms);
}

}  // namespace syncbn
