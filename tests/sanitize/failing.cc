#include "log.h"
#include "step.h"

namespace driver {
namespace {

struct Trial {
    Run& run;
    Layer& layer;
    Step& step;
    Replica& victim;
};

struct Fault {
    const char* reason;  // a part of the error
    bool in_backward;    // happens after the forward
    void (*happens)(const Trial&);
};

// A copy of its own, because the parameters belong to all replicas of a context.
void break_copy(ArrayP* array) {
    *array = make_array((*array)->type, (*array)->size, 1);
    (*array)->broken = true;
}

constexpr const char* kNoMemory = "MXNet gave no memory for an array: the array is broken";
constexpr const char* kRaised = "the script has raised an exception";

const Fault kFaults[] = {
    {", missing cpu(", false,
     [](const Trial& trial) {
         trial.layer.set_timeout(0.2);
         trial.victim.called = false;
     }},
    {", backward of call", false,  // a step has the time limit of its beginning, within which its forward has to come
     [](const Trial& trial) {
         trial.layer.set_timeout(5);
         trial.victim.differentiated = false;
     }},
    {" channels of float", false,
     [](const Trial& trial) {
         trial.victim.become(trial.run.random, trial.layer.spec.type, trial.layer.spec.channels + 1);
     }},
    {" channels of float", false,
     [](const Trial& trial) {
         const Type other = static_cast<Type>((static_cast<int>(trial.layer.spec.type) + 1) % 3);
         trial.victim.become(trial.run.random, other, trial.layer.spec.channels);
     }},
    {kNoMemory, false, [](const Trial& trial) { trial.victim.x->broken = true; }},
    {kNoMemory, false, [](const Trial& trial) { break_copy(&trial.victim.parameters.beta); }},
    {kNoMemory, false,
     [](const Trial& trial) {
         for (const auto& replica : trial.step.call()) break_copy(&replica->parameters.running_var);
     }},
    {kNoMemory, true, [](const Trial& trial) { trial.victim.y->broken = trial.victim.x->broken = true; }},
    {kNoMemory, true, [](const Trial& trial) { trial.victim.backwards[0].dy->broken = true; }},
    {kNoMemory, true, [](const Trial& trial) { trial.victim.backwards[0].gradients[0]->broken = true; }},
    {kNoMemory, true, [](const Trial& trial) { trial.victim.backwards[0].gradients[1]->broken = true; }},
    {"the cable is out", false, [](const Trial&) { fail_exchanges(1); }},
    {"the cable is out", true, [](const Trial&) { fail_exchanges(1); }},
    {" on cpu(9): the layer was called here", false, [](const Trial& trial) { trial.victim.context = "cpu(9)"; }},
    {"num_devices: 9", false,
     [](const Trial& trial) { trial.layer.place(trial.layer.spec.contexts, "num_devices: 9"); }},
    {kRaised, false, [](const Trial&) { syncbn_fail(kRaised); }},
    {kRaised, true, [](const Trial&) { syncbn_fail(kRaised); }},
};

void check_failure(const Trial& trial, const std::string& reason) {
    const std::string failure = text_of(syncbn_failure());
    expect_reason(failure, reason);
    bool told = false;
    trial.step.each([&](Replica& replica) {
        const std::string& error = replica.forward.error;
        told = told || contains(error, reason);
        check_values(replica.y, replica.req, !error.empty());
        for (Backward& backward : replica.backwards) {
            if (!backward.outcome.ended) continue;
            told = told || contains(backward.outcome.error, reason);
            for (int i = 0; i < 3; ++i)
                check_values(backward.gradients[i], backward.reqs[i], !backward.outcome.error.empty());
        }
    });
    expect(told, "somebody hears '" + reason + "'");
    check_running_statistics(trial.layer);
}

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
            const char* one[] = {"cpu(0)"};
            if (random.one_in(10)) configure(kPatience, *exchange_in_memory(), {random.whole(0, 1), one});
        },
        [](Random& random) { syncbn_forking(random.one_in(20)); },
        [](Random& random) { syncbn_exiting(random.one_in(20)); },
    };
    knobs.insert(knobs.end(), more.begin(), more.end());
    return knobs;
}

