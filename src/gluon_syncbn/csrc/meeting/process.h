// What the whole process shares: its layers, their defaults, and whether the step has failed.
#pragma once

#include <atomic>
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

// What replicas hand in, put together: summed up, or side by side in the order of the replicas.
struct Total {
    std::vector<double> values;
    size_t first = 0;  // of `values` that are of this process
    int64_t key = 0;   // of the layer, the same in every process
};

// Which handing-in this is, the same in every process.
struct Ticket {
    int64_t layer, node, call, phase;
};

// How far an exchange reaches.
enum Reach : int { kMemory = 0, kContexts = 1, kProcesses = 2, kDefault = -1 };

// What becomes of rows: moments are merged into those of all their values, sums are added; one row from each process is
// put beside those of the others.
enum class Reduction : int { kMerge = 0, kAdd = 1, kGather = 2 };

// What leaves shared memory: a reduction over the rows of all processes. Called by one thread per phase, of which there
// may be several at once. Returns 0 and leaves the total in `out`, or writes the reason into `error`.
using Hook = int (*)(const Ticket* ticket, int reduction, int64_t rows, int64_t length,
                     const double* values,  // [rows][length]
                     Total* out, char* error, int64_t error_size);

// A step that cannot be finished. The message is for the user.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Process {
    std::mutex mutex;  // guards everything here, and every layer's meetings
    std::map<int64_t, std::shared_ptr<Layer>> layers;
    int64_t next_layer = 1;
    double timeout = 300;              // seconds
    Hook hook = nullptr;               // set once, before the first call
    Reach reach = kMemory;             // of layers that do not say
    std::vector<std::string> devices;  // only these take part; empty means all
    uint64_t seed = 0;                 // of the permutations
    std::string failure;               // the first reason why the step has failed; empty where all is well
    std::atomic<bool> closed{false};   // the process ends, and nothing runs any more
    bool forking = false;  // on a thread that is in the middle of a step, so that its replicas cannot all be called

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
// True where some layer has several replicas on a context.
bool contexts_are_shared();

void set_default_timeout(double seconds);
// Seconds that this layer waits, or with 0 any layer that does not say.
double timeout_of(int64_t layer);
void set_hook(Hook hook);
void set_default_reach(Reach reach);
void set_devices(std::vector<std::string> contexts);
// Draws the permutations of all layers from here, starting with their first call.
void set_seed(uint64_t seed);

// Ends every wait, and every later one until `reset`, with this reason. The first reason stays.
void fail(const std::string& reason);
std::string failure();
// True where an error says already which layer it is about.
bool names_layer(const std::string& error);
// Forgets the failure and all unfinished meetings. Nothing may be in flight.
void reset();

// The process ends: whatever comes to run is a failure.
void close();
// Before a fork, which waits for all that is in flight, and after it. `inside`: the thread that forks is in a step.
void set_forking(bool inside);
// In the child, whose one thread finds nothing in flight.
void forked();

}  // namespace syncbn
