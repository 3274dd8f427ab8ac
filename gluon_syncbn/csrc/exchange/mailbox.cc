#include "exchange/mailbox.h"

#include <chrono>
#include <climits>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "failure.h"
#include "waiting/step.h"

namespace syncbn {
namespace {

constexpr double kEnd = 1;  // seconds for the last messages
// Seconds between two looks at MPI, at first and at last, and the naps without an arrival after which they grow by the
// first: a long wait leaves the core to others, and ends late by a small part of it.
constexpr double kNap = 5e-5, kDoze = 1e-3;
constexpr uint32_t kNaps = 10;
constexpr int kParts = 50;
// Seconds, or this part of the time limit, after which a rank says whom it waits for.
constexpr double kSayAfter = 1, kSayAfterPart = 0.25;

Ranks up_to(size_t ranks) {
    Ranks all(ranks);
    std::iota(all.begin(), all.end(), size_t{0});
    return all;
}

}  // namespace

Mailbox::Mailbox(const Mpi& mpi, size_t rank, size_t ranks)
    : mpi(mpi),
      everybody(up_to(ranks)),
      rank_(rank),
      process_(getpid()),
      awaited_(ranks),
      reasons_(ranks),
      states_(ranks) {}

void Mailbox::check_open() const {
    if (getpid() != process_)
        throw Failure("this process was forked from " + name_of(rank_) +
                      " and is no member of its job; only processes that the launcher has started are");
    if (state_of(rank_) != State::kPresent)
        throw Failure("nothing is exchanged any more. Start the job again. The first error was: " + reason_of(rank_));
}

std::string Mailbox::name_of(size_t rank) const {
    return "rank " + std::to_string(rank) + " of " + std::to_string(everybody.size());
}

void Mailbox::post(const Label& label, const void* values, size_t size, const Ranks& readers) {
    std::lock_guard<std::mutex> lock(mutex_);
    send({label, Head::kVector, rank_, size}, values, size, readers);
    sent += static_cast<int64_t>(readers.size());
}

Ranks Mailbox::unsent(const Label& label) {
    std::lock_guard<std::mutex> lock(mutex_);
    send_on();
    Ranks readers;
    for (const Transfer& sent : outgoing_)
        if (sent.head().kind == Head::kVector && sent.head().label == label) readers.push_back(sent.to);
    std::sort(readers.begin(), readers.end());
    return readers;
}

Mailbox::Taken Mailbox::take(size_t rank, const Label& label) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto one = received_.begin(); one != received_.end(); ++one) {
        if (one->head().from != rank || !(one->head().label == label)) continue;
        const Taken taken{{one->memory, one->values()}, one->head().length};
        received_.erase(one);
        return taken;
    }
    return {};
}

std::vector<Label> Mailbox::posted_by(size_t rank) const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Label> labels;
    for (const Message& one : received_)
        if (one.head().from == rank) labels.push_back(one.head().label);
    return labels;
}

void Mailbox::say(const Awaited& awaited) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::string content;
    const auto append = [&](size_t number) { content.append(reinterpret_cast<const char*>(&number), sizeof number); };
    append(awaited.ranks.size());
    for (const size_t rank : awaited.ranks) append(rank);
    content += awaited.name;
    send({awaited.label, Head::kWaits, rank_, content.size()}, content.data(), content.size(),
         without(everybody, rank_));
}

std::vector<Awaited> Mailbox::awaited_by(size_t rank) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return awaited_[rank];
}

uint32_t Mailbox::arrivals() {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    // A long message moves on in parts, and a poll that yields between two of them takes longer than all of them.
    for (int part = 0; lock && part < kParts; ++part) {
        progress();
        if (arriving_.empty() && outgoing_.empty()) break;
    }
    return arrivals_;
}

void Mailbox::nap(uint32_t seen, double seconds) {
    if (++naps_ == 1 || arrivals_ != seen) return;  // a look takes one message, and there may be more
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min({seconds, kNap * (1 + naps_ / kNaps), kDoze})));
}

std::string Mailbox::reason_of(size_t rank) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return reasons_[rank];
}

std::string Mailbox::fate_of(size_t rank) const {
    if (state_of(rank) == State::kFailed) return "has failed: " + reason_of(rank);
    return state_of(rank) == State::kEnded ? "has ended" : "";
}

