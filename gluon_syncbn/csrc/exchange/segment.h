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

    int number() const { return file_.number; }
    std::string token() const;

    size_t most_values() const override { return kMostValues; }
    Found find(size_t rank, const Label& label) const override;
    void done(size_t rank, const Label& label, const Found& found) override;
    std::vector<Label> left_by(size_t rank) const override;

    uint32_t ring_of(const Label& label) const override;
    // The ring of a rank's thread for long sums.
    static uint32_t ring_of(size_t rank);
    uint32_t heard(uint32_t ring) override;
    void sleep(uint32_t ring, uint32_t seen, double seconds) override;
    void wake(uint32_t ring) override;
    // The number of the ring changes, and all wake who sleep there.
    void ring(uint32_t ring);

    State state_of(size_t rank) const override;
    std::string reason_of(size_t rank) const override;
    bool crowded() const override;  // true until all are present
    int64_t died(size_t rank) const override;
    void leave(State state, const std::string& reason) override;

    // The part of a rank in long sums: how far it is, and its pieces. Only the rank itself writes there. Counts never
    // decrease.
    static constexpr size_t kPiece = 1 << 19, kPieces = 4;  // bytes, and pieces of a rank
    struct alignas(256) Lane {                              // no cache line of which another lane uses
        std::atomic<uint64_t> in, added, total, out;
    };
    Lane& lane(size_t rank) const { return lanes_[rank]; }
    char* piece(size_t rank, uint64_t number) const { return pieces_ + (rank * kPieces + number % kPieces) * kPiece; }

  protected:
    void write(const Label& label, const void* values, size_t size, const Ranks& readers) override;

  private:
    struct Member;
    struct Ring;
    struct Outbox;
    Segment(size_t ranks, size_t rank, int file);
    void present();
    Outbox& outbox(size_t rank, size_t index) const;
    double* values(size_t rank, size_t index) const;

    // A file that is open as long as this.
    struct File {
        const int number;
        ~File();
    };

    const File file_;
    char* memory_ = nullptr;
    size_t size_ = 0;
    mutable std::atomic<int> cores_{0};  // at most the number of ranks; 0 while some rank is absent
    char* token_ = nullptr;
    Member* members_ = nullptr;
    Ring* rings_ = nullptr;
    Outbox* outboxes_ = nullptr;
    double* values_ = nullptr;
    Lane* lanes_ = nullptr;
    char* pieces_ = nullptr;
};

}  // namespace syncbn
