// Plays MXNet for the native core, under sanitizers.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "core.h"
#include "exchange.h"
#include "figures.h"
#include "mxnet.h"
#include "records.h"
#include "runs.h"

namespace {

using driver::figures;

struct Kind {
    const char* name;
    void (*run)(driver::Run&);
};

constexpr Kind kKinds[] = {
    {"early", driver::early},         {"healthy", driver::healthy},   {"repeated", driver::repeated},
    {"dropping", driver::dropping},   {"failing", driver::failing},   {"changing", driver::changing},
    {"disturbed", driver::disturbed}, {"waiting", driver::waiting},   {"ended", driver::ended},
    {"recalling", driver::recalling}, {"starving", driver::starving}, {"lasting", driver::lasting},
    {"summing", driver::summing},     {"closing", driver::closing},
};

#ifdef __SANITIZE_THREAD__
constexpr char kSanitizer[] = "thread";
#else
constexpr char kSanitizer[] = "address";
#endif

constexpr unsigned kTooLong = 300;  // seconds beyond its own that a kind may take; then the process is killed

int usage(const char* program) {
    std::fprintf(stderr, "usage: %s [--seed N] [--seconds S] [--kind NAME]\nkinds:", program);
    for (const Kind& kind : kKinds) std::fprintf(stderr, " %s", kind.name);
    std::fprintf(stderr, "\n");
    return 2;
}

void run(const Kind& kind, uint64_t seed, double seconds) {
    alarm(static_cast<unsigned>(seconds) + kTooLong);
    const double begin = driver::now();
    const long steps = figures.steps, forwards = figures.forwards, backwards = figures.backwards;
    const long failures = figures.failures, checked = figures.checked;
    {
        driver::Run run(seed, seconds);
        kind.run(run);
    }
    std::printf("%-8s %-12s %5.1f s %6ld steps %7ld forwards %7ld backwards %6ld failures %8ld checks\n", kSanitizer,
                kind.name, driver::now() - begin, figures.steps - steps, figures.forwards - forwards,
                figures.backwards - backwards, figures.failures - failures, figures.checked - checked);
    std::fflush(stdout);
}

}  // namespace

int main(int count, char** arguments) {
    uint64_t seed = 1;
    double seconds = 2;
    std::string only;
    for (int i = 1; i < count; i += 2) {
        const std::string name = arguments[i];
        if (i + 1 == count) return usage(arguments[0]);
        if (name == "--seed")
            seed = std::strtoull(arguments[i + 1], nullptr, 10);
        else if (name == "--seconds")
            seconds = std::atof(arguments[i + 1]);
        else if (name == "--kind")
            only = arguments[i + 1];
        else
            return usage(arguments[0]);
    }
    driver::load_core();
    driver::make_exchanges();
    syncbn_configure(driver::kPatience, 0, {}, *driver::exchange_in_memory());
    syncbn_seed(driver::kSeed);
    bool known = only.empty();
    {
        const driver::Records records;
        for (const Kind& kind : kKinds)
            if (only.empty() || only == kind.name) {
                known = true;
                run(kind, seed, seconds);
            }
    }
    if (!known) return usage(arguments[0]);
    driver::expect(figures.handles == 0, "every handle has been freed");
    driver::expect(figures.states == 0, "every operator's state has been deleted");
    driver::expect(figures.properties == 0, "every property has been deleted");
    driver::expect(syncbn_layers() == 0, "every layer is gone");
    std::printf("%-8s seed %llu, %ld steps, %ld records: %ld of %ld checks failed\n", kSanitizer,
                static_cast<unsigned long long>(seed), figures.steps.load(), figures.records.load(),
                figures.wrong.load(), figures.checked.load());
    return figures.wrong == 0 ? 0 : 1;
}
