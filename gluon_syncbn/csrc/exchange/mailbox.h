// Carries vectors between the processes of a job by MPI. Each is a message with its label, because collectives of MPI need
// one order in all processes, and layers have none: see "Between processes" in docs/architecture.md. A mailbox waits for
// no other process.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "exchange/mpi.h"
#include "lock.h"
#include "waiting/wait.h"

namespace syncbn {

// The identity of a vector: the same in every process, and of no other vector of a sender to a reader.
struct Label {
    enum Channel : int32_t {
        kVectors,    // of a layer's replicas, or the total of some of them
        kBytes,      // of all ranks
        kGradients,  // of a Trainer
        kTexts,      // of what differs there, by piece
        kOrder,      // of the arrays, from rank 0
    };
    Channel channel;
    int32_t phase = 0;  // 0 is a forward
    int64_t key;        // of the layer, of the bytes, or of the Trainer
    int64_t node = 0, sequence = 0, piece = 0;

    using Words = std::array<int64_t, 5>;
    Words words() const {
        Words words;
        static_assert(sizeof words == sizeof *this, "no byte is left out");
        std::memcpy(&words, this, sizeof words);
        return words;
    }
    bool operator==(const Label& other) const { return words() == other.words(); }
    // Whether both are of one call of a layer, or of one step of a Trainer.
    bool is_of_call(Label other) const {
        other.piece = piece;
        return *this == other;
    }
};

using Ranks = std::vector<size_t>;  // ascending
inline Ranks without(Ranks ranks, size_t rank) {
    ranks.erase(std::remove(ranks.begin(), ranks.end(), rank), ranks.end());
    return ranks;
}

// What a rank waits for, as it has told the others.
struct Awaited {
    Label label;
    Ranks ranks;
    std::string name;  // for messages
};

class Mailbox {
  public:
    // The communicator must carry nothing else.
    Mailbox(const Mpi& mpi, size_t rank, size_t ranks);

    size_t rank() const { return rank_; }
    // Throws Failure in a child of a fork, or if this rank has left.
    void check_open() const;
    // "rank 2 of 3".
    std::string name_of(size_t rank) const;

    // Posts a vector of so many bytes for `readers`. Throws std::runtime_error if there are too many.
    void post(const Label& label, const void* values, size_t size, const Ranks& readers);
    // Returns the readers of what this rank has posted under the label, and still has to send.
    Ranks unsent(const Label& label);
    // Takes the vector that `rank` has posted for this one under the label; null if there is none yet.
    struct Taken {
        std::shared_ptr<const double> values;
        size_t size = 0;  // bytes
        size_t length() const { return size / sizeof(double); }
    };
    Taken take(size_t rank, const Label& label);
    // Returns the labels of vectors that `rank` has posted for this one.
    std::vector<Label> posted_by(size_t rank) const;

    // Tells all others what this rank waits for, or, without a name, that the wait under this label has ended.
    void say(const Awaited& awaited);
    std::vector<Awaited> awaited_by(size_t rank) const;
    // Whether any other rank has told.
    bool others_wait() const { return others_wait_ > 0; }

    // Whoever waits moves messages along. Returns a count, which changes with each arrival.
    uint32_t arrivals();
    // Sleeps for a moment, at most so many seconds, if nothing has arrived since the count was `seen`.
    void nap(uint32_t seen, double seconds);

    enum class State : uint32_t { kPresent, kFailed, kEnded };
    State state_of(size_t rank) const { return states_[rank]; }
    std::string reason_of(size_t rank) const;  // of a rank that has failed
    // What has become of a rank: "has ended". Empty if it is there.
    std::string fate_of(size_t rank) const;
    // Reports to all that this rank has failed, with a reason, or has ended. The first report stays. A child of a fork
    // reports nothing.
    void report(State state, const std::string& reason);
    // MPI ends with the process: nothing moves any more.
    void end();

    const Mpi mpi;  // without the lock for others
    const Ranks everybody;
    std::atomic<bool> crowded{false};  // this machine has more ranks than cores for them
    std::atomic<int64_t> sent{0};      // vectors to a reader each, for tests

  private:
    // A message begins with this.
    struct Head {
        // A vector; a failure, whose text follows; another end; a wait: the number of ranks, these ranks and a name.
        enum Kind : int64_t { kVector, kFailed, kEnded, kWaits };
        Label label;
        int64_t kind;
        size_t from, length;  // bytes of what follows
    };

    struct Message {
        static constexpr size_t kHead = sizeof(Head) / sizeof(double);
        static_assert(sizeof(Head) % sizeof(double) == 0, "what follows is aligned");
        std::shared_ptr<double> memory;
        size_t size;  // in doubles

        explicit Message(size_t size = kHead)  // not initialised
            : memory(new double[size], std::default_delete<double[]>()), size(size) {}
        const Head& head() const { return *reinterpret_cast<const Head*>(memory.get()); }
        double* values() const { return memory.get() + kHead; }
        const char* text() const { return reinterpret_cast<const char*>(values()); }
    };

    // A message that arrives, or goes to a rank.
    struct Transfer : Message {
        using Message::Message;
        Transfer(const Message& message, size_t to) : Message(message), to(to) {}
        Mpi::Request request = {};
        size_t to = 0;
    };

    // The caller of the following holds the lock.
    void send(const Head& head, const void* content, size_t size, const Ranks& to);
    void send_on();
    void progress();
    void arrive(const Message& message);
    void note(size_t rank, State state, std::string reason);

    const size_t rank_;
    const pid_t process_;
    mutable Mutex mutex_;  // guards all but the atomics
    std::list<Transfer> outgoing_, arriving_;
    std::list<Message> received_;
    std::vector<std::vector<Awaited>> awaited_;  // by each rank
    std::vector<std::string> reasons_;
    std::vector<std::atomic<State>> states_;
    std::atomic<uint32_t> arrivals_{0}, naps_{0};
    std::atomic<int64_t> others_wait_{0};
    bool closed_ = false;
};

// Waits for other ranks of a job, and tells them so if it takes long: a rank that gives up says where the others are.
class WaitForOthers : public Wait {
  public:
    WaitForOthers(const WaitForOthers&) = delete;
    ~WaitForOthers() override;
    // Tells the others why this rank gives up.
    [[noreturn]] void give_up(const std::string& reason) override;

  protected:
    WaitForOthers(Mailbox& mail, const Label& label, double timeout)
        : Wait(timeout), mail_(mail), label_(label), says_after_(says_after(timeout)) {}

    virtual std::string name() const = 0;  // of what the ranks do together
    virtual bool is_missing(size_t rank) const = 0;
    Ranks missing_ranks() const;
    // Whom this rank tells the others that it waits for.
    virtual Ranks awaited() const { return missing_ranks(); }
    // Throws if this rank has left, or another one that fails the step or is missing. `late`: seconds that what a rank has
    // sent before its end may take.
    void check_members(double late = 0);
    void check_others() override;
    void throw_if_failed() override;
    std::string state() override;
    std::string advice() override;

    Mailbox& mail_;
    Label label_;

  private:
    static double says_after(double timeout);
    const double says_after_;  // seconds
    bool said_ = false;
    Ranks told_;
};

}  // namespace syncbn
