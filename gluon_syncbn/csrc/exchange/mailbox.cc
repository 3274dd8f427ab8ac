#include "exchange/mailbox.h"

#include <numeric>

#include "failure.h"
#include "waiting/step.h"

namespace syncbn {

Mailbox::Mailbox(size_t rank, size_t ranks) : members{Ranks(ranks), ranks}, rank_(rank), process_(getpid()) {
    std::iota(members.ranks.begin(), members.ranks.end(), size_t{0});
    everybody = members.ranks;
}

void Mailbox::check_open() const {
    if (getpid() != process_)
        throw Failure("this process was forked from " + name_of(rank_) +
                      " and is no member of its job; only processes that the launcher has started are");
    if (state_of(rank_) != State::kPresent)
        throw Failure("nothing is exchanged any more. Start the job again. The first error was: " + reason_of(rank_));
}

void Mailbox::post(const Label& label, const void* values, size_t size, const Ranks& readers) {
    if (readers.empty()) return;
    std::lock_guard<std::mutex> lock(posting_);
    write(label, values, size, readers);
    sent += static_cast<int64_t>(readers.size());
}

void Mailbox::report(State state, const std::string& reason) {
    if (getpid() != process_) return;
    std::lock_guard<std::mutex> lock(posting_);
    if (state_of(rank_) == State::kPresent) tell(state, reason);
}

std::optional<std::string> Mailbox::received(size_t rank, const Label& label) {
    const Found found = find(rank, label);
    if (found.values == nullptr) return std::nullopt;
    std::string bytes(reinterpret_cast<const char*>(found.values), found.size);
    done(rank, found);
    return bytes;
}

std::string Mailbox::fate_of(size_t rank) const {
    if (state_of(rank) == State::kFailed) return "has failed: " + reason_of(rank);
    if (state_of(rank) == State::kEnded) return "has ended";
    const int64_t process = died(rank);
    if (process == 0) return "";
    return "has ended without a word (process " + std::to_string(process) + "; was it killed?)";
}

std::string Mailbox::loss(size_t rank, const std::string& exchange) const {
    const std::string text =
        name_of(rank) + " " + fate_of(rank) + " (rank " + number_of(rank_) + " was in " + exchange + ")";
    if (state_of(rank) == State::kFailed) return text;
    const std::string advice =
        text + ". The output of rank " + number_of(rank) + ", or the log of its machine, says why.";
    if (state_of(rank) != State::kEnded) return advice;
    return advice + " Give every process the same number of steps, or train within gluon_syncbn.join.";
}

void WaitForOthers::give_up(const std::string& reason) {
    mail_.report(Mailbox::State::kFailed, reason);
    throw Failure(reason);
}

std::string WaitForOthers::missing() const {
    std::string ranks;
    for (const size_t rank : mail_.everybody)
        if (is_missing(rank)) ranks += (ranks.empty() ? "" : ", ") + mail_.number_of(rank);
    return ranks;
}

void WaitForOthers::check_members() {
    if (mail_.state_of(mail_.rank()) != Mailbox::State::kPresent)
        throw Failure("in " + name() + ", " + mail_.name_of(mail_.rank()) + ": " + mail_.reason_of(mail_.rank()));
    for (const size_t rank : mail_.everybody) {
        const Mailbox::State state = mail_.state_of(rank);
        const bool failed = state == Mailbox::State::kFailed, ended = state == Mailbox::State::kEnded;
        // Asked in this order, because it may have come before it left.
        if ((failed && together_) || ((failed || ended) && is_missing(rank))) gone(rank);
    }
}

void WaitForOthers::check_others() {
    for (const size_t rank : mail_.everybody)
        if (mail_.died(rank) != 0 && (together_ || is_missing(rank))) gone(rank);
}

void WaitForOthers::throw_if_failed() {
    if (const auto failure = step().failure()) give_up(failure->what());
}

std::string WaitForOthers::advice() {
    return "A process that is missing is slow, has ended, hangs, or makes other calls: every process must run the same "
           "number of steps with the same net.";
}

}  // namespace syncbn
