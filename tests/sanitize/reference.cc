#include "reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "figures.h"
#include "pooling/permutation.h"

namespace driver {
namespace {

using Vector = std::vector<double>;

double tolerance(Type type) { return type == Type::kFloat64 ? 1e-12 : type == Type::kFloat32 ? 2e-6 : 2e-3; }

constexpr double kLargestHalf = 6e4;  // a float16 beyond this is infinite
constexpr double kSmall = 1e-4;       // a float16 below this has fewer bits
constexpr double kLost = 6e-8;        // a float16 below this may be stored as 0

// Values, each a sum of terms of such a size: rounding errors are parts of that.
struct Expected {
    Vector value, size;

    explicit Expected(int64_t n) : value(n, 0.0), size(n, 0.0) {}
    void add(int64_t i, double term) {
        value[i] += term;
        size[i] += std::fabs(term);
    }
};

void compare(const Array& got, int req, Expected expected, const std::string& what, double tolerance) {
    double worst = 0;
    for (int64_t i = 0; i < got.size; ++i) {
        if (req == syncbn::kNull) expected.value[i] = expected.size[i] = 0;
        if (req != syncbn::kWrite) expected.add(i, kBefore);
        if (got.type == Type::kFloat16 && std::fabs(expected.value[i]) > kLargestHalf) continue;
        const double error = std::fabs(got.get(i) - expected.value[i]) / (expected.size[i] + kSmall);
        if (!(error <= worst)) worst = error;  // and not a NaN
    }
    expect(worst <= tolerance, what + " is off by " + std::to_string(worst) + " of its terms, " +
                                   syncbn::name_of(got.type) + ", req " + std::to_string(req));
}

void compare(const Array& got, int req, Expected expected, const std::string& what) {
    compare(got, req, std::move(expected), what, tolerance(got.type));
}

// What values are normalised with, and the sums over dy of those who use it. One of infinitely many values is a constant.
struct Statistic {
    double count = 0;
    Vector mean, variance;
    Expected sum_dy, sum_dy_xhat;

    explicit Statistic(int64_t channels)
        : mean(channels, 0.0), variance(channels, 0.0), sum_dy(channels), sum_dy_xhat(channels) {}
    double invstd(int64_t c) const { return 1 / std::sqrt(variance[c] + kEpsilon); }
    double xhat(double x, int64_t c) const { return (x - mean[c]) * invstd(c); }
};

struct Slot {
    const Replica* replica;
    int64_t first, last;  // samples
    std::shared_ptr<Statistic> own, used;

