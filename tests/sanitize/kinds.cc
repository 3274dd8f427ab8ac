#include <unistd.h>

#include <csignal>

#include "log.h"
#include "step.h"

namespace driver {
namespace {

// ---- threads that turn at every knob until they are told to stop -------------------------------------------------

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

// Those that make no difference to results.
std::vector<Hands::Turn> harmless(const Layer& layer, bool steps_fail = false) {
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

// Those that pull the rug from under a step, too.
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

// ---- what is wrong in one step -----------------------------------------------------------------------------------

struct Trial {
    Run& run;
    Layer& layer;
    Step& step;
    Replica& victim;
};

struct Fault {
    bool in_backward;  // happens after the forward
    void (*happens)(const Trial&);
};

// A copy of its own, because the parameters belong to all replicas of a context.
void break_copy(ArrayP* array) {
    *array = make_array((*array)->type, (*array)->size, 1);
    (*array)->broken = true;
}

const Fault kFaults[] = {
    {false,
     [](const Trial& trial) {
         trial.layer.set_timeout(0.2);
         trial.victim.called = false;
     }},
    {false,  // a step has the time limit of its beginning, within which its forward has to come
     [](const Trial& trial) {
         trial.layer.set_timeout(2);
         trial.victim.differentiated = false;
     }},
    {false,
     [](const Trial& trial) {
         trial.victim.become(trial.run.random, trial.layer.spec.type, trial.layer.spec.channels + 1);
     }},
    {false,
     [](const Trial& trial) {
         const Type other = static_cast<Type>((static_cast<int>(trial.layer.spec.type) + 1) % 3);
         trial.victim.become(trial.run.random, other, trial.layer.spec.channels);
     }},
    {false, [](const Trial& trial) { trial.victim.x->broken = true; }},
    {false, [](const Trial& trial) { break_copy(&trial.victim.parameters.beta); }},
    {false,
     [](const Trial& trial) {
         for (const auto& replica : trial.step.call()) break_copy(&replica->parameters.running_var);
     }},
    {true, [](const Trial& trial) { trial.victim.y->broken = trial.victim.x->broken = true; }},
    {true, [](const Trial& trial) { trial.victim.backwards[0].dy->broken = true; }},
    {true, [](const Trial& trial) { trial.victim.backwards[0].gradients[0]->broken = true; }},
    {true, [](const Trial& trial) { trial.victim.backwards[0].gradients[1]->broken = true; }},
    {false, [](const Trial&) { fail_exchanges(1); }},
    {true, [](const Trial&) { fail_exchanges(1); }},
    {false, [](const Trial& trial) { trial.victim.context = "cpu(9)"; }},
    {false, [](const Trial&) { syncbn_fail("the script has raised an exception"); }},
    {true, [](const Trial&) { syncbn_fail("the script has raised an exception"); }},
};

// The errors of a step. With `check`, what failed has left nothing plausible.
std::string errors_of(Step& step, bool check) {
    std::string errors;
    step.each([&](Replica& replica) {
        errors += replica.forward.error;
        if (check) check_values(replica.y, replica.req, !replica.forward.error.empty());
        for (Backward& backward : replica.backwards) {
            errors += backward.outcome.error;
            for (int i = 0; check && backward.outcome.ended && i < 3; ++i)
                check_values(backward.gradients[i], backward.reqs[i], !backward.outcome.error.empty());
        }
    });
    return errors;
}

// As everything was, from which a step by itself is right again.
void recover(Run& run, Layer& layer) {
    configure(kPatience, *exchange_in_memory());
    fail_exchanges(0);
    syncbn_forking(0);
    syncbn_exiting(0);
    syncbn_reset();
    layer.restore();
    right_step(run, layer);
}

// ---- SIGINT, and handlers of it as Python and libraries have them ----------------------------------------------

using Handler = void (*)(int, siginfo_t*, void*);
std::atomic<long> taken{0};
std::atomic<Handler> of_core{nullptr};

void plain(int, siginfo_t*, void*) { ++taken; }

// Calls what was there before it.
void chaining(int signal, siginfo_t* information, void* context) {
    ++taken;
    of_core.load()(signal, information, context);
}

template <typename Condition>
void until(const Condition& condition, const char* what) {
    const double end = syncbn::seconds() + kPatience;
    while (!condition() && syncbn::seconds() < end) continue;
    expect(condition(), what);
}

// Somebody has to wait in the core, who takes notice of the new handler. Then a signal is counted and handed on.
void interrupt(Handler handler) {
    struct sigaction action{}, current;
    action.sa_flags = SA_SIGINFO;
    action.sa_sigaction = handler;
    sigaction(SIGINT, &action, nullptr);
    const auto noticed = [&] { return sigaction(SIGINT, nullptr, &current), current.sa_sigaction != handler; };
    until(noticed, "a wait notices a new handler of SIGINT");
    of_core = current.sa_sigaction;
    const long counted = syncbn::interrupts, before = taken;
    kill(getpid(), SIGINT);
    until([&] { return syncbn::interrupts > counted && taken > before; }, "SIGINT is counted and handed on");
}

}  // namespace

void healthy(Run& run) {
    while (run.goes_on()) {
        const bool threads = run.random.one_in(2), again = run.random.one_in(3), changing = run.random.one_in(3);
        const int contexts = run.random.whole(2, 4);
        std::deque<Layer> layers;
        std::vector<Layer*> beside;
        for (int i = run.random.whole(1, 2); i > 0; --i) {
            const Spec spec = any_spec(run.random, contexts);
            beside.push_back(&layers.emplace_back(run.random, spec, "healthy" + std::to_string(i)));
        }
        std::optional<Hands> hands;
        if (changing) hands.emplace(run.random, harmless(layers[0]));
        for (int round = run.random.whole(1, 8); round > 0; --round) {
            std::deque<Step> steps;  // in flight at once
            Manner manner(run.random, threads);
            for (int i = run.random.whole(1, 4); i > 0; --i) {
                if (!again) manner = Manner(run.random, threads);
                manner.graph = manner.graph || again;
                if (again) manner.training = !run.random.one_in(5);  // with static_shape, the same states predict, too
                Step& step = steps.emplace_back(run, beside, manner);
                if (again && steps.size() > 1) step.repeat(steps[steps.size() - 2]);
                step.issue();
                if (!again && run.random.one_in(2)) step.each([](Replica& replica) { replica.let_go(); });
            }
            if (round == 1 && !changing && run.random.one_in(2))
                for (const Layer& layer : layers) layer.drop();
            run.engine.wait_for_all();
            for (Step& step : steps) step.check();
            for (const Layer& layer : layers) check_running_statistics(layer);
        }
        hands.reset();
        configure(kPatience, *exchange_in_memory());
    }
}

void failing(Run& run) {
    while (run.goes_on()) {
        const bool threads = run.random.one_in(2), starving = run.random.one_in(2);
        const int contexts = run.random.whole(2, 4);
        Spec spec = starving ? any_spec(run.random, contexts) : any_meeting_spec(run.random, contexts);
        if (!starving) spec.exchange = exchange_of_processes();  // which can be told to fail
        Layer layer(run.random, spec, "failing");
        for (int round = 0; round < 4; ++round) {
            Manner manner(run.random, threads);
            manner.training = manner.training || !starving;
            manner.backwards = std::clamp(manner.backwards, starving ? 0 : 1, 2);
            Step step(run, {&layer}, manner);
            const size_t lost = syncbn::records->lost;
            if (starving) {
                layer.set_timeout(0.3);  // a call that could not be made is missing
                fail_allocation(run.random.whole(1, 60 * spec.contexts));
                step.issue();
            } else {
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
                ++figures.steps;
            }
            run.engine.wait_for_all();
            const bool failed = !starving || allocation_has_failed();
            fail_allocation(0);
            const std::string errors = errors_of(step, !starving);
            check_running_statistics(layer);
            if (failed)  // a warning may be lost for lack of memory, and fails no step
                expect(!errors.empty() || syncbn::records->lost > lost, "somebody hears of a failure");
            else  // a busy machine may be late
                expect(errors.empty() || contains(errors, " arrived"), "a step succeeds: " + errors);
            recover(run, layer);
        }
    }
}

void disturbed(Run& run) {
    while (run.goes_on()) {
        const bool threads = run.random.one_in(2);
        Layer layer(run.random, any_spec(run.random, run.random.whole(2, 4)), "disturbed");
        {
            const Hands hands(run.random, harmful(layer));
            for (int round = 0; round < 5 && run.goes_on(); ++round) {
                std::deque<Step> steps;  // in flight at once
                for (int i = run.random.whole(1, 6); i > 0; --i)
                    steps.emplace_back(run, std::vector<Layer*>{&layer}, Manner(run.random, threads)).issue();
                run.engine.wait_for_all();
                syncbn_reset();
            }
        }
        recover(run, layer);
    }
}

void waiting(Run& run) {
    struct sigaction before;
    sigaction(SIGINT, nullptr, &before);
    do {
        std::deque<Layer> layers;
        std::deque<Step> steps;  // each waits for a replica
        for (int i = 0; i < 3; ++i) {
            const Spec spec = any_meeting_spec(run.random, run.random.whole(2, 3));
            Layer& layer = layers.emplace_back(run.random, spec, "waiting");
            Step& step = steps.emplace_back(run, std::vector<Layer*>{&layer}, Manner());
            step.call().back()->called = false;
            step.issue_forwards();
        }
        for (const Handler handler : {plain, chaining, plain, chaining}) interrupt(handler);
        for (Step& step : steps) {
            Replica& missing = *step.call().back();
            missing.called = true;
            missing.issue_forward(run.engine);
            step.issue_backwards();
        }
        run.engine.wait_for_all();
        for (Step& step : steps) step.check();
        for (const Layer& layer : layers) check_running_statistics(layer);
        figures.steps += 3;
    } while (run.goes_on());
    sigaction(SIGINT, &before, nullptr);
}

void recalling(Run& run) {
    do {
        for (const bool fails : {false, true}) {
            const syncbn::Memo memo;
            syncbn::Wait wait(0.2, "recalling", "it does not come", "Do something.");
            if (fails) syncbn_fail("the script has raised an exception");
            try {
                memo.result(wait);
                expect(false, "a call that does not come is an error");
            } catch (const syncbn::Failure& failure) {
                expect_reason(failure.what(), fails ? "the script has" : "it does not come after 0.2 s. Do something.");
            }
            syncbn_reset();
        }
    } while (run.goes_on());
}

void closing(Run& run) {
    Layer layer(run.random, any_meeting_spec(run.random, 2), "closing");
    std::deque<Step> steps;
    for (int i = 0; i < 5; ++i) {
        steps.emplace_back(run, std::vector<Layer*>{&layer}, Manner()).issue();
        if (i == 1) syncbn_close();
    }
    run.engine.wait_for_all();
    steps.back().each(
        [](Replica& replica) { expect_reason(replica.forward.error, "the process has run its exit handlers"); });
}

}  // namespace driver
