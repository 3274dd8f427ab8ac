// Shares memory between the processes of one machine: each rank leaves vectors there that others read.
//
//   rank 0      [outbox 0] [outbox 1] ...      1. post: a free outbox of one's own gets label and vector
//   rank 1      [outbox 0] [outbox 1] ...      2. whoever waits looks through the outboxes of the others for the label
//   rings       [0] [1] ...                    3. whoever completes a set of vectors wakes those who sleep at its ring
//   lanes       [0] [1] ...                    pieces of long sums, one lane for each rank: see sums.h
//
// Every word has one writer, but for the readers' marks and the rings. A process that is killed leaves nothing locked,
// and others do not see its unfinished posts. The kernel frees the memory with the last process, since it has no name.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "types.h"

namespace syncbn {

// The identity of a vector, the same in every process.
struct Label {
    int64_t key, node, call, phase, piece;
    bool operator==(const Label& other) const {
        return key == other.key && node == other.node && call == other.call && phase == other.phase &&
               piece == other.piece;
    }
};

// The ranks that share a segment within a job: their ranks in the job, ascending, and the size of the job.
struct Members {
    std::vector<size_t> ranks;
    size_t of;
};

class Segment {
  public:
    static constexpr size_t kMostRanks = 64;     // a reader's mark is a bit
    static constexpr size_t kMostValues = 4608;  // of a vector, enough for the moments of 2048 channels

    // Rank 0 creates it; the others open it as file descriptor `number` of process `process`. Each throws
    // std::runtime_error with the reason. A process that sees other memory there, as in another container, finds no
    // `token` or another one.
    static std::unique_ptr<Segment> create(size_t ranks);
    static std::unique_ptr<Segment> open(size_t ranks, size_t rank, int64_t process, int number,
                                         const std::string& token);
    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    size_t ranks() const { return ranks_; }
    size_t rank() const { return rank_; }
    int number() const { return file_; }
    std::string token() const;
    // Whether this process has opened it, and is not a child of a fork.
    bool is_own() const;

    // Leaves a vector for `readers`, a bit for each rank. `length` is that of the whole vector, which this may be a
    // piece of. Throws std::runtime_error if no outbox is free.
    void post(const Label& label, const double* values, size_t count, size_t length, uint64_t readers);
    // Returns the vector that `rank` has left for this one under the label; null if there is none yet. It stays until
    // `done`.
    struct Found {
        const double* values = nullptr;
        size_t count = 0, length = 0;
        size_t outbox = 0;
    };
    Found find(size_t rank, const Label& label) const;
    void done(size_t rank, const Found& found);
    // Returns the labels of vectors from `rank` that some of `readers` have not read yet.
    std::vector<Label> left_by(size_t rank, uint64_t readers) const;

    // A ring is for all threads with one label. Its number of posts changes with each post. A thread can sleep until
    // the number is not `seen`, or for `seconds`, and can wake the sleepers.
    uint32_t ring_of(const Label& label) const;
    uint32_t heard(uint32_t ring) const;
    void sleep(uint32_t ring, uint32_t seen, double seconds);
    void wake(uint32_t ring);

    enum class State : uint32_t { kAbsent = 0, kPresent = 1, kFailed = 2, kEnded = 3 };
    State state_of(size_t rank) const;
    // Whether there are more ranks than cores for them; true until all are present.
    bool crowded() const;
    // Whether a present process has died. Asks the kernel.
    bool has_died(size_t rank) const;
    std::string reason_of(size_t rank) const;  // of a rank that has failed
    int64_t process_of(size_t rank) const;
    // Reports that this rank has failed, with a reason, or has ended. Wakes all ranks. The first report stays.
    void leave(State state, const std::string& reason);

    // The part of a rank in long sums: how far it is, and its pieces. Only the rank itself writes there, except for the
    // bell. Counts never decrease.
    static constexpr size_t kPiece = 1 << 19, kPieces = 4;  // bytes, and pieces of a rank
    struct Lane {
        std::atomic<uint64_t> rounds, in, added, total, out;
        std::atomic<int64_t> channel;
        std::atomic<uint64_t> digest;
        std::atomic<uint32_t> bell, sleeping;
    };
    Lane& lane(size_t rank) const;
    char* piece(size_t rank, uint64_t number) const;
    // Wakes the thread of a rank that sleeps in `listen`, where it has `heard` so many rings.
    void ring(size_t rank);
    void listen(uint32_t heard, double seconds);

  private:
    struct Head;
    struct Member;
    struct Ring;
    struct Outbox;
    Segment(size_t ranks, size_t rank, int file);
    void present();
    Outbox& outbox(size_t rank, size_t index) const;
    double* values(size_t rank, size_t index) const;

    const size_t ranks_, rank_;
    const int file_;
    const int64_t process_;
    char* memory_ = nullptr;
    size_t size_ = 0;
    mutable std::atomic<int> cores_{0};  // at most the number of ranks; 0 while some rank is absent
    Head* head_ = nullptr;
    Member* members_ = nullptr;
    Ring* rings_ = nullptr;
    Outbox* outboxes_ = nullptr;
    double* values_ = nullptr;
    char* lanes_ = nullptr;
    char* pieces_ = nullptr;
};

}  // namespace syncbn
