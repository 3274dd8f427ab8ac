// Which layers there are, and what holds for each of them.
//
// The registry has one lock. It is held for as long as settings are read or written, never while anything waits, and no
// other lock is taken under it. What holds for a layer is handed out as a snapshot that nobody changes any more.
#pragma once

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
    MeetingRoom room;  // where its replicas meet; with a lock of its own

    Layer(int64_t id, std::string name, Pooling pooling) : id(id), name(std::move(name)), pooling(pooling) {}

    // What holds now.
    std::shared_ptr<const Terms> terms() const;

  private:
    friend class Registry;
    // All of these belong to the registry's lock.
    std::vector<std::string> contexts_;  // that hold the parameters, each once
    size_t replicas_ = 0;
    double timeout_ = 0;  // seconds; 0: as the registry says
    Asked exchange_;      // of its own; without a host: as the registry says
    std::shared_ptr<const Terms> terms_;
};

class Registry {
  public:
    std::shared_ptr<Layer> create(const std::string& name, const Pooling& pooling);
    std::shared_ptr<Layer> find(int64_t id) const;  // null where it is gone
    void drop(int64_t id);                          // operators in flight hold on to their own
    size_t count() const;
    // True where some layer has several replicas on a context.
    bool contexts_are_shared() const;

    // A layer's name in a graph. No other process has the same one, so that a graph that was saved is recognised.
    std::string token_of(const Layer& layer) const;
    std::shared_ptr<Layer> of_token(const std::string& token) const;  // null where it is of another process, or gone

    // The contexts that hold the parameters, and how many replicas they have in all. Forgets unfinished meetings
    // where these are others than before.
    void place(Layer& layer, std::vector<std::string> contexts, size_t replicas);
    void set_timeout(Layer& layer, double seconds);
    void set_exchange(Layer& layer, const Asked& exchange);

    // For layers that do not say.
    void set_default_timeout(double seconds);
    double default_timeout() const;
    void set_default_exchange(const Asked& exchange);
    void set_nonfinite(Nonfinite what);
    // Only these take part; empty means all.
    void set_devices(std::vector<std::string> contexts);
    // Draws the permutations of all layers from here, starting with their first call.
    void set_seed(uint64_t seed);

    // Forgets all unfinished meetings. Nothing may be in flight.
    void forget_meetings();
    // In the child of a fork, whose one thread finds nothing in flight.
    void forked();

  private:
    std::vector<std::shared_ptr<Layer>> all() const;
    void renew(Layer& layer);  // its terms; the caller holds the lock
    void renew_all();

    friend class Layer;
    mutable std::mutex mutex_;  // guards everything here, and the settings of the layers
    std::map<int64_t, std::shared_ptr<Layer>> layers_;
    int64_t next_id_ = 1;
    double timeout_ = 300;  // seconds
    Asked exchange_{memory_exchange()};
    std::vector<std::string> devices_;
    uint64_t seed_ = 0;
    Nonfinite nonfinite_ = Nonfinite::kPropagate;
};

Registry& registry();

}  // namespace syncbn
