#include "meeting/process.h"

#include <new>
#include <random>
#include <sstream>

#include "meeting/rendezvous.h"
#include "meeting/stall.h"

namespace syncbn {

Process& process() {
    static Process* instance = new Process;  // outlives the threads that wait at exit
    return *instance;
}

std::shared_ptr<Layer> create_layer(const std::string& name, const Pooling& pooling) {
    Process& p = process();
    Lock lock(p.mutex);
    auto layer = std::make_shared<Layer>(p.next_layer++, name, pooling);
    p.layers[layer->id] = layer;
    return layer;
}

std::shared_ptr<Layer> find_layer(int64_t id) {
    Lock lock(process().mutex);
    const auto it = process().layers.find(id);
    return it == process().layers.end() ? nullptr : it->second;
}

static const std::string& process_token() {
    static const std::string token = [] {
        std::random_device random;
        std::ostringstream out;
        out << std::hex << random() << random() << ':';
        return out.str();
    }();
    return token;
}

std::string token_of(const Layer& layer) { return process_token() + std::to_string(layer.id); }

std::shared_ptr<Layer> layer_of_token(const std::string& token) {
    const std::string& mine = process_token();
    if (token.compare(0, mine.size(), mine) != 0) return nullptr;
    return find_layer(std::stoll(token.substr(mine.size())));
}

void drop_layer(int64_t id) {
    Lock lock(process().mutex);
    process().layers.erase(id);  // operators in flight hold on to their own
}

int64_t count_layers() {
    Lock lock(process().mutex);
    return static_cast<int64_t>(process().layers.size());
}

bool contexts_are_shared() {
    Lock lock(process().mutex);
    for (const auto& layer : process().layers)
        if (layer.second->lanes() > 1) return true;
    return false;
}

void set_default_timeout(double seconds) {
    Lock lock(process().mutex);
    process().timeout = seconds;
}

double timeout_of(int64_t layer) {
    Lock lock(process().mutex);
    const auto it = process().layers.find(layer);
    return it == process().layers.end() ? process().timeout : it->second->timeout();
}

void set_hook(Hook hook) {
    Lock lock(process().mutex);
    process().hook = hook;
}

void set_default_reach(Reach reach) {
    Lock lock(process().mutex);
    process().reach = reach;
}

void set_devices(std::vector<std::string> contexts) {
    Lock lock(process().mutex);
    process().devices = std::move(contexts);
}

void set_seed(uint64_t seed) {
    Process& p = process();
    Lock lock(p.mutex);
    p.seed = seed;
    for (auto& layer : p.layers) layer.second->restart_calls();
}

void fail(const std::string& reason) {
    Lock lock(process().mutex);
    process().fail(reason);
}

std::string failure() {
    Lock lock(process().mutex);
    return process().failure;
}

bool names_layer(const std::string& error) { return error.find("SyncBatchNorm '") != std::string::npos; }

void close() { process().closed = true; }

void set_forking(bool inside) {
    Lock lock(process().mutex);
    process().forking = inside;
}

void forked() {
    Process& p = process();
    new (&p.mutex) std::mutex;  // another thread, which is not here, may have held it
    p.forking = false;
    nobody_left(false);
    reset();
}

void reset() {
    Process& p = process();
    Lock lock(p.mutex);
    p.failure.clear();
    for (auto& layer : p.layers) layer.second->forget_meetings();
}

}  // namespace syncbn