void Mailbox::report(State state, const std::string& reason) {
    if (getpid() != process_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (states_[rank_] != State::kPresent) return;
    const std::string text = reason.substr(0, 4000);
    send({{}, state == State::kFailed ? Head::kFailed : Head::kEnded, rank_, text.size()}, text.data(), text.size(),
         without(everybody, rank_));
    note(rank_, state, text);
    const double until = seconds() + (state == State::kEnded ? kEnd : 0);
    do progress();
    while (!outgoing_.empty() && seconds() < until);
}

void Mailbox::end() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
}

// A count of MPI's is an int: in bytes, a message would end at 2 GB.
void Mailbox::send(const Head& head, const void* content, size_t size, const Ranks& to) {
    if (closed_) return;
    const Message message(Message::kHead + (size + sizeof(double) - 1) / sizeof(double));
    if (message.size > INT_MAX) throw std::runtime_error("MPI takes no message of more than 16 GB");
    std::memcpy(message.memory.get(), &head, sizeof head);
    if (size > 0) std::memcpy(message.values(), content, size);
    // The order starts after this rank, so that not all ranks write to rank 0 first.
    const auto after = static_cast<size_t>(std::lower_bound(to.begin(), to.end(), rank_) - to.begin());
    for (size_t i = 0; i < to.size(); ++i) {
        outgoing_.emplace_back(message, to[(after + i) % to.size()]);
        Transfer& sent = outgoing_.back();
        const int status = mpi.send(message.memory.get(), static_cast<int>(message.size), mpi.float64,
                                    static_cast<int>(sent.to), 0, mpi.communicator, &sent.request);
        if (status != 0) outgoing_.pop_back();
        Mpi::check(status);
        if (mpi.has_ended(&sent.request)) outgoing_.pop_back();
    }
}

void Mailbox::send_on() {
    outgoing_.remove_if([&](Transfer& sent) { return mpi.has_ended(&sent.request); });
}

void Mailbox::progress() {
    if (closed_) return;
    send_on();
    int found = 0, count = 0;
    alignas(std::max_align_t) char message[16], about[256];
    Mpi::check(mpi.probe(static_cast<int>(mpi.any_rank), static_cast<int>(mpi.any_tag), mpi.communicator, &found,
                         message, about));
    if (found != 0) {
        Mpi::check(mpi.count(about, mpi.float64, &count));
        arriving_.emplace_back(static_cast<size_t>(count));
        Transfer& next = arriving_.back();
        const int status = mpi.receive(next.memory.get(), count, mpi.float64, message, &next.request);
        if (status != 0) arriving_.pop_back();
        Mpi::check(status);
    }
    // In their order: what a rank has sent before its end comes before that.
    while (!arriving_.empty() && mpi.has_ended(&arriving_.front().request)) {
        arrive(arriving_.front());
        arriving_.pop_front();
        naps_ = 0;
    }
}

// Takes a whole message.
void Mailbox::arrive(const Message& message) {
    const Head& head = message.head();
    if (message.size < Message::kHead || head.from >= everybody.size() ||
        head.length > (message.size - Message::kHead) * sizeof(double))
        throw std::runtime_error("a message arrived that no rank of this job has sent");
    ++arrivals_;
    if (head.kind == Head::kVector) return received_.push_back(message);
    if (head.kind != Head::kWaits)
        return note(head.from, head.kind == Head::kFailed ? State::kFailed : State::kEnded,
                    {message.text(), head.length});
    std::vector<Awaited>& told = awaited_[head.from];
    const auto same =
        std::find_if(told.begin(), told.end(), [&](const auto& one) { return one.label.is_of_call(head.label); });
    if (same != told.end()) told.erase(same), --others_wait_;
    const auto* const ranks = reinterpret_cast<const size_t*>(message.text()) + 1;
    const size_t count = ranks[-1], begin = sizeof(size_t) * (1 + count);
    if (count > everybody.size() || begin >= head.length) return;  // without a name, the wait has ended
    told.push_back({head.label, {}, {message.text() + begin, head.length - begin}});
    std::copy_if(ranks, ranks + count, std::back_inserter(told.back().ranks),
                 [&](size_t rank) { return rank < everybody.size(); });
    ++others_wait_;
}

