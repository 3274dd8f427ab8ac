#include <deque>
#include <functional>
#include <future>

#include "core.h"
#include "failure.h"
#include "figures.h"
#include "interrupts.h"
#include "meeting/tape.h"
#include "results.h"
#include "runs.h"

namespace driver {
namespace {

// A step that waits for one of its replicas.
struct Wait {
    Run& run;
    Layer layer;
    Step step;
    Replica& missing;

    explicit Wait(Run& run)
        : run(run),
          layer(run.random, spec(run.random), "waiting"),
          step(run, {&layer}, manner(run.random)),
          missing(*step.call().back()) {}

    static Spec spec(Random& random) { return any_meeting_spec(random, random.whole(2, 3)); }

    static Manner manner(Random& random) {
        Manner manner;
        manner.graph = random.one_in(2);
        return manner;
    }

    // The missing replica is not called.
    void begin() {
        missing.called = false;
        step.issue_forwards();
        missing.called = true;
    }

    void go_on() {
        missing.issue_forward(run.engine);
        step.issue_backwards();
    }

    void end_well() {
        run.engine.wait_for_all();
        step.check();
        check_running_statistics(layer);
        ++figures.steps;
    }

    // By itself, for this reason; then all is well again.
    void end(const char* reason) {
        run.engine.wait_for_all();
        step.each([&](Replica& replica) {
            if (&replica != &missing)
                expect(contains(replica.forward.error, reason),
                       "'" + replica.forward.error + "' says '" + reason + "'");
        });
        ++figures.steps;
        syncbn_forking(0);
        syncbn_exiting(0);
        syncbn_reset();
        layer.restore();
        right_step(run, layer);
    }
};

// What ends a wait, and what it says then.
struct End {
    const char* reason;
    std::function<void()> happens;
};

// Any wait.
std::vector<End> ends(const Interrupts& interrupts) {
    return {
        {"process was asked to end",
         [&interrupts] {
             interrupts.install(Interrupts::kPlain);
             interrupts.send();
         }},
        {"the script has raised an exception", [] { syncbn_fail("the script has raised an exception"); }},
    };
}

// A wait for a replica.
std::vector<End> all_ends(const Interrupts& interrupts) {
    std::vector<End> all = ends(interrupts);
    all.push_back({"process was asked to end", [] { syncbn_exiting(1); }});
    all.push_back({"the process was forked", [] { syncbn_forking(1); }});
    return all;
}

// A wait for a call that is repeated, and that does not come.
void recall(double timeout, const End& end) {
    const syncbn::Memo memo;
    auto error = std::async(std::launch::async, [&] {
        syncbn::Wait wait(timeout, "recalling", "it does not come", "Do something.");
        try {
            memo.result(wait);
        } catch (const syncbn::Failure& failure) {
            return std::string(failure.what());
        }
        return std::string();
    });
    pause(0.2);  // it waits by now, or it comes to the same
    end.happens();
    const std::string got = error.get();
    expect(contains(got, end.reason), "'" + got + "' says '" + end.reason + "'");
    syncbn_reset();
    ++figures.steps;
}

}  // namespace

void waiting(Run& run) {
    const Interrupts interrupts;
    do {
        std::deque<Wait> waits;
        for (int i = 0; i < 3; ++i) {
            waits.emplace_back(run);
            waits.back().begin();
        }
        for (auto handler :
             {Interrupts::kChaining, Interrupts::kPlain, Interrupts::kWithInformation, Interrupts::kChaining}) {
            interrupts.install(handler);
            interrupts.send();
        }
        for (Wait& wait : waits) wait.go_on();
        for (Wait& wait : waits) wait.end_well();
    } while (run.goes_on());
}

void ended(Run& run) {
    const Interrupts interrupts;
    do {
        for (const End& end : all_ends(interrupts)) {
            Wait wait(run);
            wait.begin();
            end.happens();
            wait.end(end.reason);
        }
    } while (run.goes_on());
}

void recalling(Run& run) {
    const Interrupts interrupts;
    do {
        for (const End& end : ends(interrupts)) recall(kPatience, end);
        recall(0.2, {"it does not come after 0.2 s. Do something.", [] {}});
    } while (run.goes_on());
}

void lasting(Run& run) {
    constexpr double kSeconds = 15;
    if (run.left() < kSeconds) return;
    Wait warned(run);
    const long warnings = figures.warnings;
    warned.begin();
    for (const double begin = now(); figures.warnings == warnings && now() < begin + kPatience;) pause(0.05);
    expect(figures.warnings == warnings + 1, "one of those who wait for long says so");
    warned.go_on();
    warned.end_well();
}

void closing(Run& run) {
    Wait wait(run);
    std::vector<std::unique_ptr<Step>> steps;
    for (int i = 0; i < 4; ++i) {
        steps.push_back(std::make_unique<Step>(run, std::vector<Layer*>{&wait.layer}, Manner()));
        steps.back()->issue();
        if (i == 1) syncbn_close();
    }
    wait.step.issue();
    run.engine.wait_for_all();
    const char* reason = "the process has run its exit handlers";
    wait.step.each([&](Replica& replica) {
        expect(contains(replica.forward.error, reason), "'" + replica.forward.error + "' says '" + reason + "'");
    });
}

}  // namespace driver
