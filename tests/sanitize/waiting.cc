#include <unistd.h>

#include <csignal>

#include "step.h"

namespace driver {
namespace {

// ---- SIGINT, and handlers of it as Python and libraries have them ----------------------------------------------

std::atomic<long> taken{0};
std::atomic<const struct sigaction*> beneath{nullptr};

void plain(int) { ++taken; }

// Calls what was there before it: the core's handler, perhaps.
void chaining(int signal, siginfo_t* information, void* context) {
    ++taken;
    const struct sigaction& before = *beneath.load();
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(signal, information, context);
    else
        before.sa_handler(signal);
}

struct sigaction current_handler() {
    struct sigaction current;
    sigaction(SIGINT, nullptr, &current);
    return current;
}

template <typename Condition>
void until(const Condition& condition, const char* what) {
    const double end = syncbn::seconds() + kPatience;
    while (!condition() && syncbn::seconds() < end) continue;
    expect(condition(), what);
}

// As long as it lives, SIGINT does not end the process. Somebody has to wait in the core while one of these works.
class Interrupts {
  public:
    enum Handler { kPlain, kChaining };

    Interrupts() : before_(current_handler()) { set(kPlain); }  // whatever chains has something beneath
    ~Interrupts() { sigaction(SIGINT, &before_, nullptr); }

    // As signal.signal does in the midst of a wait, which notices.
    void install(Handler which) const {
        static std::deque<struct sigaction> replaced;  // for good: a handler may be running
        if (which == kChaining) beneath = &replaced.emplace_back(current_handler());
        const auto handler = set(which);
        until([&] { return current_handler().sa_handler != handler.sa_handler; },
              "a wait notices a new handler of SIGINT");
    }

    // Until it has been counted and handed on.
    void send() const {
        const long counted = syncbn::interrupts, before = taken;
        kill(getpid(), SIGINT);
        until([&] { return syncbn::interrupts > counted && taken > before; }, "SIGINT is counted and handed on");
    }

  private:
    static struct sigaction set(Handler which) {
        struct sigaction handler{};
        if (which == kPlain) {
            handler.sa_handler = plain;
        } else {
            handler.sa_flags = SA_SIGINFO;
            handler.sa_sigaction = chaining;
        }
        sigaction(SIGINT, &handler, nullptr);
        return handler;
    }

    struct sigaction before_;
};

// A step that waits for one of its replicas.
struct Wait {
    Layer layer;
    Step step;
    Replica& missing;

    explicit Wait(Run& run)
        : layer(run.random, any_meeting_spec(run.random, run.random.whole(2, 3)), "waiting"),
          step(run, {&layer}, Manner()),
          missing(*step.call().back()) {
        missing.called = false;
        step.issue_forwards();
        missing.called = true;
    }
};

}  // namespace

void waiting(Run& run) {
    const Interrupts interrupts;
    do {
        std::deque<Wait> waits;
        for (int i = 0; i < 3; ++i) waits.emplace_back(run);
        for (auto handler : {Interrupts::kChaining, Interrupts::kPlain, Interrupts::kChaining}) {
            interrupts.install(handler);
            interrupts.send();
        }
        for (Wait& wait : waits) {
            wait.missing.issue_forward(run.engine);
            wait.step.issue_backwards();
        }
        run.engine.wait_for_all();
        for (Wait& wait : waits) {
            wait.step.check();
            check_running_statistics(wait.layer);
            ++figures.steps;
        }
    } while (run.goes_on());
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
