#include "exchange/tier.h"

#include <cstring>
#include <utility>

#include "failure.h"
#include "types.h"

namespace syncbn {
Tier::Tier(std::unique_ptr<Mailbox> mail)
    : mail(std::move(mail)),
      members(Members::all(this->mail->ranks())),
      fails_together(true),
      everybody(members.ranks) {}

Tier::Tier(std::unique_ptr<Mailbox> mail, Members members)
    : mail(std::move(mail)),
      members(std::move(members)),
      fails_together(false),
      everybody(Members::all(this->mail->ranks()).ranks) {}

std::string Tier::loss(size_t member, const std::string& exchange) const {
    return "rank " + rank(member) + of() + " " + mail->fate_of(member) + " (rank " + rank(mail->rank()) + " was in " +
           exchange + ")";
}

void Tier::check_open() const {
    if (!mail->is_own())
        throw Failure("this process was forked from " + own_rank() +
                      " and is no member of its job; only processes that the launcher has started are");
    if (mail->state_of(mail->rank()) != Mailbox::State::kPresent)
        throw Failure("nothing is exchanged any more. Start the job again. The first error was: " +
                      mail->reason_of(mail->rank()));
}

void Tier::post(const Label& label, const double* values, size_t count, size_t length, const Ranks& readers) {
    std::lock_guard<std::mutex> lock(posting_);
    mail->post(label, values, count, length, readers);
    sent += static_cast<int64_t>(readers.size());
}

void Tier::post_bytes(const Label& label, const void* bytes, size_t size, const Ranks& readers) {
    Vector padded((size + sizeof(double) - 1) / sizeof(double));
    if (size > 0) std::memcpy(padded.data(), bytes, size);  // of none, either may be null
    post(label, padded.data(), padded.size(), size, readers);
}

void WaitInTier::give_up(const std::string& reason) {
    tier_.mail->leave(Mailbox::State::kFailed, reason);
    throw Failure(reason);
}

std::string WaitInTier::advice() {
    return "A process that is missing is slow, has ended, hangs, or makes other calls: every process must run the same "
           "number of steps with the same net.";
}

void WaitInTier::check_own() const {
    const size_t own = tier_.mail->rank();
    if (tier_.mail->state_of(own) != Mailbox::State::kPresent)
        throw Failure("in " + name() + ", " + tier_.own_rank() + ": " + tier_.mail->reason_of(own));
}

}  // namespace syncbn
