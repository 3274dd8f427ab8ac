#include "pools.h"

#include <cmath>

#include "figures.h"

namespace driver {
namespace {

double tolerance(Type type) { return type == Type::kFloat64 ? 1e-11 : type == Type::kFloat32 ? 1e-5 : 2e-2; }

constexpr double kSmall = 1e-4;  // a float16 below this has fewer bits

// Replicas that share statistics.
struct Pool {
    std::vector<const Replica*> replicas;

    // work(replica, index) for each value of a channel
    template <typename Work>
    void each(int64_t channel, const Work& work) const {
        for (const Replica* replica : replicas)
            for (int64_t sample = 0; sample < replica->samples; ++sample)
                for (int64_t position = 0; position < replica->height; ++position)
                    work(*replica, replica->at(sample, position, channel));
    }
};

struct Moments {
    double count = 0, mean = 0, variance = 0;

    Moments(const Pool& pool, int64_t channel) {
        const auto x = [](const Replica& replica, int64_t i) { return replica.x->get(i); };
        pool.each(channel, [&](const Replica&, int64_t) { ++count; });
        pool.each(channel, [&](const Replica& from, int64_t i) { mean += x(from, i) / count; });
        pool.each(channel, [&](const Replica& from, int64_t i) { variance += std::pow(x(from, i) - mean, 2) / count; });
    }
    double invstd() const { return 1 / std::sqrt(variance + kEpsilon); }
    double xhat(double x) const { return (x - mean) * invstd(); }
};

// Each output is the value by the statistics of all.
void check_outputs(const Pool& pool, int64_t c, const Moments& of, const std::string& what) {
    double worst = 0;
    pool.each(c, [&](const Replica& replica, int64_t i) {
        const double gamma = replica.scale(c), beta = replica.parameters.beta->get(c), x = replica.x->get(i);
        const double addend = replica.addend ? replica.addend->get(i) : 0, z = gamma * of.xhat(x) + beta + addend;
        const double size =
            gamma * of.invstd() * (std::fabs(x) + std::fabs(of.mean)) + std::fabs(beta) + std::fabs(addend) + kBefore;
        const double before = replica.req == syncbn::kWrite ? 0 : kBefore;
        const double y = replica.req == syncbn::kNull ? 0 : z > 0 ? z : replica.layer.spec.slope * z;
        const double error = std::fabs(replica.y->get(i) - y - before) / size;
        if (!(error <= worst)) worst = error;  // and not a NaN
    });
    expect(worst <= tolerance(pool.replicas[0]->layer.spec.type), "y" + what + " is off by " + std::to_string(worst));
}

// The gradients of the data, each by its replica's gamma, add up to 0, because the sums are those of the same replicas.
void check_gradients(const Pool& pool, size_t k, int64_t c, const Moments& of, const std::string& what) {
    double sum = 0, size = kSmall;
    for (const Replica* replica : pool.replicas)
        if (replica->backwards[k].reqs[syncbn::kX] == syncbn::kNull) return;
    pool.each(c, [&](const Replica& replica, int64_t i) {
        const Backward& backward = replica.backwards[k];
        const double before = backward.reqs[syncbn::kX] == syncbn::kAdd ? kBefore : 0;
        sum += (backward.dx->get(i) - before) / replica.scale(c);
        const double terms = std::fabs(backward.dy->get(i)) * (2 + std::fabs(of.xhat(replica.x->get(i))));
        size += before / replica.scale(c) + of.invstd() * terms;
    });
    expect(std::fabs(sum) <= tolerance(pool.replicas[0]->layer.spec.type) * size,
           "dx" + what + " adds up to " + std::to_string(sum) + ", of " + std::to_string(size));
}

// Of sync, in the order of the contexts.
std::vector<Pool> pools_of(const Layer& layer, const std::vector<std::unique_ptr<Replica>>& replicas) {
    std::vector<const Replica*> all;
    for (size_t context = 0; context < layer.placed.size(); ++context)
        for (const auto& replica : replicas)
            if (replica->context == context) all.push_back(replica.get());
    std::vector<Pool> pools;
    const size_t together = layer.spec.group > 0 ? layer.spec.group : all.size();
    for (size_t i = 0; i < all.size(); ++i) {
        if (i % together == 0) pools.emplace_back();
        pools.back().replicas.push_back(all[i]);
    }
    return pools;
}

}  // namespace

void check_values(const ArrayP& got, int req, bool failed) {
    if (!got || req == syncbn::kNull || got->broken) return;
    int64_t numbers = 0;
    for (int64_t i = 0; i < got->size; ++i) numbers += !std::isnan(got->get(i));
    expect(numbers == (failed ? 0 : got->size), std::to_string(numbers) + " of " + std::to_string(got->size) +
                                                    " values are numbers, failed: " + std::to_string(failed));
}

void check(Layer& layer, const std::vector<std::unique_ptr<Replica>>& replicas) {
    const std::string what = " of " + layer.name + " in mode " + std::to_string(static_cast<int>(layer.spec.mode));
    bool succeed = true;
    for (const auto& replica : replicas) {
        const std::string error = replica->forward.error;
        expect(error.empty(), "the forward" + what + " succeeds: " + error);
        check_values(replica->y, replica->req, false);
        succeed = succeed && error.empty();
        for (const Backward& backward : replica->backwards) {
            expect(backward.outcome.error.empty(), "the backward" + what + " succeeds: " + backward.outcome.error);
            succeed = succeed && backward.outcome.error.empty();
            for (const ArrayP& array : {backward.dx, backward.dgamma, backward.dbeta, backward.daddend})
                check_values(array, syncbn::kWrite, false);
        }
    }
    if (!succeed || !replicas[0]->training || layer.spec.mode != Mode::kSync) return;
    for (const Pool& pool : pools_of(layer, replicas)) {
        for (int64_t c = 0; c < layer.spec.channels; ++c) {
            const Moments of(pool, c);
            check_outputs(pool, c, of, what);
            for (size_t k = 0; k < replicas[0]->backwards.size(); ++k) check_gradients(pool, k, c, of, what);
            for (const Replica* replica : pool.replicas) {
                Placed& placed = layer.placed[replica->context];
                placed.running_mean[c] = kMomentum * placed.running_mean[c] + (1 - kMomentum) * of.mean;
                placed.running_var[c] = kMomentum * placed.running_var[c] + (1 - kMomentum) * of.variance;
            }
        }
    }
}

void check_running_statistics(const Layer& layer) {
    const auto compare = [&](const ArrayP& got, const std::vector<double>& expected) {
        check_values(got, syncbn::kWrite, false);
        for (int64_t c = 0; layer.spec.mode == Mode::kSync && c < got->size; ++c)
            expect(std::fabs(got->get(c) - expected[c]) <= tolerance(got->type) * (std::fabs(expected[c]) + 1),
                   "the running statistics of " + layer.name + " are " + std::to_string(got->get(c)) + ", not " +
                       std::to_string(expected[c]));
    };
    for (const Placed& placed : layer.placed) {
        compare(placed.parameters.running_mean, placed.running_mean);
        compare(placed.parameters.running_var, placed.running_var);
    }
}

}  // namespace driver
