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
    LayerConfigPtr config() const;

    // Those of its own.
    struct Own {
        std::vector<std::string> contexts;  // that hold the parameters, each once
        size_t replicas = 0;
        double timeout = 0;  // seconds; 0: the default
        Asked exchange;      // without a host: the default
    };

  private:
    friend class Registry;
    // The registry's lock guards both.
    Own own_;
    LayerConfigPtr config_;
};

class Registry {
  public:
    std::shared_ptr<Layer> create(const std::string& name, const Pooling& pooling);
    std::shared_ptr<Layer> find(int64_t id) const;  // null if it is gone
    void drop(int64_t id);                          // operators in flight keep it alive
    std::vector<std::shared_ptr<Layer>> all() const;
    // Whether some layer has several replicas on a context.
    bool contexts_are_shared() const { return sharing_ > 0; }

    // A layer's name in a graph is this and its number. It is unique among processes, so that a saved graph is recognised.
    std::string process;
    std::shared_ptr<Layer> of_token(const std::string& token) const;  // null: of another process, or gone

    // Sets the contexts that hold the parameters, and the number of their replicas. Forgets unfinished meetings if
    // these have changed.
    void place(Layer& layer, std::vector<std::string> contexts, size_t replicas);
    Settings defaults() const;
    // Changes the defaults, or the settings of a layer, by a function of them.
    template <typename Work>
    void change(const Work& work) {
        std::lock_guard<std::mutex> lock(mutex_);
        work(defaults_);
        for (const auto& entry : layers_) renew(*entry.second);
    }
    template <typename Work>
    void change(Layer& layer, const Work& work) {
        std::lock_guard<std::mutex> lock(mutex_);
        work(layer.own_);
        renew(layer);
    }

    // Called in the child of a fork, whose one thread has nothing in flight.
    void forked();

  private:
    void renew(Layer& layer);  // its config; the caller holds the lock

    friend class Layer;
    mutable std::mutex mutex_;  // guards everything below, and the settings of the layers
    std::map<int64_t, std::shared_ptr<Layer>> layers_;
    int64_t next_id_ = 1;
    std::atomic<int> sharing_{0};  // layers with several replicas on a context
    Settings defaults_;
};

Registry& registry();

}  // namespace syncbn