// The first report of a rank stays.
void Mailbox::note(size_t rank, State state, std::string reason) {
    if (states_[rank] != State::kPresent) return;
    reasons_[rank] = std::move(reason);  // complete before the state changes
    states_[rank] = state;
    ++arrivals_;
}

WaitForOthers::~WaitForOthers() {
    if (said_) try {
            mail_.say({label_, {}, ""});
        } catch (const std::exception&) {  // of MPI, which fails the next wait, too
        }
}

void WaitForOthers::give_up(const std::string& reason) {
    mail_.report(Mailbox::State::kFailed, reason);
    throw Failure(reason);
}

double WaitForOthers::says_after(double timeout) { return std::min(kSayAfter, kSayAfterPart * timeout); }

Ranks WaitForOthers::missing_ranks() const {
    Ranks ranks;
    for (const size_t rank : mail_.everybody)
        if (is_missing(rank)) ranks.push_back(rank);
    return ranks;
}

void WaitForOthers::check_members(double late) {
    using State = Mailbox::State;
    if (mail_.state_of(mail_.rank()) != State::kPresent)
        throw Failure("in " + name() + ", " + mail_.name_of(mail_.rank()) + ": " + mail_.reason_of(mail_.rank()));
    for (const size_t rank : mail_.everybody) {
        const State state = mail_.state_of(rank);
        // Asked in this order, because it may have come before it left.
        if (state == State::kPresent || (state == State::kEnded && (waited() < late || !is_missing(rank)))) continue;
        std::string text = mail_.name_of(rank) + " " + mail_.fate_of(rank) + " (rank " + std::to_string(mail_.rank()) +
                           " was in " + name() + ")";
        if (state == State::kEnded)
            text += ". The output of rank " + std::to_string(rank) +
                    ", or the log of its machine, says why. Give every process the same number of steps, or train "
                    "within gluon_syncbn.join.";
        give_up(text);
    }
}

void WaitForOthers::check_others() {
    if (waited() < says_after_ && !said_ && !mail_.others_wait()) return;
    const Ranks ranks = awaited();
    if (std::exchange(said_, true) && ranks == told_) return;
    mail_.say({label_, told_ = ranks, name()});
}

void WaitForOthers::throw_if_failed() {
    if (const auto failure = step().failure()) give_up(failure->what());
}

// Of ranks that have said whom they wait for in the same call, names those: the cause may be some hops away.
std::string WaitForOthers::state() {
    Ranks ranks = missing_ranks();
    std::string causes, between;
    for (size_t i = 0; i < ranks.size(); ++i) {
        Ranks further;
        for (const Awaited& one : mail_.awaited_by(ranks[i]))
            if (one.label.is_of_call(label_)) further.insert(further.end(), one.ranks.begin(), one.ranks.end());
        further = without(further, mail_.rank());
        std::string& list = further.empty() ? causes : between;
        list += (list.empty() ? "" : ", ") + std::to_string(ranks[i]);
        for (const size_t rank : further)
            if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
    }
    const std::string whom = ranks.empty()                       ? "MPI, which all ranks have called,"
                             : causes.empty() || between.empty() ? "rank " + causes + between
                                                                 : "rank " + causes + ", through rank " + between + ",";
    return mail_.name_of(mail_.rank()) + " waits for " + whom + " in " + name();
}

std::string WaitForOthers::advice() {
    std::string text =
        "A process that is missing is slow, has ended, hangs, or makes other calls: every process must run the same "
        "number of steps with the same net.";
    for (const size_t rank : missing_ranks())
        for (const Awaited& one : mail_.awaited_by(rank)) {
            if (one.label.is_of_call(label_)) continue;
            text += " Meanwhile rank " + std::to_string(rank) + " waits in " + one.name + ".";
            const bool same_layer = one.label.channel == Label::kVectors && label_.channel == Label::kVectors &&
                                    one.label.key == label_.key;
            if (same_layer && (one.label.node < 0) != (label_.node < 0))
                text += " Hybridize the net in all processes, or in none.";
            break;
        }
    return text;
}

}  // namespace syncbn
