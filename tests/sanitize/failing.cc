#include "core.h"
#include "exchange.h"
#include "figures.h"
#include "results.h"
#include "runs.h"

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

constexpr double kImpatience = 0.2;  // seconds

// A copy of its own, because the parameters belong to all replicas of a context.
void break_copy(ArrayP* array) {
    *array = make_array((*array)->type, (*array)->size, 1);
    (*array)->broken = true;
}

constexpr const char* kNoMemory = "MXNet gave no memory for an array: the array is broken";

const Fault kFaults[] = {
    {", missing cpu(", false,
     [](const Trial& trial) {
         trial.layer.set_timeout(kImpatience);
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
    {kNoMemory, true, [](const Trial& trial) { trial.victim.backwards[0].dx->broken = true; }},
    {kNoMemory, true, [](const Trial& trial) { trial.victim.backwards[0].dgamma->broken = true; }},
    {"the cable is out", false, [](const Trial&) { fail_exchanges(1); }},
    {"the cable is out", true, [](const Trial&) { fail_exchanges(1); }},
    {" on cpu(9): the layer was called here", false, [](const Trial& trial) { trial.victim.context_name = "cpu(9)"; }},
    {"num_devices: 9", false,
     [](const Trial& trial) { trial.layer.place(trial.layer.spec.contexts, "num_devices: 9"); }},
    {"the script has raised an exception", false,
     [](const Trial&) { syncbn_fail("the script has raised an exception"); }},
    {"the script has raised an exception", true,
     [](const Trial&) { syncbn_fail("the script has raised an exception"); }},
};

void check_failure(const Trial& trial, const std::string& reason) {
    const std::string failure = text_of(syncbn_failure());
    expect(contains(failure, reason), "'" + failure + "' says '" + reason + "'");
    bool told = false;
    trial.step.each([&](Replica& replica) {
        const std::string& error = replica.forward.error;
        told = told || contains(error, reason);
        check_values(replica.y, replica.req, !error.empty());
        for (Backward& backward : replica.backwards) {
            if (backward.outcome.ended == 0) continue;
            const bool failed = !backward.outcome.error.empty();
            told = told || contains(backward.outcome.error, reason);
            check_values(backward.dx, backward.reqs[syncbn::kX], failed);
            check_values(backward.dgamma, backward.reqs[syncbn::kGamma], failed);
            check_values(backward.dbeta, backward.reqs[syncbn::kBeta], failed);
        }
    });
    expect(told, "somebody hears '" + reason + "'");
    check_running_statistics(trial.layer);
}

}  // namespace

void early(Run& run) {
    Layer layer(run.random, any_meeting_spec(run.random, 2), "early");
    Step step(run, {&layer}, Manner());
    syncbn_fail("the script has raised an exception");
    step.issue();
    run.engine.wait_for_all();
    expect(!step.any_replica().forward.error.empty(), "a step that has failed before its first call fails");
    syncbn_reset();
    layer.restore();
    right_step(run, layer);
}

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

}  // namespace driver
