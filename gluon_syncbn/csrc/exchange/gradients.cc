#include "exchange/gradients.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <deque>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "cpu/numbers.h"
#include "exchange/processes.h"
#include "failure.h"
#include "waiting/wait.h"

namespace syncbn {
namespace {

constexpr size_t kBucket = 2 << 20;  // bytes
constexpr size_t kAlone = 1 << 17;   // of an array that shares its buckets with no other: MPI adds it where it is
constexpr size_t kAtOnce = 3;        // buckets that MPI adds: more would not stay in caches
constexpr double kGap = 5e-5;        // seconds between two looks at MPI
constexpr int kLooks = 50;           // before a nap: a long sum moves on in parts
// Whoever waits for others waits so many seconds longer than a layer, whose message is better.
constexpr double kLonger = 2;
constexpr double kLastMessage = 5;  // seconds until sums that a rank has begun before its end are here

// Widens the values of an array to the type of parameters, added up over the contexts.
void widen(Type type, const std::vector<void*>& contexts, size_t begin, size_t count, char* out) {
    cpu::with_type(type, [&](auto* kind) {
        using T = std::remove_pointer_t<decltype(kind)>;
        using Wide = typename cpu::Value<T>::Compute;
        auto* to = reinterpret_cast<Wide*>(out);
        const T* first = static_cast<const T*>(contexts[0]) + begin;
        for (size_t i = 0; i < count; ++i) to[i] = cpu::Value<T>::load(first + i);
        for (size_t c = 1; c < contexts.size(); ++c) {
            const T* from = static_cast<const T*>(contexts[c]) + begin;
            for (size_t i = 0; i < count; ++i) to[i] += cpu::Value<T>::load(from + i);
        }
    });
}

// The reverse, into each context.
void narrow(Type type, const char* in, const std::vector<void*>& contexts, size_t begin, size_t count) {
    cpu::with_type(type, [&](auto* kind) {
        using T = std::remove_pointer_t<decltype(kind)>;
        const auto* from = reinterpret_cast<const typename cpu::Value<T>::Compute*>(in);
        for (void* context : contexts) {
            T* to = static_cast<T*>(context) + begin;
            for (size_t i = 0; i < count; ++i) cpu::Value<T>::store(to + i, from[i]);
        }
    });
}

// Text without the digits in quotes.
std::string without_counters(const std::string& text) {
    std::string rest;
    bool quoted = false;
    for (const char c : text) {
        quoted ^= c == '\'';
        if (!quoted || std::isdigit(static_cast<unsigned char>(c)) == 0) rest += c;
    }
    return rest;
}

// FNV-1a, as two numbers that any sum with zeros leaves as they are.
std::array<double, 2> digest_of(const std::string& text) {
    uint64_t hash = 0xcbf29ce484222325;
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    return {static_cast<double>(hash >> 32), static_cast<double>(hash & 0xffffffff)};
}

// The first line that differs: "X on rank 1 and Y on rank 0". Empty if there is none.
std::string difference(const std::string& ours, const std::string& theirs, size_t rank) {
    constexpr const char* kNone = "none";
    std::istringstream here(ours), there(theirs);
    std::string one, another;
    do {
        if (!std::getline(here, one)) one = kNone;
        if (!std::getline(there, another)) another = kNone;
    } while (without_counters(one) == without_counters(another) && one != kNone);
    return one == another ? "" : one + " on rank " + std::to_string(rank) + " and " + another + " on rank 0";
}

}  // namespace

std::string name_in(const std::string& list, size_t begin, size_t end) {
    if (begin == end) return "a step without gradients";
    size_t at = 0;
    for (size_t i = 0, end; i < begin && (end = list.find('\n', at)) + 1 < list.size(); ++i) at = end + 1;
    const std::string name = list.substr(at, list.rfind(" (", list.find('\n', at)) - at);
    return name + (end > begin + 1 ? " and " + std::to_string(end - begin - 1) + " more" : "");
}

// Parts of arrays, in one type.
struct Gradients::Bucket {
    struct Cut {
        size_t summand, begin, count, offset;  // the offset is in values
    };
    Type wide;
    std::vector<Cut> cuts = {};
    size_t count = 0;  // values
    bool alone = false;
    std::unique_ptr<char[]> memory = nullptr;
    char* values = nullptr;         // this memory, or that of the array
    std::atomic<size_t> packed{0};  // cuts
    Mpi::Request request = {};
    char* at(size_t value) const { return values + value * static_cast<size_t>(size_of(wide)); }
    void allocate() {
        if (memory == nullptr) memory.reset(new char[count * static_cast<size_t>(size_of(wide))]);
        values = memory.get();
    }
};

// A Trainer, and how far its round has come.
struct Gradients::Trainer {
    const int64_t number;
    std::deque<std::shared_ptr<Round>> queue;  // guarded
    Mpi::Handle communicator = 0;
    bool connected = false;
    Mpi::Request request;        // that connects, or adds the digests
    std::string list;            // of the arrays that the buckets are of
    std::deque<Bucket> buckets;  // in the order in which rank 0 has got the arrays; they stay where they are
    std::vector<std::vector<std::pair<Bucket*, Bucket::Cut>>> places;  // of each array
    int64_t steps = 0;                                                 // rounds that have ended
    std::shared_ptr<Round> round;
    std::vector<double> digests;  // of all ranks, once MPI adds them
    bool compared = false;
    size_t begun = 0, ended = 0;  // buckets
    std::unique_ptr<WaitForRanks> waiting;

