// Carries vectors between processes, each under a label that finds its receiver. A mailbox waits for no other process,
// and depends on no order of calls.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "lock.h"
#include "waiting/wait.h"

namespace syncbn {

// The identity of a vector: the same in every process, and of no other vector of a sender to a reader.
struct Label {
    enum Channel : int32_t {
        kVectors,   // of a layer's replicas, or the total of some of them
        kOfLeader,  // the total of all, from the leader of a machine
        kBytes,     // of all ranks
        kOrder,     // of gradients: which round is next
        kPart,
        kSum,  // of machines: a leader's part, and the sum of all
    };
    Channel channel;
    int32_t phase = 0;  // 0 is a forward
    int64_t key;        // of the layer, or of the bytes
    int64_t node = 0, sequence = 0, piece = 0;

    static Label of_gradients(Channel channel, int64_t number) { return {channel, 0, 0, 0, number}; }

    using Words = std::array<int64_t, 5>;
    Words words() const {
        Words words;
        static_assert(sizeof words == sizeof *this, "no byte is left out");
        std::memcpy(&words, this, sizeof words);
        return words;
    }
    bool operator==(const Label& other) const { return words() == other.words(); }
    // Whether both are of one call of a layer, in any of its hops.
    bool is_of_call(Label other) const {
        other.channel = channel, other.piece = piece;
        return *this == other;
    }
};

using Ranks = std::vector<size_t>;  // ascending
inline Ranks without(Ranks ranks, size_t rank) {
    ranks.erase(std::remove(ranks.begin(), ranks.end(), rank), ranks.end());
    return ranks;
}

class Mailbox {
  public:
    virtual ~Mailbox() = default;

    size_t ranks() const { return everybody.size(); }
    size_t rank() const { return rank_; }
    // Throws Failure in a child of a fork, or if this rank has left.
    void check_open() const;
    // The rank of a member in the job, as text, and "rank 2 of 3".
    std::string number_of(size_t member) const { return std::to_string(members.ranks[member]); }
    std::string name_of(size_t member) const {
        return "rank " + number_of(member) + " of " + std::to_string(members.of);
    }

    // Posts a vector of so many bytes for `readers`. Throws std::runtime_error if there are too many.
    void post(const Label& label, const void* values, size_t size, const Ranks& readers);
    // Returns the readers of what this rank has posted under the label, and still has to send.
    virtual Ranks unsent(const Label&) { return {}; }
    // Returns the vector that `rank` has posted for this one under the label; null if there is none yet. It stays until
    // `done`.
    struct Found {
        const double* values = nullptr;
        size_t size = 0;  // bytes
        size_t place = 0;
        size_t length() const { return size / sizeof(double); }
    };
    virtual Found find(size_t rank, const Label& label) const = 0;
    virtual void done(size_t rank, const Found& found) = 0;
    // Finds and removes bytes, if they have come.
    std::optional<std::string> received(size_t rank, const Label& label);
    // Returns the labels of vectors that `rank` has posted for this one.
    virtual std::vector<Label> posted_by(size_t rank) const = 0;

    // Tells all that this rank waits for some of them, in the call that the label is of. Returns whom another rank waits
    // for there; empty if it has not said so.
    virtual void say_awaited(const Label&, const Ranks&) {}
    virtual Ranks awaited_by(size_t, const Label&) const { return {}; }

    // An event count (Reed, Kanodia, CACM 1979) is of all threads with one label, and changes with each arrival. A thread
    // can sleep until it is not `seen`, or for `seconds`, and can wake the sleepers.
    virtual uint32_t event_of(const Label& label) const = 0;
    virtual uint32_t arrivals(uint32_t event) = 0;
    virtual void sleep(uint32_t event, uint32_t seen, double seconds) = 0;
    virtual void wake(uint32_t event) = 0;
    // Whether an arrival wakes who sleeps.
    virtual bool wakes() const { return true; }

    enum class State : uint32_t { kPresent, kFailed, kEnded };
    virtual State state_of(size_t rank) const = 0;
    virtual std::string reason_of(size_t rank) const = 0;  // of a rank that has failed
    // The process of a present rank that has died without a word, which only the kernel knows; 0 if it has not.
    virtual int64_t died(size_t rank) const = 0;
    // What has become of a rank: "has ended". Empty if it is there.
    std::string fate_of(size_t rank) const;
    // Tells this, as an error of this rank in the exchange of this name.
    std::string loss(size_t rank, const std::string& exchange) const;
    // Nothing moves any more, because the transport ends with the process.
    virtual void end() {}
    // Reports that this rank has failed, with a reason, or has ended. Wakes all ranks. The first report stays. A child of
    // a fork reports nothing.
    void report(State state, const std::string& reason);

    Ranks everybody;
    // Their ranks in the job, and the size of the job: the same if nobody says otherwise.
    struct {
        Ranks ranks;
        size_t of;
    } members;
    bool crowded = false;  // there are more ranks than cores for them
    int64_t sent = 0;      // vectors to a reader each, for tests

  protected:
    Mailbox(size_t rank, size_t ranks);
    // See `post` and `report`. One thread at a time calls one of the two.
    virtual void write(const Label& label, const void* values, size_t size, const Ranks& readers) = 0;
    virtual void tell(State state, const std::string& reason) = 0;

    const size_t rank_;
    const pid_t process_;

  private:
    Mutex posting_;
};

// Waits for ranks that share a mailbox.
class WaitForOthers : public Wait {
  public:
    // Tells the others why this rank gives up.
    [[noreturn]] void give_up(const std::string& reason) override;

  protected:
    // `together`: a rank that has failed ends the wait even if it is not missing.
    WaitForOthers(Mailbox& mail, double timeout, bool together) : Wait(timeout), mail_(mail), together_(together) {}
    WaitForOthers(const WaitForOthers& earlier, Mailbox& mail, double timeout, bool together)
        : Wait(earlier, timeout), mail_(mail), together_(together) {}
    virtual std::string name() const = 0;  // of the exchange
    virtual bool is_missing(size_t rank) const = 0;
    virtual std::string missing() const;
    // Throws if this rank has left, or if another one did that ends the wait.
    void check_members();
    // The same for what only the kernel knows.
    void check_others() override;
    void throw_if_failed() override;
    std::string state() override {
        return mail_.name_of(mail_.rank()) + " waits for rank " + missing() + " in " + name();
    }
    std::string advice() override;

    Mailbox& mail_;

  private:
    [[noreturn]] void gone(size_t rank) { WaitForOthers::give_up(mail_.loss(rank, name())); }
    const bool together_;
};

}  // namespace syncbn