// Several steps in flight, of all kinds.
void some_steps(Run& run, Layer& layer, bool threads, bool succeed) {
    std::deque<Step> steps;
    for (int i = run.random.whole(1, 6); i > 0; --i)
        steps.emplace_back(run, std::vector<Layer*>{&layer}, Manner(run.random, threads)).issue();
    run.engine.wait_for_all();
    if (succeed) {
        for (Step& step : steps) step.check();
        check_running_statistics(layer);
    } else {
        syncbn_reset();
    }
}

void while_settings_change(Run& run, const char* name, bool steps_succeed) {
    while (run.goes_on()) {
        const bool threads = run.random.one_in(2);
        Layer layer(run.random, any_spec(run.random, run.random.whole(2, 4)), name);
        {
            const Hands hands(run.random, steps_succeed ? harmless(layer, false) : harmful(layer));
            for (int round = 0; round < 5 && run.goes_on(); ++round) some_steps(run, layer, threads, steps_succeed);
        }
        configure(kPatience, *exchange_in_memory());
        syncbn_forking(0);
        syncbn_exiting(0);
        syncbn_reset();
        layer.restore();
        right_step(run, layer);
    }
}

}  // namespace

void failing(Run& run) {
    while (run.goes_on()) {
        const bool threads = run.random.one_in(2);
        Spec spec = any_meeting_spec(run.random, run.random.whole(2, 4));
        spec.exchange = exchange_of_processes();  // which can be told to fail
        Layer layer(run.random, spec, "failing");
        for (int round = 0; round < 4; ++round) {
            Manner manner(run.random, threads);
            manner.training = true;
            manner.backwards = run.random.whole(1, 2);
            Step step(run, {&layer}, manner);
            Replica& victim = step.any_replica();
            victim.req = syncbn::kWrite;
            victim.backwards[0].reqs.assign(4, syncbn::kWrite);
            const Trial trial{run, layer, step, victim};
            const Fault fault = run.random.one_of<Fault>({std::begin(kFaults), std::end(kFaults)});
            if (!fault.in_backward) fault.happens(trial);
            step.issue_forwards();
            if (fault.in_backward) {
                run.engine.wait_for_all();
                fault.happens(trial);
            }
            step.issue_backwards();
            run.engine.wait_for_all();
            check_failure(trial, fault.reason);
            ++figures.steps;

            syncbn_reset();
            fail_exchanges(0);
            layer.restore();
            right_step(run, layer);
        }
    }
}

void starving(Run& run) {
    while (run.goes_on()) {
        const bool threads = run.random.one_in(2);
        const Spec spec = any_spec(run.random, run.random.whole(2, 3));
        Layer layer(run.random, spec, "starving");
        for (int round = 0; round < 4; ++round) {
            Step step(run, {&layer}, Manner(run.random, threads));
            layer.set_timeout(0.3);  // a call that could not be made is missing
            const size_t lost = syncbn::records->lost;
            fail_allocation(run.random.whole(1, 60 * spec.contexts));
            step.issue();
            run.engine.wait_for_all();
            const bool failed = allocation_has_failed();
            fail_allocation(0);
            bool told = syncbn::records->lost > lost;  // a warning may be lost for lack of memory, and fails no step
            std::string otherwise;                     // than by a replica that was late, as on a busy machine
            const auto hear = [&](const std::string& error) {
                told = told || !error.empty();
                if (!contains(error, " arrived")) otherwise += error;
            };
            step.each([&](Replica& replica) {
                hear(replica.forward.error);
                for (const Backward& backward : replica.backwards) hear(backward.outcome.error);
            });
            expect(failed ? told : otherwise.empty(),
                   "a step fails where an allocation fails, and nowhere else: " + std::to_string(failed) + otherwise);
            syncbn_reset();
            layer.restore();
            right_step(run, layer);
        }
    }
}

void changing(Run& run) { while_settings_change(run, "changing", true); }

void disturbed(Run& run) { while_settings_change(run, "disturbed", false); }

}  // namespace driver
