#include "step.h"

namespace driver {

void healthy(Run& run) {
    while (run.goes_on()) {
        const bool threads = run.random.one_in(2);
        const int contexts = run.random.whole(2, 4);
        std::deque<Layer> layers;
        std::vector<Layer*> beside;
        for (int i = run.random.whole(1, 2); i > 0; --i) {
            const Spec spec = any_spec(run.random, contexts);
            beside.push_back(&layers.emplace_back(run.random, spec, "healthy" + std::to_string(i)));
        }
        for (int round = run.random.whole(1, 8); round > 0; --round) {
            std::deque<Step> steps;  // in flight at once
            for (int i = run.random.whole(1, 4); i > 0; --i) {
                steps.emplace_back(run, beside, Manner(run.random, threads)).issue();
                if (run.random.one_in(2)) steps.back().each([](Replica& replica) { replica.let_go(); });
            }
            run.engine.wait_for_all();
            for (Step& step : steps) step.check();
            for (const Layer& layer : layers) check_running_statistics(layer);
        }
    }
}

void repeated(Run& run) {
    while (run.goes_on()) {
        const bool threads = run.random.one_in(2);
        Layer layer(run.random, any_spec(run.random, run.random.whole(2, 4)), "repeated");
        Manner manner(run.random, threads);
        manner.graph = true;
        std::deque<Step> steps;
        for (int i = run.random.whole(2, 10); i > 0; --i) {
            manner.training = !run.random.one_in(5);  // with static_shape, the same states predict, too
            Step& step = steps.emplace_back(run, std::vector<Layer*>{&layer}, manner);
            if (steps.size() > 1) step.repeat(steps[steps.size() - 2]);
            step.issue();
        }
        run.engine.wait_for_all();
        for (Step& step : steps) step.check();
        check_running_statistics(layer);
    }
}

void dropping(Run& run) {
    while (run.goes_on()) {
        const bool threads = run.random.one_in(2);
        Layer layer(run.random, any_spec(run.random, run.random.whole(2, 4)), "dropped");
        Step step(run, {&layer}, Manner(run.random, threads));
        step.issue_forwards();
        std::thread collector([&layer, late = run.random.whole(0, 200)] {
            pause(late * 1e-6);
            layer.drop();
        });
        step.issue_backwards();
        step.each([](Replica& replica) { replica.let_go(); });
        collector.join();
        run.engine.wait_for_all();
        step.check();
        check_running_statistics(layer);
        ++figures.steps;
    }
}

}  // namespace driver
