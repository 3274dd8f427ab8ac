// The pure functions of pooling behind a text interface, for tests/test_pooling.py: cases in, what became of them out.
//
// A case: mode, virtual_devices, group, channels, slots; then seed, layer, node, call; then of each slot its moments
// [count, mean[C], m2[C]] and its gradients [sum dy[C], sum dy*xhat[C]].
#include <cstdio>
#include <iostream>
#include <stdexcept>

#include "pooling/pooling.h"
#include "pooling/statistics.h"

using syncbn::Vector;

static void print(const char* name, const std::vector<int64_t>& values) {
    std::printf("%s", name);
    for (int64_t v : values) std::printf(" %lld", static_cast<long long>(v));
    std::printf("\n");
}

static void print(const char* name, int64_t pool, const Vector& values) {
    std::printf("%s %lld", name, static_cast<long long>(pool));
    for (double v : values) std::printf(" %.17g", v);
    std::printf("\n");
}

int main() {
    int mode;
    while (std::cin >> mode) {
        syncbn::Pooling pooling;
        syncbn::Draw draw;
        int64_t channels, slots;
        std::cin >> pooling.virtual_devices >> pooling.group >> channels >> slots;
        std::cin >> draw.seed >> draw.layer >> draw.node >> draw.call;
        pooling.mode = static_cast<syncbn::Mode>(mode);
        Vector moments(slots * syncbn::moments_length(channels)), gradients(slots * syncbn::gradients_length(channels));
        for (double& v : moments) std::cin >> v;
        for (double& v : gradients) std::cin >> v;
        std::vector<double> counts;
        for (int64_t i = 0; i < slots; ++i) counts.push_back(moments[i * syncbn::moments_length(channels)]);
        std::printf("parts %lld\n", static_cast<long long>(pooling.slots()));
        std::printf("sharing %d\n", static_cast<int>(sharing_of(pooling)));
        try {
            const syncbn::Pools pools = pools_of(pooling, counts, draw);
            print("feeds", pools.feeds);
            print("uses", pools.uses);
            print("tracks", pools.tracks);
            for (int64_t pool = 0; pool < slots; ++pool) {
                print("moments", pool, moments_of_pool(pools, pool, moments, channels));
                print("gradients", pool, gradients_of_pool(pools, pool, gradients, channels));
            }
        } catch (const std::invalid_argument& problem) {
            std::printf("refused %s\n", problem.what());
        }
        std::printf("end\n");
    }
}
