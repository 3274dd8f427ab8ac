#include "meeting/diagnosis.h"

#include <algorithm>
#include <mutex>
#include <sstream>
#include <vector>

#include "lock.h"
#include "log.h"
#include "mxnet_api.h"
#include "to_python.h"
#include "waiting/wait.h"

namespace syncbn {

namespace {

constexpr double kLately = 1;  // seconds; whoever waits asks more often

// Under the lock of the records, because a question comes among them.
Renewed<Callers>& answer = *new Renewed<Callers>;  // outlives the threads that wait at exit

}  // namespace

std::vector<std::string> replicas_of(const Meeting& meeting, const Phase& phase, bool arrived) {
    std::vector<std::string> found;
    for (size_t i = 0; i < meeting.replicas(); ++i)
        if ((i < phase.entries.size() && phase.entries[i]) == arrived) found.push_back(meeting.contexts()[i]);
    return found;
}

std::string describe(const Meeting& meeting, const Phase& phase) {
    const auto arrived = replicas_of(meeting, phase, true);
    std::ostringstream out;
    out << arrived.size() << " of " << meeting.replicas() << " replicas arrived (" << join_names(arrived)
        << "), missing " << join_names(replicas_of(meeting, phase, false));
    return out.str();
}

std::string likely_cause(const Meeting& meeting, const Phase& phase) {
    if (phase.number == 0 && !meeting.full()) return std::string("Nobody has called the layer there. ") + kCallAll;
    if (phase.number == 0)
        return "Every replica has issued its call: an operator before this layer does not finish there, or has failed, "
               "perhaps because memory ran out. Then read that replica's output, which raises the error once.";
    std::string cause =
        "Call autograd.backward with a loss of every replica, 0 * output.sum() if it has none, and read no gradient "
        "before that.";
    if (bundles_operators)
        cause +=
            " Or MXNet bundles an operator outside the replicas (a batch that is split while recording), or of another "
            "replica, with one of them: set MXNET_EXEC_BULK_EXEC_TRAIN=0 before the first operator runs.";
    return cause;
}

std::optional<LongWait> LongWaits::first() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::optional<LongWait> found;
    for (const auto& [waiter, wait] : waits_)
        if (!wait.called && (!found || wait.since < found->since)) found = wait;
    return found;
}

std::string LongWaits::meanwhile(const LongWait& wait) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string text;
    for (const auto& [waiter, other] : waits_)
        if (std::find(wait.missing.begin(), wait.missing.end(), other.replica) != wait.missing.end())
            text += " Meanwhile " + other.replica + " waits in " + title_of(other.layer) + ", " + other.call + ".";
    return text;
}

std::string why_not_here(const LayerConfig& config, const std::string& context) {
    std::ostringstream why;
    if (config.contexts.empty())
        why << "the contexts of the layer's parameters are not known; initialise the net before the first step. A "
               "symbol trains in a Module or a SymbolBlock. In a hybrid_forward, call a gluon_syncbn.SyncBatchNorm";
    else if (std::find(config.contexts.begin(), config.contexts.end(), context) == config.contexts.end())
        why << "the layer was called here, but its parameters live on " << join_names(config.contexts)
            << "; initialise or reset_ctx the net with every context that takes part";
    else
        why << "the layer was called here, but gluon_syncbn.only_on(...) lets only " << join_names(config.devices)
            << " take part; name every context that gets data, or leave the block";
    return why.str();
}

Callers callers(double since) {
    const std::lock_guard<std::mutex> lock(records->mutex);
    const double age = seconds() - answer->at;
    if (age >= kSleep) {  // otherwise, many replicas would ask all the time
        records->asks = true;
        records->changed->notify_one();
    }
    return answer->at < since || age > kLately ? Callers() : answer.get();
}

SYNCBN_API(void, answer_callers, const char* wait, double patience) {
    const std::lock_guard<std::mutex> lock(records->mutex);
    answer.get() = {wait, patience, seconds()};
}

}  // namespace syncbn
