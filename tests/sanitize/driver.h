// What all kinds of run share: statements about results, random choices, the functions that Python calls, and exchanges.
#pragma once

#include "exchange/exchange.h"
#include "exchange/mpi.h"
#include "meeting/tape.h"
#include "standard.h"
#include "types.h"
#include "waiting/wait.h"

using syncbn::Asked;
using syncbn::Span;
using NDArrayHandle = void*;

// The functions that Python calls. The Makefile takes their declarations from csrc.
#define SYNCBN_API(result, name, ...) extern result (*syncbn_##name)(__VA_ARGS__)
extern "C" {
#include "functions.h"
}

namespace driver {

constexpr double kPatience = 100;  // seconds: more than any right step takes under a sanitizer

// ---- what was done, and what was wrong in it -------------------------------------------------------------------

struct Figures {
    std::atomic<long> steps{0}, failures{0};  // failures: calls that ended in an error
    std::atomic<long> checked{0}, wrong{0};   // arrays and other statements about results
};
inline Figures figures;

// Counts a statement about a result, and says so where it does not hold.
inline void expect(bool holds, const std::string& what) {
    ++figures.checked;
    if (holds) return;
    ++figures.wrong;
    std::fprintf(stderr, "WRONG: %s\n", what.c_str());
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
// A text that says why something has ended.
inline void expect_reason(const std::string& text, const std::string& reason) {
    expect(contains(text, reason), "'" + text + "' says '" + reason + "'");
}

inline std::string text_of(const Span<const char>* text) { return {text->begin(), text->end()}; }
inline void pause(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Whatever a run chooses: the same seed chooses the same.
class Random {
  public:
    explicit Random(uint64_t seed) : engine_(seed) {}

    uint64_t seed() { return engine_(); }  // of another one
    int whole(int lowest, int highest) { return lowest + static_cast<int>(seed() % (highest - lowest + 1)); }
    bool one_in(int n) { return whole(1, n) == 1; }
    double normal() { return std::normal_distribution<>()(engine_); }
    // Of 0 ... n-1
    std::vector<size_t> order(size_t n) {
        std::vector<size_t> out(n);
        std::iota(out.begin(), out.end(), size_t{0});
        std::shuffle(out.begin(), out.end(), engine_);
        return out;
    }
    template <typename T>
    T one_of(const std::vector<T>& values) {
        return values[seed() % values.size()];
    }

  private:
    std::mt19937_64 engine_;
};

// ---- memory that runs out --------------------------------------------------------------------------------------

// As long as one lives, this thread is in the core; or back in the program around it.
class Within {
  public:
    explicit Within(bool core);
    ~Within();

  private:
    const bool before_;
};
// The n-th allocation of the core from now on fails, and no other; 0: none.
void fail_allocation(long n);
// Whether it has.
bool allocation_has_failed();

// ---- exchanges: in memory; one of Python's, played here; and one with another process, which a thread plays --------

// A wait for other processes, which looks around as those of the core do.
class WaitForOthers : public syncbn::Wait {
  public:
    WaitForOthers() : Wait(10, "", "rank 0 waits") {}
    // Returns whether it goes on.
    bool looks() noexcept {
        try {
            look();
            return true;
        } catch (const std::exception&) {
            return false;
        }
    }
};

// Once, before the first layer.
void make_exchanges();
// A failure between processes is for good, since a job starts again then. This replaces that exchange.
void renew_exchanges();
// Each returns where the exchange stands.
Asked* const* any_exchange(Random& random);
Asked* const* exchange_in_memory();
Asked* const* exchange_of_processes();
// The vectors of this layer are put side by side: the other process has none.
void gathers(int64_t layer);
// So many of the next exchanges fail.
void fail_exchanges(int count);

}  // namespace driver
