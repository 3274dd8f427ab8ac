// What the whole process shares: its layers, their defaults, and whether the step has failed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace syncbn {

class Layer;
struct Pooling;

// What leaves shared memory. Sums `contexts` rows of `length` values into `out`; called by one thread per phase.
// Returns 0, or writes the reason into `error`.
using Exchange = int (*)(int64_t layer, int64_t contexts, int64_t length,
                         const double* rows,  // [contexts][length]
                         double* out,         // [length]
                         char* error, int64_t error_size);

// A step that cannot be finished. The message is for the user.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Process {
    std::mutex mutex;  // guards everything here, and every layer's meetings
    std::map<int64_t, std::shared_ptr<Layer>> layers;
    int64_t next_layer = 1;
    double timeout = 300;  // seconds
    Exchange hook = nullptr;
    bool hook_by_default = false;
    std::vector<std::string> devices;  // only these take part; empty means all
    uint64_t seed = 0;                 // of the permutations
    std::string failure;               // the first reason why the step has failed; empty where all is well

    void fail(const std::string& reason) {
        if (failure.empty()) failure = reason;
    }
};

using Lock = std::unique_lock<std::mutex>;

Process& process();

// ---- the same with the lock, for those outside -------------------------------------------------------------

std::shared_ptr<Layer> create_layer(const std::string& name, const Pooling& pooling);
std::shared_ptr<Layer> find_layer(int64_t id);  // null where it is gone
// A layer's name in a graph. No other process has the same one, so that a graph that was saved is recognised.
std::string token_of(const Layer& layer);
std::shared_ptr<Layer> layer_of_token(const std::string& token);
void drop_layer(int64_t id);
int64_t count_layers();

void set_default_timeout(double seconds);
void set_exchange_hook(Exchange hook, bool by_default);
void set_devices(std::vector<std::string> contexts);
// Draws the permutations of all layers from here, starting with their first call.
void set_seed(uint64_t seed);

// Ends every wait, and every later one until `reset`, with this reason. The first reason stays.
void fail(const std::string& reason);
std::string failure();
// Forgets the failure and all unfinished meetings. Nothing may be in flight.
void reset();

}  // namespace syncbn
