#include "step.h"

#include <thread>

#include "figures.h"
#include "results.h"

namespace driver {

constexpr int kLarge = 25000;  // values of a sample: from three samples on, work for more than one thread

Run::Run(uint64_t seed, double seconds) : random(seed), end(now() + seconds) {}

double Run::left() const { return end - now(); }

Manner::Manner(Random& random, bool threads) : threads(threads) {
    graph = random.one_in(2);
    // An eager call that predicts is plain BatchNorm's.
    training = !graph || !random.one_in(8);
    uses = random.whole(1, kNodes);
    backwards = random.whole(0, 3);
    large = random.one_in(200);
}

Step::Step(Run& run, const std::vector<Layer*>& layers, const Manner& manner)
    : run_(run), manner_(manner), layers_(layers), calls_(manner.uses) {
    Random& random = run.random;
    const auto order = random.order(layers[0]->spec.contexts);
    const int usual = random.one_of<int>({1, 2, 3, 16, 17});
    for (int use = 0; use < manner.uses; ++use)
        for (Layer* layer : layers) {
            calls_[use].emplace_back();
            for (size_t replica : order) {
                const int height = manner.large && replica == 0 ? kLarge / layer->spec.channels : usual;
                calls_[use].back().push_back(std::make_unique<Replica>(
                    random, *layer, replica, manner.graph ? use : kEager, manner.training, height, manner.backwards));
            }
        }
}

void Step::each(const std::function<void(Replica&)>& work) {
    for (auto& use : calls_)
        for (auto& call : use)
            for (auto& replica : call) work(*replica);
}

void Step::repeat(const Step& earlier) {
    for (size_t use = 0; use < calls_.size(); ++use)
        for (size_t layer = 0; layer < layers_.size(); ++layer)
            for (size_t i = 0; i < calls_[use][layer].size(); ++i)
                calls_[use][layer][i]->repeat(run_.random, *earlier.calls_[use][layer][i]);
}

void Step::issue_forwards_of(size_t replica, uint64_t seed) {
    Random random(seed);
    for (auto& use : calls_)
        for (size_t layer : random.order(layers_.size()))  // branches of a net, in any order on each device
            if (use[layer][replica]->called) use[layer][replica]->issue_forward(run_.engine);
}

void Step::issue_forwards() {
    std::vector<std::thread> threads;
    for (size_t replica = 0; replica < call().size(); ++replica) {
        const uint64_t seed = run_.random.seed();
        if (manner_.threads)
            threads.emplace_back(&Step::issue_forwards_of, this, replica, seed);
        else
            issue_forwards_of(replica, seed);
    }
    for (auto& thread : threads) thread.join();
}

void Step::issue_backwards() {
    for (int k = 0; k < manner_.backwards; ++k)
        for (size_t replica : run_.random.order(call().size()))
            for (auto use = calls_.rbegin(); use != calls_.rend(); ++use)
                for (Call& call : *use) {
                    Replica& part = *call[replica];
                    if (part.called && part.differentiated) part.issue_backward(run_.engine, part.backwards[k]);
                }
}

void Step::issue() {
    ++figures.steps;
    issue_forwards();
    issue_backwards();
}

void Step::check() {
    for (auto& use : calls_)
        for (size_t layer = 0; layer < layers_.size(); ++layer) driver::check(*layers_[layer], use[layer]);
}

void right_step(Run& run, Layer& layer) {
    Step step(run, {&layer}, Manner());
    step.issue();
    run.engine.wait_for_all();
    step.check();
    check_running_statistics(layer);
}

}  // namespace driver