    explicit Trainer(size_t number) : number(static_cast<int64_t>(number)) {}

    std::string name() const { return "step " + std::to_string(steps + 1) + " of trainer " + std::to_string(number); }
    Label label(Label::Channel channel = Label::kGradients, int64_t piece = 0) const {
        return {channel, 0, number, 0, steps, piece};
    }
};

// Waits for other ranks, or without a limit for this one's own arrays: a layer may keep the backward, which waits for
// others with a limit of its own and a better message.
class Gradients::WaitForRanks final : public WaitForOthers {
  public:
    const bool for_ranks;

    WaitForRanks(Mailbox& mail, const Trainer& trainer, bool for_ranks, size_t begin, size_t end)
        : WaitForOthers(mail, trainer.label(), for_ranks ? trainer.round->timeout + kLonger : kForEver),
          for_ranks(for_ranks),
          trainer_(trainer),
          begin_(begin),
          end_(end) {}
    void check() {
        mail_.arrivals();
        check_members(kLastMessage);
        look();
    }

  protected:
    std::string name() const override { return name_in(trainer_.round->list, begin_, end_) + ", " + trainer_.name(); }
    // A sum of MPI's does not say who has not come. Others that wait there have said so.
    bool is_missing(size_t rank) const override {
        if (!for_ranks || rank == mail_.rank()) return false;
        const std::vector<Awaited> theirs = mail_.awaited_by(rank);
        return std::none_of(theirs.begin(), theirs.end(),
                            [&](const Awaited& one) { return one.label.is_of_call(label_); });
    }
    Ranks awaited() const override { return {}; }
    void check_others() override {
        if (for_ranks) WaitForOthers::check_others();
    }