    // work(index, channel)
    template <typename Work>
    void each(const Work& work) const {
        for (int64_t sample = first; sample < last; ++sample)
            for (int64_t position = 0; position < replica->height; ++position)
                for (int64_t c = 0; c < replica->channels; ++c) work(replica->at(sample, position, c), c);
    }
};

using Slots = std::vector<Slot>;

// As numpy.array_split.
void cut(const Replica& replica, int count, Slots* slots) {
    int64_t sample = 0;
    for (int i = 0; i < count; ++i) {
        const int64_t size = replica.samples / count + (i < replica.samples % count);
        slots->push_back({&replica, sample, sample + size, nullptr, nullptr});
        sample += size;
    }
}

void take_in(const Slots& slots, Statistic* statistic) {
    for (const Slot& slot : slots)
        statistic->count += static_cast<double>((slot.last - slot.first) * slot.replica->height);
    for (const Slot& slot : slots)
        slot.each([&](int64_t i, int64_t c) { statistic->mean[c] += slot.replica->x->get(i) / statistic->count; });
    for (const Slot& slot : slots)
        slot.each([&](int64_t i, int64_t c) {
            statistic->variance[c] += std::pow(slot.replica->x->get(i) - statistic->mean[c], 2) / statistic->count;
        });
}

// The slots of one replica after those of the other, in the order of the contexts and on one context in that of the calls.
Slots slots_of(Layer& layer, const std::vector<std::unique_ptr<Replica>>& replicas) {
    const Spec& spec = layer.spec;
    const bool alone = spec.mode != Mode::kSync;
    Slots all, used;
    for (size_t context = 0; context < layer.placed.size(); ++context)
        for (const auto& replica : replicas)
            if (replica->context == context) cut(*replica, alone ? spec.virtual_devices : 1, &all);
    if (!replicas[0]->training) {
        for (Slot& slot : all) {
            slot.own = slot.used = std::make_shared<Statistic>(spec.channels);
            slot.own->count = std::numeric_limits<double>::infinity();
            slot.own->mean = layer.placed[slot.replica->context].running_mean;
            slot.own->variance = layer.placed[slot.replica->context].running_var;
        }
        return all;
    }
    const size_t together = alone ? 1 : spec.group > 0 ? spec.group : all.size();
    for (size_t first = 0; first < all.size(); first += together) {
        const auto begin = all.begin() + static_cast<int64_t>(first), end = begin + static_cast<int64_t>(together);
        const auto statistic = std::make_shared<Statistic>(spec.channels);
        take_in(Slots(begin, end), statistic.get());
        for (auto slot = begin; slot != end; ++slot) slot->own = slot->used = statistic;
    }
    all.erase(std::remove_if(all.begin(), all.end(), [](const Slot& slot) { return slot.first == slot.last; }),
              all.end());
    if (spec.mode == Mode::kShuffle) {
        const int node = replicas[0]->node;
        const auto source = syncbn::derangement({kSeed, layer.id, node, layer.meetings[node]++}, all.size());
        for (size_t i = 0; i < all.size(); ++i) all[i].used = all[source[i]].own;
    }
    return all;
}

// Returns whether y tells for all values on which side of 0 they were before the activation.
bool check_outputs(const Slots& slots, const Replica& replica, const std::string& what) {
    Expected y(replica.x->size);
    const bool side_is_from_x = replica.layer.spec.activates() && !replica.addend;  // as in csrc/activation.h
    bool tells = true;
    for (const Slot& slot : slots)
        if (slot.replica == &replica)
            slot.each([&](int64_t i, int64_t c) {
                const double x = replica.x->get(i), scale = replica.scale(c) * slot.used->invstd(c);
                y.add(i, scale * (x - slot.used->mean[c]));
                y.add(i, replica.parameters.beta->get(c));
                y.size[i] += scale * (std::fabs(x) + std::fabs(slot.used->mean[c]));
                if (replica.addend) y.add(i, replica.addend->get(i));
                const double z = std::fabs(y.value[i]);
                if (side_is_from_x && replica.y->type == Type::kFloat16 && z > 0 && z < kLost) tells = false;
                if (y.value[i] <= 0) y.value[i] *= replica.layer.spec.slope;
            });
    compare(*replica.y, replica.req, std::move(y), "y" + what);
    return tells;
}

// The gradient before the activation. On which side of 0 a value is may hang on rounding: y, which was checked, says it.
double dz(const Replica& replica, size_t k, int64_t i) {
    const double dy = replica.backwards[k].dy->get(i), slope = replica.layer.spec.slope;
    return !replica.layer.spec.activates() || replica.y->get(i) > 0 ? dy : slope * dy;
}

// The mean is rounded. In place, xhat and x are found in y, and have lost what that and x were rounded by.
double size_of_xhat(const Replica& replica, const Statistic& used, double x, int64_t c) {
    const double size = std::fabs(used.xhat(x, c)) + std::fabs(used.mean[c]) * used.invstd(c);
    if (!replica.layer.spec.inplace) return size;
    return size + std::fabs(replica.parameters.beta->get(c) / replica.scale(c));
}

void check_gradients(const Slots& slots, const Replica& replica, size_t k, const std::string& what) {
    const Backward& backward = replica.backwards[k];
    Expected dx(replica.x->size), daddend(replica.x->size), dgamma(replica.channels), dbeta(replica.channels);
    for (const Slot& slot : slots)
        if (slot.replica == &replica)
            slot.each([&](int64_t i, int64_t c) {
                const Statistic &own = *slot.own, &used = *slot.used;
                const double grad = dz(replica, k, i), x = replica.x->get(i), gamma = replica.scale(c);
                daddend.add(i, grad);
                dbeta.add(c, grad);
                if (!replica.layer.spec.fix_gamma) {
                    dgamma.value[c] += grad * used.xhat(x, c);
                    dgamma.size[c] += std::fabs(grad) * size_of_xhat(replica, used, x, c);
                }
                const double share = gamma * own.invstd(c) / own.count, xhat = own.xhat(x, c);
                dx.add(i, gamma * used.invstd(c) * grad);
                dx.add(i, -share * own.sum_dy.value[c]);
                dx.add(i, -share * xhat * own.sum_dy_xhat.value[c]);
                dx.size[i] += share * (own.sum_dy.size[c] + size_of_xhat(replica, own, x, c) * own.sum_dy_xhat.size[c]);
            });
    compare(*backward.dx, backward.reqs[syncbn::kX], std::move(dx), "dx" + what);
    const Type of_xhat = replica.layer.spec.inplace ? replica.x->type : backward.dgamma->type;
    compare(*backward.dgamma, backward.reqs[syncbn::kGamma], std::move(dgamma), "dgamma" + what, tolerance(of_xhat));
    compare(*backward.dbeta, backward.reqs[syncbn::kBeta], std::move(dbeta), "dbeta" + what);
    if (replica.addend) compare(*backward.daddend, backward.reqs[syncbn::kAddend], std::move(daddend), "dz" + what);
    for (const ArrayP& array : backward.nothing)
        compare(*array, syncbn::kWrite, Expected(array->size), "what has no gradient" + what);
}

// Each slot's dy belongs to the statistic that the slot uses.
void add_up(const Slots& slots, size_t k) {
    for (const Slot& slot : slots) slot.used->sum_dy = slot.used->sum_dy_xhat = Expected(slot.replica->channels);
    for (const Slot& slot : slots)
        slot.each([&](int64_t i, int64_t c) {
            const double grad = dz(*slot.replica, k, i), x = slot.replica->x->get(i);
            Statistic& used = *slot.used;
            used.sum_dy.add(c, grad);
            used.sum_dy_xhat.value[c] += grad * used.xhat(x, c);
            used.sum_dy_xhat.size[c] += std::fabs(grad) * size_of_xhat(*slot.replica, used, x, c);
        });
}

// Towards the mean over this replica's slots.
void track(const Slots& slots, const Replica& replica, Placed* placed) {
    Slots own;
    std::copy_if(slots.begin(), slots.end(), std::back_inserter(own),
                 [&](const Slot& slot) { return slot.replica == &replica; });
    for (int64_t c = 0; c < replica.channels; ++c) {
        double mean = 0, variance = 0;
        for (const Slot& slot : own) {
            mean += slot.own->mean[c] / static_cast<double>(own.size());
            variance += slot.own->variance[c] / static_cast<double>(own.size());
        }
        placed->running_mean[c] = kMomentum * placed->running_mean[c] + (1 - kMomentum) * mean;
        placed->running_var[c] = kMomentum * placed->running_var[c] + (1 - kMomentum) * variance;
    }
}

}  // namespace

void check(Layer& layer, const std::vector<std::unique_ptr<Replica>>& replicas) {
    // In local mode, each replica on a context has moved the running statistics when the next one comes; without
    // training they stay what they are.
    const Slots slots = slots_of(layer, replicas);
    const std::string what = " of " + layer.name + " in mode " + std::to_string(static_cast<int>(layer.spec.mode));
    bool tell = true;
    for (const auto& replica : replicas) {
        const std::string error = replica->forward.error + replica->aside.error;
        expect(error.empty(), "the forward" + what + " succeeds: " + error);
        if (!error.empty()) return;
        tell = check_outputs(slots, *replica, what) && tell;
    }
    // The gradients of all replicas depend on the side of each value.
    for (size_t k = 0; tell && k < replicas[0]->backwards.size(); ++k) {
        add_up(slots, k);
        for (const auto& replica : replicas) {
            const std::string& error = replica->backwards[k].outcome.error;
            expect(error.empty(), "the backward" + what + " succeeds: " + error);
            if (error.empty()) check_gradients(slots, *replica, k, what);
        }
    }
    if (!replicas[0]->training) return;
    std::vector<bool> tracked(layer.placed.size(), false);
    for (const auto& replica : replicas) {  // of the replicas of a context one tracks, unless nobody meets
        if (!tracked[replica->context] || layer.spec.mode == Mode::kLocal)
            track(slots, *replica, &layer.placed[replica->context]);
        tracked[replica->context] = true;
    }
}

void check_running_statistics(const Layer& layer) {
    const auto compare_with = [&](const ArrayP& got, const Vector& expected, const char* what) {
        Expected wanted(got->size);
        wanted.value = expected;
        for (int64_t c = 0; c < got->size; ++c) wanted.size[c] = std::fabs(expected[c]) + 1;
        compare(*got, syncbn::kWrite, std::move(wanted), std::string(what) + " of " + layer.name);
    };
    for (const Placed& placed : layer.placed) {
        compare_with(placed.parameters.running_mean, placed.running_mean, "the running mean");
        compare_with(placed.parameters.running_var, placed.running_var, "the running variance");
    }
}

}  // namespace driver
