// Describes who is here, who is missing, and what the user can do about it.
#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "meeting/diagnosis.h"

namespace syncbn {
namespace {

std::string join_names(const std::vector<std::string>& names) {
    std::string out;
    for (const auto& name : names) out += (out.empty() ? "" : ", ") + name;
    return out.empty() ? "nobody" : out;
}

constexpr char kTemporarySpace[] =
    "CPU contexts share a small pool of temporary space and one of random states, and MXNet's queue may not reach a "
    "replica because of it: take the contexts from gluon_syncbn.cpu_devices(n) before the first operator runs (it sets "
    "MXNET_CPU_TEMP_COPY and MXNET_CPU_PARALLEL_RAND_COPY), or raise its temp_copies, and where the net has many "
    "Dropouts its random_copies.";
constexpr char kStaticShape[] =
    " With static_shape no number of copies is enough: hybridize(static_alloc=True) without it.";
constexpr char kSameMemory[] =
    " Several replicas share a context: outside of autograd.record, MXNet runs a static_alloc graph of one after that "
    "of the other. hybridize() without static_alloc there.";
constexpr char kSharedContext[] =
    "Several replicas share a context. With static_shape MXNet runs the operators of one after those of the other: "
    "hybridize without it. Or their operators are bundled: call mxnet.autograd.backward by that name, with the losses "
    "of all replicas, or set MXNET_EXEC_BULK_EXEC_TRAIN=0 before the first operator runs. Or more than seven replicas "
    "have come to a process that had run a backward before: set MXNET_EXEC_INPLACE_GRAD_SUM_CAP to four for each. Or "
    "not every replica's loss took part.";
constexpr char kBackward[] =
    "Either not every replica's loss took part: call autograd.backward with the losses of all devices, and read no "
    "gradient before that. Or an operator outside the replicas (a batch that is split while recording, for its "
    "gradient) is bundled with one of them: set MXNET_EXEC_BULK_EXEC_TRAIN=0 before the first operator runs.";
constexpr char kAllIssued[] = "Every replica has issued its call";
constexpr char kUnfinished[] =
    ": an operator before this layer does not finish there, or has failed, for lack of memory perhaps; then its error "
    "is at that replica's output.";
constexpr char kNeverCalled[] =
    "Most likely the missing replica was never called, or something waits for a result (asnumpy, asscalar, "
    "wait_to_read, print) before all replicas have been called, or num_devices is not the number of replicas. For a "
    "batch on fewer devices use gluon_syncbn.devices(contexts).";

constexpr double kSurely = 5, kPerhaps = 20;  // seconds

// MXNet's default is 4; few nets work with less than this.
bool little_temporary_space() {
    const char* copies = std::getenv("MXNET_CPU_TEMP_COPY");
    return copies == nullptr || std::atoi(copies) < 64;
}

bool on_cpu(const std::string& context) { return context.compare(0, 3, "cpu") == 0; }

}  // namespace

bool all_issued(const Meeting& meeting, const Attendance& attendance) {
    for (size_t c = 0; c < meeting.contexts.size(); ++c) {
        if (meeting.joined(c) == meeting.per_context) continue;
        const auto issued = attendance.issued.find(meeting.contexts[c]);
        const auto joined = attendance.joined.find(meeting.contexts[c]);
        if (issued == attendance.issued.end() ||
            issued->second <= (joined == attendance.joined.end() ? 0 : joined->second))
            return false;
    }
    return true;
}

std::string describe(const Meeting& meeting, int phase) {
    const auto& entries = meeting.phases.at(phase).entries;
    std::vector<std::string> arrived, missing;
    std::vector<size_t> here(meeting.contexts.size(), 0);
    for (size_t position = 0; position < meeting.positions.size(); ++position)
        if (position < entries.size() && entries[position].arrived) ++here[meeting.positions[position].context];
    for (size_t c = 0; c < meeting.contexts.size(); ++c) {
        for (size_t replica = 0; replica < here[c]; ++replica) arrived.push_back(meeting.contexts[c]);
        for (size_t replica = here[c]; replica < meeting.per_context; ++replica) missing.push_back(meeting.contexts[c]);
    }
    std::ostringstream out;
    out << arrived.size() << " of " << meeting.replicas() << " replicas arrived (" << join_names(arrived)
        << "), missing " << join_names(missing);
    return out.str();
}

namespace {

Cause cause_in_backward(const Meeting& meeting, bool all_cpu, double perhaps) {
    if (meeting.per_context > 1) {
        const bool too_little = all_cpu && little_temporary_space();
        return {(too_little ? std::string(kTemporarySpace) + " Or: " : "") + kSharedContext, kSurely};
    }
    const std::string space = all_cpu ? std::string(" Or: ") + kTemporarySpace : "";
    return {kBackward + space + (all_cpu && meeting.repeated ? kStaticShape : ""), perhaps};
}

Cause cause_in_forward(const Meeting& meeting, const Attendance& attendance, bool all_cpu, double perhaps) {
    const std::string same_memory = meeting.per_context > 1 ? kSameMemory : "";
    if (all_issued(meeting, attendance)) {
        if (all_cpu) return {kAllIssued + std::string(".") + same_memory + " " + kTemporarySpace, kSurely};
        return {kAllIssued + std::string(kUnfinished), perhaps};
    }
    // A state that MXNet executes again is issued once, so it is unknown whether the missing replica was called.
    const bool unknown = meeting.repeated && all_cpu;
    const std::string space = unknown ? std::string(" Or: ") + kTemporarySpace + kStaticShape : "";
    return {kNeverCalled + same_memory + space, unknown ? perhaps : 0};
}

}  // namespace

Cause likely_cause(const Meeting& meeting, int phase, const Attendance& attendance) {
    const bool all_cpu = std::all_of(meeting.contexts.begin(), meeting.contexts.end(), on_cpu);
    // While a GPU computes, the waiting thread spins (cudaDeviceScheduleAuto), so the process is not idle.
    const double perhaps = all_cpu && little_temporary_space() ? kSurely : kPerhaps;
    return phase > 0 ? cause_in_backward(meeting, all_cpu, perhaps)
                     : cause_in_forward(meeting, attendance, all_cpu, perhaps);
}

std::string why_not_here(const Terms& terms, const std::string& context) {
    std::ostringstream why;
    if (terms.per_context == 0 && !terms.contexts.empty())
        why << "num_devices is " << terms.replicas << ", but the layer's parameters live on " << terms.contexts.size()
            << " contexts (" << join_names(terms.contexts)
            << "); expected a multiple of that, or no num_devices at all.";
    else if (terms.contexts.empty())
        why << "the contexts of the layer's parameters are not known; initialise the net before the first step. Of an "
               "executor that simple_bind or bind makes, nobody knows with which others it trains: write ndev=N into "
               "the symbol, where N executors train together, and bind each of them, on a context of its own, before "
               "the first step; or let a Module bind them. In a hybrid_forward, call a gluon_syncbn.SyncBatchNorm";
    else if (std::find(terms.contexts.begin(), terms.contexts.end(), context) == terms.contexts.end())
        why << "the layer was called here, but its parameters live on " << join_names(terms.contexts)
            << "; initialise or reset_ctx the net with every context that takes part";
    else
        why << "the layer was called here, but gluon_syncbn.devices(...) lets only " << join_names(terms.devices)
            << " take part; name every context that gets data, or leave the block";
    return why.str();
}

}  // namespace syncbn