  private:
    const Trainer& trainer_;
    const size_t begin_, end_;
};

Gradients::Round::Round(Gradients& gradients, Brought brought)
    : Brought(std::move(brought)), gradients_(gradients), items_(summands.size()) {}

void Gradients::Round::come(size_t summand, std::vector<void*> values, Done done) {
    std::unique_lock<std::mutex> lock(gradients_.mutex_);
    if (failure_ != nullptr) {
        lock.unlock();
        return done(failure_);
    }
    items_[summand] = {std::move(values), std::move(done)};
    come_.push_back(summand);
    if (packs_ != nullptr) {
        lock.unlock();
        try {
            pack(summand);
        } catch (const std::exception& error) {
            return lose(summand, reason_of(error));
        }
        lock.lock();
    }
    gradients_.look();
}

void Gradients::Round::lose(size_t summand, const std::string& reason) {
    std::lock_guard<std::mutex> lock(gradients_.mutex_);
    lost_ = name_in(list, summand, summand + 1) + " was not computed: " + reason;
    gradients_.look();
}

void Gradients::Round::end(const std::exception_ptr& failure) noexcept {
    {
        std::lock_guard<std::mutex> lock(gradients_.mutex_);
        failure_ = failure;  // no array comes after it
    }
    for (const size_t summand : come_) items_[summand].done(failure);
}

void Gradients::Round::pack(size_t summand) {
    const Type type = summands[summand].type;
    const std::vector<void*>& contexts = items_[summand].values;
    for (const auto& [bucket, cut] : packs_->places[summand]) {
        if (bucket->alone && type == bucket->wide && contexts.size() == 1) {
            bucket->values = static_cast<char*>(contexts[0]) + cut.begin * static_cast<size_t>(size_of(type));
        } else {
            if (bucket->alone) bucket->allocate();
            widen(type, contexts, cut.begin, cut.count, bucket->at(cut.offset));
        }
        ++bucket->packed;
    }
}

void Gradients::Round::unpack(const Bucket& bucket) const {
    if (bucket.values != bucket.memory.get()) return;  // the sums are where they belong
    for (const Bucket::Cut& cut : bucket.cuts)
        narrow(summands[cut.summand].type, bucket.at(cut.offset), items_[cut.summand].values, cut.begin, cut.count);
}

Gradients::Gradients(Processes& processes) : processes_(processes), mail_(processes.mail()) {}
Gradients::~Gradients() = default;

int64_t Gradients::add_trainer() {
    mail_.check_open();
    std::lock_guard<std::mutex> lock(mutex_);
    Trainer& trainer = trainers_.emplace_back(trainers_.size() + 1);
    Mpi::check(mail_.mpi.duplicate(mail_.mpi.communicator, &trainer.communicator, &trainer.request));
    return trainer.number;
}

void Gradients::begin(std::shared_ptr<Round> round) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!std::exchange(started_, true)) try {
            std::thread([this] { serve(); }).detach();
        } catch (const std::system_error& error) {
            started_ = false;
            throw Failure(std::string("no thread could be started for the sums of gradients: ") + error.what());
        }
    const auto of_round = [&](const Trainer& one) { return one.number == round->trainer; };
    std::find_if(trainers_.begin(), trainers_.end(), of_round)->queue.push_back(round);
    look();
}

// The caller holds the lock.
void Gradients::look() {
    ++changes_;
    changed_->notify_one();
}

void Gradients::serve() noexcept {
    int looks = 0;
    while (true) try {
            uint64_t seen;
            std::vector<Trainer*> busy;
            {
                std::lock_guard<std::mutex> lock(mutex_);
                seen = changes_;
                for (Trainer& trainer : trainers_) {
                    if (trainer.round == nullptr && !trainer.queue.empty()) {
                        trainer.round = std::move(trainer.queue.front());
                        trainer.queue.pop_front();
                    }
                    if (trainer.round != nullptr) busy.push_back(&trainer);
                }
            }
            bool moved = polls_ = false;
            for (Trainer* const trainer : busy)
                if (go_on(*trainer)) {
                    trainer->waiting.reset();
                    moved = true;
                }
            if (moved || (polls_ && ++looks < kLooks)) continue;
            looks = 0;
            std::unique_lock<std::mutex> lock(mutex_);
            const auto changed = [&] { return changes_ != seen; };
            if (busy.empty())
                changed_->wait(lock, changed);
            else
                changed_->wait_for(lock, std::chrono::duration<double>(polls_ ? kGap : kSleep), changed);
        } catch (const std::exception& reason) {
            give_up(reason);
        }
}

