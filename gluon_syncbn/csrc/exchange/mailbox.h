// Carries vectors between processes, each under a label that finds its receiver. Nothing here waits for another process,
// and nothing depends on the order of calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace syncbn {

// The identity of a vector, the same in every process. A phase below 0 is the kind of an exchange without a meeting.
struct Label {
    int64_t key, node, call, phase, piece;
    bool operator==(const Label& other) const {
        return key == other.key && node == other.node && call == other.call && phase == other.phase &&
               piece == other.piece;
    }
};

using Ranks = std::vector<size_t>;  // ascending

// The ranks that share a mailbox within a job: their ranks in the job, and the size of the job.
struct Members {
    Ranks ranks;
    size_t of;

    static Members all(size_t of) {
        Ranks ranks(of);
        std::iota(ranks.begin(), ranks.end(), size_t{0});
        return {std::move(ranks), of};
    }
};

class Mailbox {
  public:
    virtual ~Mailbox() = default;

    virtual size_t ranks() const = 0;
    virtual size_t rank() const = 0;
    // Whether this process has opened it, and is not a child of a fork.
    virtual bool is_own() const = 0;
    // The most values of a vector.
    virtual size_t most_values() const = 0;

    // Leaves a vector for `readers`. With 0 values, it only shows its length. Called by one thread at a time. Throws
    // std::runtime_error if it has no space.
    virtual void post(const Label& label, const double* values, size_t count, size_t length, const Ranks& readers) = 0;
    // Whether all that this rank has posted under the label needs no more of its work.
    virtual bool is_out(const Label&) { return true; }
    // Returns the vector that `rank` has left for this one under the label; null if there is none yet. It stays until
    // `done`.
    struct Found {
        const double* values = nullptr;
        size_t count = 0, length = 0;
        size_t place = 0;
    };
    virtual Found find(size_t rank, const Label& label) const = 0;
    virtual void done(size_t rank, const Label& label, const Found& found) = 0;
    // Returns the labels of vectors that `rank` has left for this one.
    virtual std::vector<Label> left_by(size_t rank) const = 0;
    // Whether this rank has posted under the label, and the exchange goes on.
    virtual bool is_here(const Label& label) const = 0;
    virtual void forget(const Label& label) = 0;

    // A ring is for all threads with one label. Its number changes with each arrival. A thread can sleep until the
    // number is not `seen`, or for `seconds`, and can wake the sleepers.
    virtual uint32_t ring_of(const Label& label) const = 0;
    virtual uint32_t heard(uint32_t ring) = 0;
    virtual void sleep(uint32_t ring, uint32_t seen, double seconds) = 0;
    virtual void wake(uint32_t ring) = 0;
    // Whether an arrival wakes who sleeps.
    virtual bool wakes() const { return true; }

    enum class State : uint32_t { kAbsent = 0, kPresent = 1, kFailed = 2, kEnded = 3 };
    virtual State state_of(size_t rank) const = 0;
    virtual std::string reason_of(size_t rank) const = 0;  // of a rank that has failed
    // Whether there are more ranks than cores for them.
    virtual bool crowded() const = 0;
    // The process of a present rank that has died without a word, which only the kernel knows; 0 if it has not.
    virtual int64_t died(size_t rank) const = 0;
    // What has become of a rank: "has ended". Empty if it is there.
    std::string fate_of(size_t rank) const {
        if (state_of(rank) == State::kFailed) return "has failed: " + reason_of(rank);
        if (state_of(rank) == State::kEnded) return "has ended";
        const int64_t process = died(rank);
        if (process == 0) return "";
        return "has ended without a word (process " + std::to_string(process) + "; was it killed?)";
    }
    // Reports that this rank has failed, with a reason, or has ended. Wakes all ranks. The first report stays. A child of
    // a fork reports nothing.
    virtual void leave(State state, const std::string& reason) = 0;
};

}  // namespace syncbn
