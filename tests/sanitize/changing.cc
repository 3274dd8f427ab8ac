#include <atomic>
#include <thread>

#include "core.h"
#include "exchange.h"
#include "figures.h"
#include "results.h"
#include "runs.h"

namespace driver {
namespace {

// Threads that turn at every knob until they are told to stop.
class Hands {
  public:
    using Turn = std::function<void(Random&)>;

    Hands(Random& random, std::vector<Turn> knobs) : knobs_(std::move(knobs)) {
        for (int i = 0; i < 2; ++i) threads_.emplace_back(&Hands::turn, this, random.seed());
    }
    ~Hands() {
        stop_ = true;
        for (auto& thread : threads_) thread.join();
    }

  private:
    void turn(uint64_t seed) {
        Random random(seed);
        while (!stop_) {
            knobs_[random.whole(0, static_cast<int>(knobs_.size()) - 1)](random);
            pause(random.whole(0, 300) * 1e-6);
        }
    }

    const std::vector<Turn> knobs_;
    std::atomic<bool> stop_{false};
    std::vector<std::thread> threads_;
};

void configure(double timeout, Asked* exchange, const Span<const char*>& devices = {}) {
    syncbn_configure(timeout, 0, devices, exchange);
}

std::vector<Hands::Turn> harmless(const Layer& layer, bool steps_fail) {
    return {
        [](Random& random) { configure(kPatience * random.whole(1, 2), *exchange_in_memory()); },
        [&](Random& random) { layer.set_timeout(kPatience * random.whole(0, 1)); },
        // Processes agree on a layer before it meets them, so a layer of this kind of exchange has it as its own.
        [](Random&) { configure(kPatience, *exchange_in_memory()); },
        [&](Random& random) { layer.set_exchange(any_exchange(random)); },
        [](Random&) { expect(syncbn_timeout_of() > 0, "there is a time limit"); },
        [steps_fail](Random&) {
            WaitForOthers wait;
            expect(wait.looks() || steps_fail, "a wait goes on");
        },
        [](Random& random) { const Layer another(random, Spec(), "another"); },
        [](Random&) { expect(syncbn_layers() > 0, "the layer is there"); },
    };
}

std::vector<Hands::Turn> harmful(const Layer& layer) {
    auto knobs = harmless(layer, true);
    const std::vector<Hands::Turn> more = {
        [&](Random& random) { layer.set_timeout(0.01 * random.whole(0, 30)); },
        [](Random& random) { configure(kPatience, *any_exchange(random)); },
        [](Random& random) { syncbn_seed(random.seed()); },
        [](Random& random) {
            if (random.one_in(10)) syncbn_fail("somebody has let it fail");
        },
        [](Random& random) {
            if (random.one_in(10)) syncbn_reset();
        },
        [&](Random& random) {
            if (random.one_in(10)) layer.place(random.whole(1, layer.spec.contexts));
        },
        [&](Random& random) {
            const char* one[] = {layer.placed[0].context.c_str()};
            if (random.one_in(10)) configure(kPatience, *exchange_in_memory(), {random.whole(0, 1), one});
        },
        [](Random& random) { syncbn_forking(random.one_in(20)); },
        [](Random& random) { syncbn_exiting(random.one_in(20)); },
    };
    knobs.insert(knobs.end(), more.begin(), more.end());
    return knobs;
}

// Several steps in flight, of all kinds.
std::vector<std::unique_ptr<Step>> some_steps(Run& run, Layer& layer, bool threads) {
    std::vector<std::unique_ptr<Step>> steps;
    for (int i = run.random.whole(1, 6); i > 0; --i) {
        const Manner manner(run.random, threads);
        steps.push_back(std::make_unique<Step>(run, std::vector<Layer*>{&layer}, manner));
        steps.back()->issue();
    }
    run.engine.wait_for_all();
    return steps;
}

void back_to_normal() {
    configure(kPatience, *exchange_in_memory());
    syncbn_forking(0);
    syncbn_exiting(0);
    syncbn_reset();
}

}  // namespace

void changing(Run& run) {
    while (run.goes_on()) {
        const bool threads = run.random.one_in(2);
        Layer layer(run.random, any_spec(run.random, run.random.whole(2, 4)), "changing");
        const Hands hands(run.random, harmless(layer, false));
        for (int round = 0; round < 10 && run.goes_on(); ++round) {
            for (const auto& step : some_steps(run, layer, threads)) step->check();
            check_running_statistics(layer);
        }
    }
    back_to_normal();
}

void disturbed(Run& run) {
    while (run.goes_on()) {
        const bool threads = run.random.one_in(2);
        Layer layer(run.random, any_spec(run.random, run.random.whole(2, 4)), "disturbed");
        {
            const Hands hands(run.random, harmful(layer));
            for (int round = 0; round < 5 && run.goes_on(); ++round) {
                some_steps(run, layer, threads);
                syncbn_reset();
            }
        }
        back_to_normal();
        layer.restore();
        right_step(run, layer);
    }
}

}  // namespace driver
