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

#include "exchange/mailbox.h"
#include "types.h"

namespace syncbn {

class Segment : public Mailbox {
  public:
    static constexpr size_t kMostRanks = 64;  // a reader's mark is a bit
    // Of a vector; a longer one goes another way. The kernel gives memory only for the part of a place that was used.
    static constexpr size_t kMostValues = 74240;

    // Rank 0 creates it; the others open it as file descriptor `number` of process `process`. Each throws
    // std::runtime_error with the reason. A process that sees other memory there, as in another container, finds no
    // `token` or another one.
    static std::unique_ptr<Segment> create(size_t ranks);
    static std::unique_ptr<Segment> open(size_t ranks, size_t rank, int64_t process, int number,
                                         const std::string& token);
    ~Segment() override;
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    size_t ranks() const override { return ranks_; }
    size_t rank() const override { return rank_; }
    int number() const { return file_.number; }
    std::string token() const;
    bool is_own() const override;

    size_t most_values() const override { return kMostValues; }
    void post(const Label& label, const double* values, size_t count, size_t length, const Ranks& readers) override;
    Found find(size_t rank, const Label& label) const override;
    void done(size_t rank, const Label& label, const Found& found) override;
    std::vector<Label> left_by(size_t rank) const override { return left_by(rank, uint64_t{1} << rank_); }
    bool is_here(const Label& label) const override;
    void forget(const Label& label) override;

    uint32_t ring_of(const Label& label) const override;
    uint32_t heard(uint32_t ring) override;
    void sleep(uint32_t ring, uint32_t seen, double seconds) override;
    void wake(uint32_t ring) override;

    State state_of(size_t rank) const override;
    std::string reason_of(size_t rank) const override;
    bool crowded() const override;  // true until all are present
    int64_t died(size_t rank) const override;
    void leave(State state, const std::string& reason) override;

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
    // Labels of vectors that some of `readers`, bits, have not read yet.
    std::vector<Label> left_by(size_t rank, uint64_t readers) const;
    Outbox& outbox(size_t rank, size_t index) const;
    double* values(size_t rank, size_t index) const;

    // A file that is open as long as this.
    struct File {
        const int number;
        ~File();
    };

    const size_t ranks_, rank_;
    const File file_;
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