// Waits for a moment, in the arrays from `begin` to `end`. The same wait goes on until the round has gone on.
bool Gradients::wait(Trainer& trainer, bool for_ranks, size_t begin, size_t end) {
    polls_ |= for_ranks;
    Round& round = *trainer.round;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!round.lost_.empty()) throw Failure(round.lost_);
        for_ranks = for_ranks && (round.summands.empty() || !round.come_.empty());  // the backward has come to it
    }
    if (trainer.waiting == nullptr || trainer.waiting->for_ranks != for_ranks)
        trainer.waiting = std::make_unique<WaitForRanks>(mail_, trainer, for_ranks, begin, end);
    trainer.waiting->check();
    return false;
}

// Takes the round of a Trainer as far as it goes. Returns whether it has gone on.
bool Gradients::go_on(Trainer& trainer) {
    Round& round = *trainer.round;
    if (!trainer.connected) {
        try {
            trainer.connected = mail_.mpi.has_ended(&trainer.request);
        } catch (const std::runtime_error& error) {
            throw Failure(
                trainer.name() + " gets no communicator: " + error.what() +
                ". Each Trainer keeps one, and MPICH has some 2,000: use a Trainer again, or start a new job.");
        }
        return trainer.connected || wait(trainer, true, 0, round.summands.size());
    }
    if (!trainer.compared) return compare(trainer);
    if (trainer.list != round.list && !make_buckets(trainer)) return false;
    if (round.packs_ == nullptr) {
        std::vector<size_t> here;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            round.packs_ = &trainer;
            here = round.come_;
        }
        for (const size_t summand : here) round.pack(summand);
    }
    if (trainer.ended < trainer.buckets.size()) return add_buckets(trainer);
    trainer.begun = trainer.ended = 0;
    trainer.compared = false;
    trainer.digests.clear();
    ++trainer.steps;
    std::exchange(trainer.round, nullptr)->end(nullptr);
    return true;
}

// Gives complete buckets to MPI, and takes those that it has added.
bool Gradients::add_buckets(Trainer& trainer) {
    const Mpi& mpi = mail_.mpi;
    std::deque<Bucket>& buckets = trainer.buckets;
    bool moved = false;
    for (; trainer.begun < std::min(buckets.size(), trainer.ended + kAtOnce); ++trainer.begun, moved = true) {
        Bucket& next = buckets[trainer.begun];
        if (next.packed < next.cuts.size()) break;
        Mpi::check(mpi.all_reduce(mpi.in_place, next.at(0), static_cast<int>(next.count),
                                  next.wide == Type::kFloat64 ? mpi.float64 : mpi.float32, mpi.add,
                                  trainer.communicator, &next.request));
    }
    for (; trainer.ended < trainer.begun && mpi.has_ended(&buckets[trainer.ended].request); ++trainer.ended) {
        buckets[trainer.ended].packed = 0;
        trainer.round->unpack(buckets[trainer.ended]);
        moved = true;
    }
    if (moved) return true;
    const size_t summand = buckets[trainer.ended].cuts[0].summand;
    return wait(trainer, trainer.ended < trainer.begun, summand, summand + 1);
}

// Compares digests of what the ranks have for a round. Throws Failure with the first difference.
bool Gradients::compare(Trainer& trainer) {
    const Mpi& mpi = mail_.mpi;
    const Round& round = *trainer.round;
    std::vector<double>& digests = trainer.digests;
    if (digests.empty()) {
        mail_.check_open();
        digests.resize(2 * mail_.everybody.size());
        const auto own = digest_of(without_counters(round.list) + round.update);
        std::copy(own.begin(), own.end(), &digests[2 * mail_.rank()]);
        Mpi::check(mpi.all_reduce(mpi.in_place, digests.data(), static_cast<int>(digests.size()), mpi.float64, mpi.add,
                                  trainer.communicator, &trainer.request));
    }
    if (!mpi.has_ended(&trainer.request)) return wait(trainer, true, 0, round.summands.size());
    for (const size_t rank : mail_.everybody)
        if (!std::equal(&digests[0], &digests[2], &digests[2 * rank])) tell_difference(trainer, rank);
    return trainer.compared = true;
}

