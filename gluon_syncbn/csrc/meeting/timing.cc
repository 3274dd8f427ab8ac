#include "meeting/timing.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

#include "log.h"

namespace syncbn {
namespace {

constexpr size_t kWorst = 5;  // number of layers to name

struct Waits {
    int64_t meetings = 0;
    double waited = 0;                      // seconds, of all replicas
    std::map<std::string, double> last_by;  // of those, the time until this replica came
};

struct Totals {
    std::mutex mutex;  // guards `layers`
    std::map<std::string, Waits> layers;
};
Totals& totals = *new Totals;  // outlives the threads that write at exit

}  // namespace

void record_meeting(const std::string& call, const Meeting& meeting, const Phase& phase) {
    const std::string& layer = meeting.terms->name;
    std::vector<size_t> order(phase.entries.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return phase.entries[a].at < phase.entries[b].at; });
    const double first = phase.entries[order.front()].at, last = phase.entries[order.back()].at;
    if (first == 0) return;  // it came before records were requested
    double waited = 0;
    std::ostringstream out;
    out << std::fixed << std::setprecision(3) << title_of(layer) << ", " << call << ": ";
    for (size_t position : order) {
        const double late = phase.entries[position].at - first, waits = last - phase.entries[position].at;
        out << meeting.replica(position) << " came after " << 1e3 * late << " ms and waited " << 1e3 * waits << " ms"
            << (position == order.back() ? "" : ", ");
        waited += waits;
    }
    log(Level::kDebug, out.str());
    std::lock_guard<std::mutex> lock(totals.mutex);
    Waits& waits = totals.layers[layer];
    ++waits.meetings;
    waits.waited += waited;
    waits.last_by[meeting.replica(order.back())] += waited;
}

std::string slowest() {
    std::lock_guard<std::mutex> lock(totals.mutex);
    std::vector<std::pair<std::string, Waits>> layers(totals.layers.begin(), totals.layers.end());
    std::sort(layers.begin(), layers.end(), [](auto& a, auto& b) { return a.second.waited > b.second.waited; });
    std::map<std::string, double> replicas;
    for (const auto& layer : layers)
        for (const auto& replica : layer.second.last_by) replicas[replica.first] += replica.second;
    std::ostringstream out;
    if (layers.empty()) return "";
    out << std::fixed << std::setprecision(3) << "seconds that replicas waited for others, by layer:";
    for (size_t i = 0; i < std::min(kWorst, layers.size()); ++i)
        out << (i > 0 ? "," : "") << " '" << layers[i].first << "' " << layers[i].second.waited << " in "
            << layers[i].second.meetings << " meetings";
    out << "; by the replica that came last:";
    const char* comma = "";
    for (const auto& replica : replicas) {
        out << comma << " " << replica.first << " " << replica.second;
        comma = ",";
    }
    return out.str();
}

}  // namespace syncbn
