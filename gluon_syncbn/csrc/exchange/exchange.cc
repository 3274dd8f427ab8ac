#include "exchange/exchange.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "failure.h"
#include "log.h"
#include "waiting/wait.h"

namespace syncbn {
namespace {

// Between GPUs of one process, one for each replica: each contribution goes to all of them, without the host.
class OverNccl : public Exchange {
  public:
    bool on_devices() const override { return true; }
    Underway begin(Combine combine, const CallId& id, const Contribution& own) override {
        return [=, parts = own.devices, in_memory = Exchange::begin(combine, id, own)](double seconds) {
            const bool posted =
                parts.size() == 1 || cuda::post_allgather(parts, id.name, id.timeout, seconds == kForEver);
            return posted ? in_memory(seconds) : std::nullopt;
        };
    }
};

class InPython : public Exchange {
  public:
    InPython(AddInPython* add, size_t processes) : add_(add), processes_(processes) {}

    bool spans_processes() const override { return processes_ > 0; }
    // It takes as long as the interpreter and MXNet's engine like, so a thread that waits without a limit makes the total.
    Underway begin(Combine combine, const CallId& id, const Contribution& own) override {
        return [=](double seconds) -> std::optional<Total> {
            if (seconds != kForEver) return std::nullopt;
            const Vector here = combined(combine, own);
            const auto rows = spans_processes() ? std::vector<const double*>{here.data()} : own.rows;
            const size_t places = std::max(rows.size(), processes_), length = own.length;
            if (places == 1 || length == 0) return Total{here};
            Vector given, found(places * length);
            Contribution of_all{{}, length};
            for (const double* row : rows) given.insert(given.end(), row, row + length);
            for (size_t i = 0; i < places; ++i) of_all.rows.push_back(&found[i * length]);
            const int64_t call[] = {id.layer, id.node, id.sequence, id.phase};
            if (!add_(join_names(id.contexts).c_str(), call, id.timeout, static_cast<int64_t>(rows.size()),
                      static_cast<int64_t>(length), given.data(), found.data()))
                throw std::runtime_error(python_problem);
            return Total{combined(combine, of_all)};
        };
    }

  private:
    AddInPython* const add_;
    const size_t processes_;
};

}  // namespace

Vector combined(Combine combine, const Contribution& own) {
    Vector total(own.rows[0], own.rows[0] + own.length);
    for (size_t i = 1; i < own.rows.size(); ++i) put(combine, total.data(), own.rows[i], own.length);
    return total;
}

Underway Exchange::begin(Combine combine, const CallId&, const Contribution& own) {
    return [total = Total{combined(combine, own)}](double) mutable { return std::move(total); };
}

std::shared_ptr<Exchange> python_exchange(AddInPython* add, size_t processes) {
    return std::make_shared<InPython>(add, processes);
}

std::shared_ptr<Exchange> chosen(const Asked& asked, const std::vector<std::string>& contexts) {
    const bool on_gpus = std::all_of(contexts.begin(), contexts.end(),
                                     [](const auto& context) { return context.compare(0, 4, "gpu(") == 0; });
    if (!on_gpus && asked.nccl == Nccl::kRequired)
        throw Failure("kvstore 'nccl' needs GPUs, but the layer is on " + join_names(contexts));
    // Between processes, the order of collectives would have to be agreed on over the host: see docs/architecture.md.
    if (!on_gpus || asked.host->spans_processes()) return asked.host;
    const auto over_nccl = std::make_shared<OverNccl>();
    if (contexts.size() == 1) return over_nccl;  // exchanges nothing
    if (asked.nccl == Nccl::kNever) return asked.host;
    const std::string missing = cuda::why_no_collective();
    if (missing.empty()) return over_nccl;
    static std::atomic<bool> said{false};
    if (!said.exchange(true)) log(Level::kWarning, "the statistics of GPUs go through host memory: " + missing);
    return asked.host;
}

}  // namespace syncbn
