// Shares memory between the processes of one machine: each rank leaves vectors there that others read.
//
//   rank 0      [outbox 0] [outbox 1] ...      1. post: a free outbox of one's own gets label and vector
//   rank 1      [outbox 0] [outbox 1] ...      2. whoever waits looks through the outboxes of the others for the label
//   events      [0] [1] ...                    3. whoever completes a set of vectors wakes those who sleep until it comes
//   pipelines   [0] [1] ...                    pieces of long sums, one pipeline for each rank: see sums.h
//
// Every word has one writer, but for the readers' marks and the event counts. A process that is killed leaves nothing locked,
// and others do not see its unfinished posts. The kernel frees the memory with the last process, since it has no name.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exchange/mailbox.h"
#include "types.h"

namespace syncbn {

class Segment : public Mailbox {
  public:
    static constexpr size_t kMostRanks = 64;  // a reader's mark is a bit
    // Of a vector. The kernel gives memory only for the part of a place that was used.
    static constexpr size_t kMostValues = 74240;

    // Rank 0 makes it, with this `token`. The others open it at `path`, among the file descriptors of rank 0's process.
    // Throws std::runtime_error with the reason. A process that sees other memory there, as in another container, finds no
    // token or another one.
    Segment(size_t ranks, size_t rank, const std::string& token, const std::string& path = "");

    int number() const { return file_.number; }

    Found find(size_t rank, const Label& label) const override;
    void done(size_t rank, const Found& found) override;
    std::vector<Label> posted_by(size_t rank) const override;

    uint32_t event_of(const Label& label) const override;
    // That of a rank's thread for long sums.
    static uint32_t event_of(size_t rank) { return static_cast<uint32_t>(kEvents + rank); }
    uint32_t arrivals(uint32_t event) override { return memory_->events[event].posts; }
    void sleep(uint32_t event, uint32_t seen, double seconds) override;
    void wake(uint32_t event) override;
    // Changes an event count, and wakes all who sleep there.
    void advance(uint32_t event);

    State state_of(size_t rank) const override { return memory_->of[rank].state; }
    std::string reason_of(size_t rank) const override { return memory_->of[rank].reason; }
    int64_t died(size_t rank) const override;

    // The part of a rank in long sums: how far it is, and its pieces. Only the rank itself writes there. Counts never
    // decrease.
    // Bytes of a piece, and pieces of a rank. On one machine, a piece stays in caches. Between machines, MPI's handshakes
    // for a piece take longer than its bytes.
    static constexpr size_t kPiece = 1 << 21, kPieceOfOne = 1 << 19, kPieces = 4;
    struct alignas(256) Pipeline {  // no cache line of which another pipeline uses
        std::atomic<uint64_t> in, added, given, total, out;
    };
    Pipeline& pipeline(size_t rank) const { return memory_->of[rank].pipeline; }
    char* piece(size_t rank, uint64_t number) const { return memory_->of[rank].pieces[number % kPieces]; }

  protected:
    void write(const Label& label, const void* values, size_t size, const Ranks& readers) override;
    void tell(State state, const std::string& reason) override;

  private:
    static constexpr size_t kOutboxes = 256;  // of a rank, which limits its simultaneous exchanges
    static constexpr size_t kEvents = 256;
    static constexpr size_t kTokenSize = 32;
    static constexpr size_t kReasonSize = 1024;

    struct alignas(64) EventCount {
        std::atomic<uint32_t> posts, sleepers;
    };
    struct alignas(64) Outbox {         // whoever looks reads one cache line
        std::atomic<uint64_t> readers;  // bits of ranks that have not read it; 0 if it is free
        std::atomic<int64_t> label[5];  // its words
        std::atomic<uint32_t> stamp;    // odd while something is posted, and never repeated
        std::atomic<uint64_t> size;     // bytes
    };
    // Begins as zeros, and ends with the last rank.
    struct Memory {
        char token[kTokenSize];
        EventCount events[kEvents + kMostRanks];
        struct alignas(4096) OfRank {
            double values[kOutboxes][kMostValues];
            char pieces[kPieces][kPiece];
            Pipeline pipeline;
            std::atomic<uint32_t> used;  // outboxes
            std::atomic<State> state;
            std::atomic<int64_t> process;
            Outbox outboxes[kOutboxes];
            char reason[kReasonSize];  // complete before the state changes
        } of[kMostRanks];
    };
    struct File {
        const int number;
        ~File() { close(number); }
    };
    // The label of what is posted there for this rank, if something is.
    std::optional<Label> label_in(const Outbox& outbox) const;

    const File file_;
    std::shared_ptr<Memory> memory_;
};

}  // namespace syncbn