// What differs between this rank and rank 0.
void Gradients::tell_difference(const Trainer& trainer, size_t rank) {
    const Round& round = *trainer.round;
    const auto find = [&](int64_t piece, const char* what, const std::string& ours, const char* advice) {
        const auto theirs =
            processes_.bytes_of(trainer.label(Label::kTexts, piece), trainer.name(), round.timeout, {ours});
        const std::string found = difference(theirs[rank], theirs[0], rank);
        if (!found.empty())
            throw Failure("the processes disagree about " + std::string(what) + " in " +
                          name_in(round.list, 0, round.summands.size()) + ", " + trainer.name() + ": " + found + ". " +
                          advice);
    };
    find(0, "their arrays", round.list,
         "Build and cast the same net in all processes, and freeze the same parameters (grad_req='null').");
    find(1, "the update", round.update, "Give all Trainers the same settings; trainer.step takes the samples of all.");
}

// Once all arrays of a round are there. Returns whether it has made the buckets.
bool Gradients::make_buckets(Trainer& trainer) {
    const Round& round = *trainer.round;
    std::vector<size_t> order;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        order = round.come_;
    }
    const size_t all = round.summands.size();
    if (order.size() < all) return wait(trainer, false, 0, all);
    const Ranks others = without(mail_.everybody, 0);
    const Label label = trainer.label(Label::kOrder);
    if (mail_.rank() == 0) {
        mail_.post(label, order.data(), order.size() * sizeof order[0], others);
    } else {
        const Mailbox::Taken taken = mail_.take(0, label);
        if (taken.values == nullptr) return wait(trainer, true, 0, all);
        const auto* const told = reinterpret_cast<const size_t*>(taken.values.get());
        order.assign(told, told + taken.size / sizeof order[0]);
        Ranks sorted = order;
        std::sort(sorted.begin(), sorted.end());
        for (size_t i = 0; i < all; ++i)
            if (sorted.size() != all || sorted[i] != i) throw Failure("rank 0 has sent no order of " + trainer.name());
    }
    trainer.buckets.clear();
    trainer.places.assign(all, {});
    for (const size_t i : order) {
        const Summand& summand = round.summands[i];
        const Type wide = parameter_type_of(summand.type);
        const auto size = static_cast<size_t>(size_of(wide));
        const size_t most = kBucket / size;
        const bool alone = summand.size * size >= kAlone;
        for (size_t begin = 0; begin < summand.size;) {
            const Bucket* const last = trainer.buckets.empty() ? nullptr : &trainer.buckets.back();
            if (last == nullptr || alone || last->alone || last->wide != wide || last->count == most)
                trainer.buckets.emplace_back().wide = wide;
            Bucket& bucket = trainer.buckets.back();
            bucket.alone = alone;
            const size_t count = std::min(summand.size - begin, most - bucket.count);
            bucket.cuts.push_back({i, begin, count, bucket.count});
            trainer.places[i].emplace_back(&bucket, bucket.cuts.back());
            bucket.count += count;
            begin += count;
        }
    }
    for (Bucket& bucket : trainer.buckets)
        if (!bucket.alone) bucket.allocate();
    trainer.list = round.list;
    return true;
}

// Everything that this process has begun fails, and what it begins later.
void Gradients::give_up(const std::exception& reason) noexcept {
    std::vector<std::shared_ptr<Round>> rounds;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (Trainer& trainer : trainers_) {
            trainer.waiting.reset();
            if (trainer.round != nullptr) rounds.push_back(std::move(trainer.round));
            rounds.insert(rounds.end(), trainer.queue.begin(), trainer.queue.end());
            trainer.queue.clear();
        }
    }
    // A step that has begun since, after another failure, has nothing to do with them.
    const int64_t step = syncbn::step().number;
    if (std::any_of(rounds.begin(), rounds.end(), [&](const auto& round) { return round->step == step; }))
        syncbn::step().fail(reason);
    mail_.report(Mailbox::State::kFailed, reason_of(reason));  // the others hear the first reason of this rank
    const auto failure = std::make_exception_ptr(Failure(reason_of(reason)));
    for (const auto& round : rounds) round->end(failure);
    failed_.insert(failed_.end(), rounds.begin(), rounds.end());
}

}  // namespace syncbn
