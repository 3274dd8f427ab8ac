// Plays MXNet for the native core, under sanitizers.
#include <unistd.h>

#include "log.h"
#include "step.h"

namespace driver {
namespace {

struct Kind {
    const char* name;
    void (*run)(Run&);
};

constexpr Kind kKinds[] = {
    {"healthy", healthy},     {"failing", failing}, {"disturbed", disturbed}, {"waiting", waiting},
    {"recalling", recalling}, {"summing", summing}, {"closing", closing},
};

#ifdef __SANITIZE_THREAD__
constexpr char kSanitizer[] = "thread";
#else
constexpr char kSanitizer[] = "address";
#endif

constexpr unsigned kTooLong = 300;  // seconds beyond its own that a kind may take; then the process is killed

// Fetches what the core has to say, on a thread of its own, as logs.py does.
class Records {
  public:
    Records()
        : thread_([this] {
              while (!stop_) pass_on(0.1);
          }) {}
    ~Records() {
        stop_ = true;
        thread_.join();
        while (pass_on(0)) continue;
    }

  private:
    // Returns false if there is none.
    static bool pass_on(double seconds) {
        std::string text = text_of(syncbn_next_record(seconds));
        if (text.empty()) return false;
        if (std::atoi(text.c_str()) > static_cast<int>(syncbn::Level::kDoubt))  // else it asks for callers, or doubts
            expect_reason(text, " SyncBatchNorm ");
        return true;
    }

    std::atomic<bool> stop_{false};
    std::thread thread_;
};

int usage(const char* program) {
    std::fprintf(stderr, "usage: %s [--seed N] [--seconds S] [--kind NAME]\nkinds:", program);
    for (const Kind& kind : kKinds) std::fprintf(stderr, " %s", kind.name);
    std::fprintf(stderr, "\n");
    return 2;
}

void run(const Kind& kind, uint64_t seed, double seconds) {
    alarm(static_cast<unsigned>(seconds) + kTooLong);
    const double begin = syncbn::seconds();
    const long steps = figures.steps, failures = figures.failures, checked = figures.checked;
    {
        Run run(seed, seconds);
        kind.run(run);
    }
    std::printf("%-8s %-12s %5.1f s %6ld steps %6ld failures %8ld checks\n", kSanitizer, kind.name,
                syncbn::seconds() - begin, figures.steps - steps, figures.failures - failures,
                figures.checked - checked);
    std::fflush(stdout);
}

int main(int count, char** arguments) {
    std::map<std::string, std::string> given = {{"--seed", "1"}, {"--seconds", "3"}, {"--kind", ""}};
    for (int i = 1; i < count; i += 2) {
        if (i + 1 == count || given.count(arguments[i]) == 0) return usage(arguments[0]);
        given[arguments[i]] = arguments[i + 1];
    }
    const uint64_t seed = std::strtoull(given["--seed"].c_str(), nullptr, 10);
    const double seconds = std::atof(given["--seconds"].c_str());
    const std::string& only = given["--kind"];
    syncbn::mx.MXNDArrayGetData = Array::data;
    syncbn::mx.MXGetLastError = [] { return "the array is broken\nStack trace:\n  that of MXNet"; };
    make_exchanges();
    syncbn_configure(kPatience, 0, {}, *exchange_in_memory());
    syncbn_seed(kSeed);
    bool known = only.empty();
    {
        const Records records;
        for (const Kind& kind : kKinds) {
            if (!only.empty() && only != kind.name) continue;
            known = true;
            run(kind, seed, seconds);
        }
    }
    if (!known) return usage(arguments[0]);
    expect(syncbn_layers() == 0, "every layer is gone");
    std::printf("%-8s seed %llu, %ld steps: %ld of %ld checks failed\n", kSanitizer,
                static_cast<unsigned long long>(seed), figures.steps.load(), figures.wrong.load(),
                figures.checked.load());
    return figures.wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace driver

int main(int count, char** arguments) { return driver::main(count, arguments); }
