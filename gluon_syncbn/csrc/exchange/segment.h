// Memory that the processes of one machine share: each rank leaves vectors there that others read.
//
//   rank 0      [outbox 0] [outbox 1] ...      1. post: a free outbox of one's own gets label and vector
//   rank 1      [outbox 0] [outbox 1] ...      2. whoever waits looks through the outboxes of the others for the label
//   rings       [0] [1] ...                    3. whoever completes a set of vectors wakes those who sleep at its ring
//
// Every word has one writer, but for the readers' marks and the rings. A process that is killed anywhere leaves nothing locked:
// what it had not posted is not seen. The kernel takes the memory back with the last process, since it has no name.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "types.h"

namespace syncbn {

// Which vector this is, the same in every process.
struct Label {
    int64_t key, node, call, phase, piece;
    bool operator==(const Label& other) const {
        return key == other.key && node == other.node && call == other.call && phase == other.phase &&
               piece == other.piece;
    }
};

class Segment {
  public:
    static constexpr size_t kMostRanks = 64;     // a reader's mark is a bit
    static constexpr size_t kMostValues = 4608;  // of a vector, enough for the moments of 2048 channels

    // Rank 0 makes it, the others open it as the file descriptor `number` of process `process`. Each throws
    // std::runtime_error with the reason. A process that does not see the same memory there, as in another container, finds
    // no `token` or another one.
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
    // Whether this is the process that has opened it, not a child of a fork.
    bool is_own() const;

    // Leaves a vector for `readers`, a bit for each rank. `length` is that of the whole, of which this may be a piece. Throws
    // std::runtime_error where no outbox is free.
    void post(const Label& label, const double* values, size_t count, size_t length, uint64_t readers);
    // The vector that `rank` has left for this one under the label; null as long as there is none. It stays until `done`.
    struct Found {
        const double* values = nullptr;
        size_t count = 0, length = 0;
        size_t outbox = 0;
    };
    Found find(size_t rank, const Label& label) const;
    void done(size_t rank, const Found& found);
    // The labels of what `rank` has left that some of `readers` have not read yet.
    std::vector<Label> left_by(size_t rank, uint64_t readers) const;

    // A number that changes whenever something is posted under this label; sleeps until it is not `seen` any more, or for
    // `seconds`; wakes whoever sleeps there.
    uint32_t ring_of(const Label& label) const;
    uint32_t heard(uint32_t ring) const;
    void sleep(uint32_t ring, uint32_t seen, double seconds);
    void wake(uint32_t ring);

    enum class State : uint32_t { kAbsent = 0, kPresent = 1, kFailed = 2, kEnded = 3 };
    State state_of(size_t rank) const;
    // Whether the ranks are more than the cores that they may run on. So it seems until all are present.
    bool crowded() const;
    // Whether a process that is present has died. Asks the kernel.
    bool has_died(size_t rank) const;
    std::string reason_of(size_t rank) const;  // of one that has failed
    int64_t process_of(size_t rank) const;
    // This rank has failed, for a reason, or has ended. Wakes everybody. The first one stays.
    void leave(State state, const std::string& reason);

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
    mutable std::atomic<int> cores_{0};  // as many as the ranks at most; 0 where some rank is absent yet
    Head* head_ = nullptr;
    Member* members_ = nullptr;
    Ring* rings_ = nullptr;
    Outbox* outboxes_ = nullptr;
    double* values_ = nullptr;
};

}  // namespace syncbn
