// Keeps all layers and their settings.
//
// The registry has one lock. It is held while settings are read or written, but never during a wait, and no other lock
// is taken under it. The settings of a layer are handed out as a snapshot that never changes.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exchange/memory.h"
#include "meeting/meeting.h"
#include "pooling/pooling.h"

namespace syncbn {

class Layer {
  public:
    const int64_t id;
    const std::string name;
    const Pooling pooling;
    Rendezvous rendezvous;                        // where its replicas meet; has a lock of its own
    std::atomic<bool> spoke_of_one_value{false};  // a warning comes once

    Layer(int64_t id, std::string name, Pooling pooling) : id(id), name(std::move(name)), pooling(pooling) {}

    // The current settings.
    std::shared_ptr<const Terms> terms() const;

  private:
    friend class Registry;
    // The registry's lock guards all of these.
    std::vector<std::string> contexts_;  // that hold the parameters, each once
    size_t replicas_ = 0;
    double timeout_ = 0;  // seconds; 0: the registry's default
    Asked exchange_;      // its own; without a host: the registry's default
    std::shared_ptr<const Terms> terms_;
};

class Registry {
  public:
    std::shared_ptr<Layer> create(const std::string& name, const Pooling& pooling);
    std::shared_ptr<Layer> find(int64_t id) const;  // null if it is gone
    void drop(int64_t id);                          // operators in flight keep it alive
    size_t count() const;
    // Whether some layer has several replicas on a context.
    bool contexts_are_shared() const { return sharing_ > 0; }

    // Returns a layer's name in a graph. It is unique among processes, so that a saved graph is recognised.
    std::string token_of(const Layer& layer) const;
    std::shared_ptr<Layer> of_token(const std::string& token) const;  // null: of another process, or gone

    // Sets the contexts that hold the parameters, and the number of their replicas. Forgets unfinished meetings if
    // these have changed.
    void place(Layer& layer, std::vector<std::string> contexts, size_t replicas);
    void set_timeout(Layer& layer, double seconds) {
        change([&] { layer.timeout_ = seconds; }, &layer);
    }
    void set_exchange(Layer& layer, const Asked& exchange) {
        change([&] { layer.exchange_ = exchange; }, &layer);
    }

    // For layers without a timeout, or an exchange, of their own.
    void set_default_timeout(double seconds) {
        change([&] { timeout_ = seconds; });
    }
    double default_timeout() const;
    void set_default_exchange(const Asked& exchange) {
        change([&] { exchange_ = exchange; });
    }
    void set_nonfinite(Nonfinite what) {
        change([&] { nonfinite_ = what; });
    }
    // Sets the contexts that take part; empty means all.
    void set_devices(std::vector<std::string> contexts) {
        change([&] { devices_ = std::move(contexts); });
    }
    // Seeds the permutations of all layers, beginning with their first call.
    void set_seed(uint64_t seed);

    // Forgets all unfinished meetings. Nothing may be in flight.
    void forget_meetings();
    // Called in the child of a fork, whose one thread has nothing in flight.
    void forked();

  private:
    std::vector<std::shared_ptr<Layer>> all() const;
    void renew(Layer& layer);  // its terms; the caller holds the lock
    // Changes settings, of all layers or of one.
    template <typename Work>
    void change(const Work& work, Layer* one = nullptr) {
        std::lock_guard<std::mutex> lock(mutex_);
        work();
        if (one != nullptr) return renew(*one);
        for (const auto& entry : layers_) renew(*entry.second);
    }

    friend class Layer;
    mutable std::mutex mutex_;  // guards everything here, and the settings of the layers
    std::map<int64_t, std::shared_ptr<Layer>> layers_;
    int64_t next_id_ = 1;
    std::atomic<int> sharing_{0};  // layers with several replicas on a context
    double timeout_ = 300;         // seconds
    Asked exchange_{memory_exchange()};
    std::vector<std::string> devices_;
    uint64_t seed_ = 0;
    Nonfinite nonfinite_ = Nonfinite::kPropagate;
};

Registry& registry();

}  // namespace syncbn
