#include "exchange.h"

#include <atomic>
#include <cstdio>
#include <vector>

#include "core.h"
#include "figures.h"
#include "memory.h"

namespace driver {
namespace {

using syncbn::Reduction;

std::atomic<int> failing{0};

bool fails() {
    int left = failing;
    while (left > 0)
        if (failing.compare_exchange_weak(left, left - 1)) return true;
    return false;
}

// A wait for other processes looks around as those of the core do. Now and then it takes longer than they need to do so.
void wait_for_others() {
    static std::atomic<int> exchanges{0};
    void* wait = syncbn_wait_begin(syncbn_interrupts());
    for (int i = 0; i < 3 && syncbn_wait_goes_on(wait) != 0; ++i) pause(1e-4);
    syncbn_wait_end(wait);
    if (++exchanges % 50 == 0) pause(0.07);
}

// [count, mean[C], m2[C]] of all values of the rows.
std::vector<double> merged(int64_t rows, int64_t length, const double* values) {
    const int64_t channels = length / 2;
    std::vector<double> out(length, 0.0);
    for (int64_t r = 0; r < rows; ++r) out[0] += values[r * length];
    for (int64_t c = 1; c <= channels; ++c) {
        for (int64_t r = 0; r < rows; ++r) out[c] += values[r * length] / out[0] * values[r * length + c];
        for (int64_t r = 0; r < rows; ++r) {
            const double away = values[r * length + c] - out[c];
            out[channels + c] += values[r * length + channels + c] + values[r * length] * away * away;
        }
    }
    return out;
}

int put_together(const syncbn::Ticket* ticket, int reduction, int64_t rows, int64_t length, const double* values,
                 syncbn::Total* out, char* error, int64_t error_size) {
    const Within program(false);
    wait_for_others();
    if (fails()) {
        std::snprintf(error, static_cast<size_t>(error_size), "the cable is out");
        return 1;
    }
    std::vector<double> total;
    if (static_cast<Reduction>(reduction) == Reduction::kMerge) {
        total = merged(rows, length, values);
    } else {
        total.assign(values, values + length);  // of a gathering, the only row
        for (int64_t i = length; i < rows * length; ++i) total[i % length] += values[i];
    }
    syncbn_total(out, length, total.data(), 0, ticket->layer);
    return 0;
}

}  // namespace

void set_hook() { syncbn_hook(put_together); }

void fail_exchanges(int count) { failing = count; }

}  // namespace driver
