#include <thread>

#include "figures.h"
#include "results.h"
#include "runs.h"

namespace driver {
namespace {

struct Kind {
    bool threads;
    int contexts;

    explicit Kind(Random& random) : threads(random.one_in(2)), contexts(random.whole(2, 4)) {}
};

}  // namespace

void healthy(Run& run) {
    while (run.goes_on()) {
        const Kind kind(run.random);
        std::vector<std::unique_ptr<Layer>> layers;
        std::vector<Layer*> beside;
        for (int i = run.random.whole(1, 2); i > 0; --i) {
            const Spec spec = any_spec(run.random, kind.contexts);
            layers.push_back(std::make_unique<Layer>(run.random, spec, "healthy" + std::to_string(i)));
            beside.push_back(layers.back().get());
        }
        for (int round = run.random.whole(1, 8); round > 0; --round) {
            std::vector<std::unique_ptr<Step>> steps;  // in flight at once
            for (int i = run.random.whole(1, 4); i > 0; --i) {
                const Manner manner(run.random, kind.threads);
                steps.push_back(std::make_unique<Step>(run, beside, manner));
                steps.back()->issue();
                if (run.random.one_in(2)) steps.back()->each([](Replica& replica) { replica.let_go(); });
            }
            run.engine.wait_for_all();
            for (const auto& step : steps) step->check();
            for (const Layer* layer : beside) check_running_statistics(*layer);
        }
    }
}

void repeated(Run& run) {
    while (run.goes_on()) {
        const Kind kind(run.random);
        Layer layer(run.random, any_spec(run.random, kind.contexts), "repeated");
        Manner manner(run.random, kind.threads);
        manner.graph = true;
        std::vector<std::unique_ptr<Step>> steps;
        for (int i = run.random.whole(2, 10); i > 0; --i) {
            manner.training = !run.random.one_in(5);  // with static_shape, the same states predict, too
            auto step = std::make_unique<Step>(run, std::vector<Layer*>{&layer}, manner);
            if (!steps.empty()) step->repeat(*steps.back());
            step->issue();
            steps.push_back(std::move(step));
        }
        run.engine.wait_for_all();
        for (const auto& step : steps) step->check();
        check_running_statistics(layer);
    }
}

void dropping(Run& run) {
    while (run.goes_on()) {
        const Kind kind(run.random);
        Layer layer(run.random, any_spec(run.random, kind.contexts), "dropped");
        Step step(run, {&layer}, Manner(run.random, kind.threads));
        step.issue_forwards();
        std::thread collector([&layer, late = run.random.whole(0, 200)] {
            pause(late * 1e-6);
            layer.drop();
        });
        step.issue_backwards();
        step.each([](Replica& replica) { replica.let_go(); });
        collector.join();
        bool gone = false;
        try {
            layer.property(kEager);
        } catch (const dmlc::Error& error) {
            gone = contains(error.what(), "one that is gone");
        }
        expect(gone, "no graph finds a layer that is gone");
        run.engine.wait_for_all();
        step.check();
        check_running_statistics(layer);
        ++figures.steps;
    }
}

}  // namespace driver
