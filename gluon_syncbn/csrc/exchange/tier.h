// The processes that share a mailbox, of a machine or of a job, and what ends a wait for them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "exchange/mailbox.h"
#include "waiting/wait.h"

namespace syncbn {

struct Tier {
    explicit Tier(std::unique_ptr<Mailbox> mail);          // of a job
    Tier(std::unique_ptr<Mailbox> mail, Members members);  // of a machine
    std::string rank(size_t member) const { return std::to_string(members.ranks[member]); }
    std::string own_rank() const { return "rank " + rank(mail->rank()) + of(); }
    std::string of() const { return " of " + std::to_string(members.of); }
    // Tells what has become of a member, as an error of this one in the exchange of this name.
    std::string loss(size_t member, const std::string& exchange) const;
    void check_open() const;  // throws Failure
    void post(const Label& label, const double* values, size_t count, size_t length, const Ranks& readers);
    // The length is the number of bytes.
    void post_bytes(const Label& label, const void* bytes, size_t size, const Ranks& readers);

    const std::unique_ptr<Mailbox> mail;
    const Members members;
    // Whether a rank that has failed ends every exchange, and not only those that it takes part in: in a job.
    const bool fails_together;
    const Ranks everybody;  // of the mailbox
    int64_t sent = 0;       // vectors to a reader each, for tests

  private:
    std::mutex posting_;
};

// Waits for members of a tier.
class WaitInTier : public Wait {
  public:
    // Tells the others why this rank gives up.
    [[noreturn]] void give_up(const std::string& reason) override;

  protected:
    WaitInTier(Tier& tier, double timeout) : Wait(timeout), tier_(tier) {}
    virtual std::string name() const = 0;     // of the exchange
    virtual std::string missing() const = 0;  // the ranks, or what brings their parts
    std::string state() override { return tier_.own_rank() + " waits for rank " + missing() + " in " + name(); }
    std::string advice() override;
    // Throws if this rank has left.
    void check_own() const;
    [[noreturn]] void gone(size_t member) { WaitInTier::give_up(tier_.loss(member, name())); }

    Tier& tier_;
};

}  // namespace syncbn
