// The pure functions of pooling behind a text interface, for tests/unit/test_pooling.py: cases in, what became of them out.
//
// A case: mode, virtual_devices, group, channels, slots; the number of named replicas and the group of each; then seed, layer, node, call; then of each slot its moments
// [count, mean[C], m2[C]] and its gradients [sum dy[C], sum dy*xhat[C]].
#include <cstdio>
#include <iostream>
#include <stdexcept>

#include "pooling/pooling.h"
#include "pooling/statistics.h"

using syncbn::Vector;

// "name [of] number ..."
template <typename T>
static void print(const char* name, int of, const std::vector<T>& values) {
    std::printf("%s %d", name, of);
    for (const T& v : values) std::printf(" %.17g", static_cast<double>(v));
    std::printf("\n");
}

static std::vector<size_t> slots_of(const syncbn::Pools& pools, syncbn::Range list) {
    std::vector<size_t> slots;
    for (int place = list.begin; place < list.end; ++place) slots.push_back(pools.slot(place));
    return slots;
}

int main() {
    int mode;
    while (std::cin >> mode) {
        syncbn::Pooling pooling;
        syncbn::Draw draw;
        int64_t channels, slots;
        std::cin >> pooling.virtual_devices >> pooling.group >> channels >> slots;
        size_t named;
        std::cin >> named;
        pooling.groups.resize(named);
        for (int& group : pooling.groups) std::cin >> group;
        std::cin >> draw.seed >> draw.layer >> draw.node >> draw.call;
        pooling.mode = static_cast<syncbn::Mode>(mode);
        Vector moments(slots * syncbn::moments_length(channels)), gradients(slots * syncbn::gradients_length(channels));
        for (double& v : moments) std::cin >> v;
        for (double& v : gradients) std::cin >> v;
        std::vector<double> counts;
        for (int64_t i = 0; i < slots; ++i) counts.push_back(moments[i * syncbn::moments_length(channels)]);
        const int parts = static_cast<int>(pooling.slots());
        std::printf("parts %d\n", parts);
        std::printf("sharing %d\n", static_cast<int>(sharing_of(pooling)));
        try {
            for (int first = 0; first < slots; first += parts) {  // of each replica
                const syncbn::Pools pools = pools_of(pooling, counts, draw, {first, first + parts});
                std::printf("listed %d %d\n", first, pools.members.empty() ? 0 : 1);
                for (int i = 0; i < parts; ++i) {
                    print("used", first + i, slots_of(pools, pools.used[i]));
                    print("fed", first + i, slots_of(pools, pools.fed[i]));
                    print("users", first + i, slots_of(pools, pools.users[i]));
                    print("moments", first + i, moments_of(pools, pools.fed[i], moments, channels));
                    print("gradients", first + i, gradients_of(pools, pools.users[i], gradients, channels));
                }
                Vector mean(channels, 0.0);
                for (const syncbn::Range pool : pools.tracked) {
                    const Vector of = moments_of(pools, pool, moments, channels);
                    for (int64_t c = 0; c < channels; ++c) mean[c] += of[1 + c] / pools.tracked.size();
                }
                print("tracked", first / parts, mean);
            }
        } catch (const std::invalid_argument& problem) {
            std::printf("refused %s\n", problem.what());
        }
        std::printf("end\n");
    }
}
