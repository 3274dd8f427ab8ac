// Defines the interface that combines the statistics of a meeting. A meeting chooses its exchange at its beginning, and
// the last of its replicas to arrive calls it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/collective.h"
#include "exchange/mailbox.h"
#include "pooling/pooling.h"
#include "pooling/statistics.h"
#include "types.h"

namespace syncbn {

// The processes' agreement about a layer. With groups, it also says which others share some with this one.
struct Agreed : Reach {
    int64_t key = 0;      // of the layer, the same in every process
    size_t replicas = 0;  // of this process
};

// Identifies a contribution: the numbers are the same in every process, and none comes again. Also has the layer's name,
// and its timeout in seconds.
struct CallId {
    int64_t layer, node, sequence, phase;
    const char* name;
    double timeout;
    std::shared_ptr<const Agreed> agreed;      // for an exchange between processes
    const std::vector<std::string>& contexts;  // of the contributions of this process
};

// The contribution of this process: a vector for each context. Without a combination, one vector for all contexts.
struct Contribution {
    std::vector<const double*> rows;
    size_t length;  // of each row
    // Of replicas on GPUs, in their order; then the row has the samples of each slot, side by side.
    std::vector<cuda::OnDevice> devices = {};
};
Vector combined(Combine combine, const Contribution& own);

// The combined contributions of the replicas of all processes.
struct Total {
    Vector values;
    size_t first = 0;  // index of this process's first value
    // The group of each replica whose vector is here, from 0, if the exchange knows the groups of all processes.
    std::vector<int> groups = {};
    size_t stride = 0;  // between the first values of its replicas; 0 where the total is the same for all
};

// An exchange that this process has contributed to: returns its total once, if that is there within so many seconds.
// Leaving it early means a failure, which must be reported elsewhere.
using Underway = std::function<std::optional<Total>(double seconds)>;

// This one is between threads of one process, whose memory holds all vectors already.
class Exchange {
  public:
    virtual ~Exchange() = default;

    virtual bool spans_processes() const { return false; }
    // Whether replicas contribute packed vectors on GPUs, which streams compute; otherwise, in memory of the host.
    virtual bool on_devices() const { return false; }

    // Combines all rows, in the order of the ranks and of the contexts: the same inputs give the same bits everywhere.
    // Or brings each replica all vectors, side by side in the order of the ranks. On GPUs, this may only begin, in
    // the replicas' streams, and the total has the samples of all slots. Does not wait, for a thread that may be needed
    // elsewhere. The rows and the name must stay valid. Throws std::runtime_error, or Failure, with the reason.
    virtual Underway begin(Combine combine, const CallId& id, const Contribution& own);
};

// By others, which a function in Python asks: `out` gets the rows of all contexts of this process, "cpu(0), cpu(1)", by a
// KVStore of MXNet's. Between so many `processes`, it gets those of all, in the order of their ranks, by what adds the
// gradients of their job. Each is for the call {layer, node, sequence, phase}, within so many seconds. Several threads call
// at once. Returns whether it has succeeded. Otherwise the reason is in `python_problem`. It must stay as long as the
// process.
using AddInPython = bool(const char* contexts, const int64_t* call, double timeout, int64_t rows, int64_t length,
                         const double*, double* out);
std::shared_ptr<Exchange> python_exchange(AddInPython* add, size_t processes);
inline thread_local std::string python_problem;

// Whether GPUs exchange their statistics by NCCL. If NCCL is missing, `kIfThere` takes the host, with a warning, and
// exchange/named.py refuses `kRequired`.
enum class Nccl { kIfThere, kRequired, kNever };

// The user's settings.
struct Asked {
    std::shared_ptr<Exchange> host;  // for vectors in memory of the host
    Nccl nccl = Nccl::kIfThere;      // for replicas of one process with a GPU each
};

// Chooses the exchange of replicas on these contexts. Throws Failure if there is none.
std::shared_ptr<Exchange> chosen(const Asked& asked, const std::vector<std::string>& contexts);

}  // namespace syncbn
