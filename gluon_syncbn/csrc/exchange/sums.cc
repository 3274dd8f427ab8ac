#include "exchange/sums.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>

#include "cpu/numbers.h"
#include "failure.h"
#include "point.h"
#include "waiting/wait.h"

namespace syncbn {
namespace {

constexpr double kPoll = 5e-5;  // seconds between two looks at a sum of machines
// Whoever waits for others waits so many seconds longer than a rank that the others have overtaken, so that the rank that
// knows both rounds reports it.
constexpr double kLonger = 2;
constexpr double kLastMessage = 5;  // seconds until what a rank has sent before its end is here
constexpr size_t kLine = 64;        // bytes of a cache line

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

// A line without the digits in quotes.
std::string without_counters(const std::string& line) {
    std::string text;
    bool quoted = false;
    for (const char c : line) {
        quoted ^= c == '\'';
        if (!quoted || std::isdigit(static_cast<unsigned char>(c)) == 0) text += c;
    }
    return text;
}

// The first line of this rank that is not that of rank 0: "X on rank 1 and Y on rank 0". Empty if there is none.
std::string difference(const std::string& ours, const std::string& theirs, const std::string& own_rank) {
    if (ours == theirs) return "";  // as in nearly every step
    constexpr const char* kNone = "none";
    std::istringstream here(ours), there(theirs);
    std::string one, another;
    do {
        if (!std::getline(here, one)) one = kNone;
        if (!std::getline(there, another)) another = kNone;
    } while (without_counters(one) == without_counters(another) && one != kNone);
    return one == another ? "" : one + " on rank " + own_rank + " and " + another + " on rank 0";
}

// "..., round 3".
std::string name_of(const Round& round, size_t begin, size_t end) {
    return name_in(round.list, begin, end) + ", round " + std::to_string(round.number + 1);
}

// Whether the backward has come to this round. Until then nothing waits for other processes. A layer may keep the
// backward, which waits for them with a limit of its own and a better message.
bool has_begun(Round& round) { return round.summands.empty() || round.values(round.summands.size() - 1) != nullptr; }

}  // namespace

std::string name_in(const std::string& list, size_t begin, size_t end) {
    if (begin == end) return "a step without gradients";
    size_t at = 0;
    for (size_t i = 0, end; i < begin && (end = list.find('\n', at)) + 1 < list.size(); ++i) at = end + 1;
    const std::string name = list.substr(at, list.rfind(" (", list.find('\n', at)) - at);
    return name + (end > begin + 1 ? " and " + std::to_string(end - begin - 1) + " more" : "");
}

// A part of a round, in one type. It may have the end of one array and the beginning of another.
struct Sums::Piece {
    struct Cut {
        size_t summand, begin, count, offset;  // the offset is in bytes
    };
    Type wide;
    std::vector<Cut> cuts;
    size_t bytes;       // in memory of the machine
    size_t bucket = 0;  // bytes on GPUs

    // The last arrays come first. `most`: bytes of a piece.
    static std::vector<Piece> cut(const Round& round, size_t most) {
        std::vector<Piece> pieces;
        for (size_t i = round.summands.size(); i-- > 0;) {
            const Summand& summand = round.summands[i];
            const Type wide = parameter_type_of(summand.type);
            const auto size = static_cast<size_t>(size_of(wide));
            const size_t line = round.gpus != nullptr ? size : kLine;
            for (size_t begin = 0; begin < summand.size;) {
                if (pieces.empty() || pieces.back().wide != wide || pieces.back().bytes + line > most)
                    pieces.push_back({wide, {}, 0});
                Piece& piece = pieces.back();
                const size_t count = std::min(summand.size - begin, (most - piece.bytes) / size);
                piece.cuts.push_back({i, begin, count, piece.bytes});
                piece.bytes += (count * size + line - 1) / line * line;
                begin += count;
            }
        }
        if (pieces.empty()) pieces.push_back({Type::kFloat32, {}, 0});  // the processes meet in every round
        for (Piece& piece : pieces)
            if (round.gpus != nullptr) piece.bucket = std::exchange(piece.bytes, kLine);
        return pieces;
    }
    // Where the part of a rank begins.
    size_t part(size_t rank, size_t ranks) const { return bytes / kLine * rank / ranks * kLine; }
};

// What this rank waits for: nothing, its own arrays, or its own step although it has come to another one, which the others
// have overtaken; a count of the ranks, the leader of the machine or a count of it, other machines, or NCCL.
struct Sums::Need {
    enum Of { kNothing, kOwn, kOvertaken, kRanks, kLeader, kMachines, kGpus } of = kOwn;
    std::atomic<uint64_t> Segment::Pipeline::* count = nullptr;
    uint64_t least = 0;

    bool operator==(const Need& other) const { return of == other.of && count == other.count && least == other.least; }
};

class Sums::WaitForRanks final : public WaitForOthers {
  public:
    WaitForRanks(const Sums& sums, std::string what, Need need, double timeout)
        : WaitForOthers(sums.segment_, limit_of(need, timeout), true),
          sums_(sums),
          what_(std::move(what)),
          need_(need) {}

    const Need& need() const { return need_; }
    // Sleeps until the event count of this rank is not what was `seen`, or for a while; `polls`: only for a moment.
    void sleep(uint32_t seen, bool polls) {
        check_members();
        look();
        mail_.sleep(sums_.event_, seen, polls ? kPoll : kSleep);
    }

  protected:
    std::string name() const override { return what_; }
    bool is_missing(size_t rank) const override {
        if (need_.of == Need::kLeader && rank != 0) return false;
        if (need_.count == nullptr) return need_.of == Need::kLeader;
        return sums_.segment_.pipeline(rank).*need_.count < need_.least;
    }
    void check_others() override {
        WaitForOthers::check_others();
        if (sums_.machines_ != nullptr)
            sums_.machines_->check(name(), need_.of == Need::kMachines && waited() > kLastMessage);
    }
    std::string state() override {
        if (need_.of != Need::kOvertaken) return WaitForOthers::state();
        const std::string& list = sums_.lists_.at(sums_.next_);
        const auto arrays = static_cast<size_t>(std::count(list.begin(), list.end(), '\n'));
        return mail_.name_of(mail_.rank()) + " waits in " + name() + ", because the others have gone on to " +
               name_in(list, 0, arrays) + ", which this rank has not computed";
    }
    std::string advice() override {
        return need_.of == Need::kOvertaken ? "Every process must step the same trainers in the same order: a step was "
                                              "left out, or another one came before it."
                                            : WaitForOthers::advice();
    }
    std::string missing() const override {
        if (need_.of == Need::kMachines) return others(mail_.members.ranks);
        if (need_.of == Need::kGpus)
            return others({mail_.members.ranks[mail_.rank()]}) + " (over NCCL; NCCL_DEBUG=INFO shows what it does)";
        return WaitForOthers::missing() + (need_.of == Need::kLeader ? ", the leader of this machine," : "");
    }

  private:
    // For its own arrays alone, a process waits as long as its backward takes: a layer may keep that, which waits for
    // others with a limit of its own and a better message.
    static double limit_of(const Need& need, double timeout) {
        return need.of == Need::kOwn ? kForEver : need.of == Need::kOvertaken ? timeout : timeout + kLonger;
    }
    // The ranks that are not here, the first few of them.
    std::string others(const Ranks& here) const {
        constexpr size_t kFew = 8;
        std::string ranks;
        size_t count = 0;
        for (size_t rank = 0; rank < mail_.members.of; ++rank) {
            if (std::find(here.begin(), here.end(), rank) != here.end()) continue;
            if (++count > kFew) return ranks + " or others";
            ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
        }
        return ranks;
    }
    const Sums& sums_;
    const std::string what_;
    const Need need_;
};

class Sums::Pass {
  public:
    Pass(Sums& sums, Round& round)
        : sums_(sums),
          segment_(sums.segment_),
          round_(round),
          pieces_(Piece::cut(round, round.gpus != nullptr  ? round.gpus->bucket()
                                    : sums.is_on_several() ? Segment::kPiece
                                                           : Segment::kPieceOfOne)),
          pipeline_(segment_.pipeline(segment_.rank())),
          first_(pipeline_.out),
          last_(first_ + pieces_.size()) {}

    void run() {
        while (pipeline_.out < last_) {
            const uint32_t seen = segment_.arrivals(sums_.event_);
            const Need need = go_on();
            if (need.of == Need::kNothing)
                sums_.wait_.reset();
            else
                wait(need, seen);
        }
        while (round_.gpus != nullptr && !round_.gpus->idle()) wait({Need::kGpus}, segment_.arrivals(sums_.event_));
    }

  private:
    using Count = std::atomic<uint64_t> Segment::Pipeline::*;

    // Takes a piece through the first stage where one can go on. If there is none, returns what the first one needs that
    // waits.
    Need go_on() {
        using Counts = Segment::Pipeline;
        const Counts& own = pipeline_;
        std::optional<Need> missing;
        // A stage: its count, that of the stage before here, what its next piece needs, and what is done with that.
        const auto goes = [&](Count count, uint64_t before, Need need, Need::Of (Pass::*work)(uint64_t)) {
            if (own.*count == before) return false;
            if (reached(need)) need = {(this->*work)(own.*count)};
            if (need.of == Need::kNothing)
                advance(count);
            else if (!missing)
                missing = need;
            return need.of == Need::kNothing;
        };
        const bool leads = sums_.machines_ != nullptr, several = sums_.is_on_several();
        const uint64_t room = std::max<uint64_t>(own.in + 1, Segment::kPieces) - Segment::kPieces;
        const bool goes_on =
            goes(&Counts::added, own.in, {Need::kRanks, &Counts::in, own.added + 1}, &Pass::add) ||
            (leads && goes(&Counts::given, own.added, {Need::kRanks, &Counts::added, own.given + 1}, &Pass::give)) ||
            (leads && goes(&Counts::total, own.given, {Need::kNothing}, &Pass::get)) ||
            (several && goes(&Counts::out, own.added, {Need::kLeader, &Counts::total, own.out + 1}, &Pass::copy_out)) ||
            (!several && goes(&Counts::out, own.added, {Need::kRanks, &Counts::added, own.out + 1}, &Pass::copy_out)) ||
            goes(&Counts::in, last_, {Need::kRanks, &Counts::out, room}, &Pass::copy_in);
        return goes_on ? Need{Need::kNothing} : *missing;
    }
    bool reached(const Need& need) const {
        if (need.of == Need::kNothing) return true;
        return (need.of == Need::kLeader ? (segment_.pipeline(0).*need.count).load() : everywhere(need.count)) >=
               need.least;
    }

    const Piece& piece_of(uint64_t number) const { return pieces_[number - first_]; }

    Need::Of copy_in(uint64_t number) {
        const Piece& piece = piece_of(number);
        for (const Piece::Cut& cut : piece.cuts)
            if (round_.values(cut.summand) == nullptr) return Need::kOwn;
        SYNCBN_POINT("before_copy_in");
        if (round_.gpus != nullptr) return Need::kNothing;
        char* to = segment_.piece(segment_.rank(), number);
        for (const Piece::Cut& cut : piece.cuts)
            widen(round_.summands[cut.summand].type, *round_.values(cut.summand), cut.begin, cut.count,
                  to + cut.offset);
        return Need::kNothing;
    }

    Need::Of add(uint64_t number) {
        SYNCBN_POINT("before_add_part");
        if (piece_of(number).wide == Type::kFloat64)
            add_part<double>(number);
        else
            add_part<float>(number);
        return Need::kNothing;
    }
    template <typename Wide>
    void add_part(uint64_t number) {
        const Piece& piece = piece_of(number);
        const size_t ranks = segment_.ranks(), own = segment_.rank(), end = piece.part(own + 1, ranks);
        if (ranks == 1) return;
        constexpr size_t kStrip = 4096;  // bytes that stay in the nearest cache
        alignas(kLine) Wide sum[kStrip / sizeof(Wide)];
        for (size_t at = piece.part(own, ranks); at < end; at += kStrip) {
            const size_t bytes = std::min(kStrip, end - at), count = bytes / sizeof(Wide);
            std::memcpy(sum, segment_.piece(0, number) + at, bytes);
            for (size_t rank = 1; rank < ranks; ++rank) {
                const auto* from = reinterpret_cast<const Wide*>(segment_.piece(rank, number) + at);
                for (size_t i = 0; i < count; ++i) sum[i] += from[i];
            }
            std::memcpy(segment_.piece(own, number) + at, sum, bytes);
        }
    }

    // Puts the parts of all ranks of this machine side by side, and begins to add those of other machines.
    Need::Of give(uint64_t number) {
        const Piece& piece = piece_of(number);
        char* const all = segment_.piece(0, number);
        for (size_t rank = 1; rank < segment_.ranks(); ++rank) {
            const size_t begin = piece.part(rank, segment_.ranks()), end = piece.part(rank + 1, segment_.ranks());
            std::memcpy(all + begin, segment_.piece(rank, number) + begin, end - begin);
        }
        sums_.machines_->begin(piece.wide, all, piece.bytes / static_cast<size_t>(size_of(piece.wide)));
        return Need::kNothing;
    }
    Need::Of get(uint64_t) { return sums_.machines_->done() ? Need::kNothing : Need::kMachines; }

    Need::Of copy_out(uint64_t number) {
        const Piece& piece = piece_of(number);
        if (round_.gpus != nullptr) return sum_on_gpus(piece);
        SYNCBN_POINT("before_copy_out");
        const auto size = static_cast<size_t>(size_of(piece.wide));
        const size_t ranks = sums_.is_on_several() ? 1 : segment_.ranks();  // a leader has all parts
        for (const Piece::Cut& cut : piece.cuts) {
            const size_t first = cut.offset, last = cut.offset + cut.count * size;
            for (size_t rank = 0; rank < ranks; ++rank) {
                const size_t begin = std::max(first, piece.part(rank, ranks));
                const size_t end = std::min(last, piece.part(rank + 1, ranks));
                if (begin < end)
                    narrow(round_.summands[cut.summand].type, segment_.piece(rank, number) + begin,
                           *round_.values(cut.summand), cut.begin + (begin - first) / size, (end - begin) / size);
            }
        }
        return Need::kNothing;
    }
    Need::Of sum_on_gpus(const Piece& piece) {
        if (!round_.gpus->ready()) return Need::kGpus;
        std::vector<cuda::AllReduce::Part> parts;
        for (const Piece::Cut& cut : piece.cuts)
            parts.push_back(
                {round_.summands[cut.summand].type, *round_.values(cut.summand), cut.begin, cut.count, cut.offset});
        if (!parts.empty()) round_.gpus->begin(piece.wide, piece.bucket, std::move(parts));
        return Need::kNothing;
    }

    // The smallest count of all ranks.
    uint64_t everywhere(Count count) const {
        uint64_t least = segment_.pipeline(0).*count;
        for (size_t rank = 1; rank < segment_.ranks(); ++rank)
            least = std::min(least, (segment_.pipeline(rank).*count).load());
        return least;
    }
    // The last rank to get there wakes the others. They wait for the leader alone, too.
    void advance(Count count) {
        const uint64_t now = ++(pipeline_.*count);
        if (count != &Segment::Pipeline::total && everywhere(count) < now) return;
        for (const size_t rank : segment_.everybody)
            if (rank != segment_.rank()) segment_.advance(Segment::event_of(rank));
    }

    void wait(const Need& need, uint32_t seen) {
        const uint64_t at = std::min(pipeline_.out.load(), last_ - 1);
        const std::vector<Piece::Cut>& cuts = piece_of(at).cuts;
        const size_t begin = cuts.empty() ? 0 : cuts.back().summand, end = cuts.empty() ? 0 : cuts[0].summand + 1;
        const bool polls = pipeline_.total < pipeline_.given || (round_.gpus != nullptr && !round_.gpus->idle());
        sums_.wait(round_, begin, end, has_begun(round_) ? need : Need{}, seen, polls);
    }

    Sums& sums_;
    Segment& segment_;
    Round& round_;
    const std::vector<Piece> pieces_;
    Segment::Pipeline& pipeline_;
    const uint64_t first_, last_;  // pieces, counted over all rounds
};

Sums::Sums(Segment& machine, std::unique_ptr<Machines> machines, std::function<void(const std::string&)> report)
    : segment_(machine),
      machines_(std::move(machines)),
      report_(std::move(report)),
      event_(Segment::event_of(machine.rank())) {}

Sums::~Sums() = default;

void Sums::begin(std::shared_ptr<Round> round) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(round));
    if (!started_) try {
            std::thread([this] { serve(); }).detach();
            started_ = true;
        } catch (const std::system_error& error) {
            queue_.pop_back();
            throw Failure(std::string("no thread could be started for the sums of gradients: ") + error.what());
        }
    look();
}

void Sums::serve() noexcept {
    while (true) {
        try {
            serve_next();
        } catch (const std::exception& reason) {
            give_up(reason);
        }
    }
}

// In a leader: tells the others.
void Sums::announce() {
    segment_.check_open();
    if (machines_ != nullptr && decides()) machines_->announce(rounds_, order_);
    const Ranks others = without(segment_.everybody, 0);
    segment_.post(Label::of_gradients(Label::kOrder, rounds_), order_.data(), order_.size(), others);
    for (const size_t rank : others) segment_.advance(Segment::event_of(rank));
}

// Sleeps for a while, in the arrays of a round from `begin` to `end`. The same wait goes on while the need is the same.
void Sums::wait(Round& round, size_t begin, size_t end, Need need, uint32_t seen, bool polls) {
    const bool overtaken = need.of == Need::kOwn && overtaken_ != nullptr && has_begun(*overtaken_);
    if (overtaken) need.of = Need::kOvertaken;
    const Round& waits = overtaken ? *overtaken_ : round;
    if (wait_ == nullptr || !(wait_->need() == need))
        wait_ = std::make_unique<WaitForRanks>(
            *this, overtaken ? name_of(waits, 0, waits.summands.size()) : name_of(waits, begin, end), need,
            waits.timeout);
    wait_->sleep(seen, polls);
}

// The order of a round: its channel, its list or "=" for the last one of the channel, and the update.
std::string Sums::order_of(const Round& round) {
    const bool is_told = lists_[round.channel] == round.list;
    return std::to_string(round.channel) + "\n" + (is_told ? "=" : round.list) + "\f" + round.update;
}

// Finds out which round is next in all processes, and makes it the current one if it has begun here.
void Sums::find_next(const Round& oldest) {
    if (order_.empty()) {
        const auto order = decides()              ? order_of(oldest)
                           : segment_.rank() == 0 ? machines_->announced(rounds_)
                                                  : segment_.received(0, Label::of_gradients(Label::kOrder, rounds_));
        if (!order) return;
        order_ = *order;
        const size_t begin = order_.find('\n') + 1;
        const std::string list = order_.substr(begin, order_.find('\f') - begin);
        next_ = std::stoll(order_);
        if (list != "=") lists_[next_] = list;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    const auto next =
        std::find_if(queue_.begin(), queue_.end(), [&](const auto& round) { return round->channel == next_; });
    overtaken_ = next == queue_.begin() ? nullptr : queue_[0];
    if (next == queue_.end()) return;
    current_ = *next;
    queue_.erase(next);
}

// Compares what this rank has for the current round with what rank 0 has told. Throws Failure with the first difference.
void Sums::compare(const Round& round) {
    const auto expect = [&](const std::string& what, const std::string& ours, const std::string& theirs,
                            const char* advice) {
        const std::string found = difference(ours, theirs, segment_.number_of(segment_.rank()));
        if (!found.empty())
            throw Failure("the processes disagree about " + what + " in " + name_of(round, 0, round.summands.size()) +
                          ": " + found + ". " + advice);
    };
    expect("their arrays", round.list, lists_[round.channel],
           "Build and cast the same net in all processes, and freeze the same parameters (grad_req='null').");
    expect("the update", round.update, order_.substr(order_.find('\f') + 1),
           "Give all Trainers the same settings; trainer.step takes the samples of all.");
}

// Runs the round that is next in all processes, or sleeps for a while.
void Sums::serve_next() {
    const uint32_t seen = segment_.arrivals(event_);
    std::shared_ptr<Round> oldest;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!queue_.empty()) oldest = queue_[0];
    }
    if (oldest == nullptr) {  // nobody here waits for a sum
        wait_.reset();
        return segment_.sleep(event_, seen, kSleep);
    }
    find_next(*oldest);
    if (current_ == nullptr) {
        const bool leads = segment_.rank() == 0, has_come = order_.empty() && has_begun(*oldest);
        const Need need = {!has_come ? Need::kOwn : leads ? Need::kMachines : Need::kLeader};
        return wait(*oldest, 0, oldest->summands.size(), need, seen, has_come && leads);
    }
    wait_.reset();
    if (segment_.rank() == 0) announce();
    if (!decides()) compare(*current_);
    ++rounds_;
    Pass(*this, *current_).run();
    order_.clear();
    overtaken_.reset();
    std::exchange(current_, nullptr)->succeed();
}

// Everything that this process has begun fails, and what it begins later.
void Sums::give_up(const std::exception& reason) noexcept {
    std::deque<std::shared_ptr<Round>> rounds;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        rounds.swap(queue_);
    }
    if (current_ != nullptr) rounds.push_front(std::move(current_));
    // A step that has begun since, after another failure, has nothing to do with them.
    const int64_t step = syncbn::step().number;
    if (std::any_of(rounds.begin(), rounds.end(), [&](const auto& round) { return round->step == step; }))
        syncbn::step().fail(reason);
    // The others hear the first reason, if this rank has given one, and not what a wait has made of it.
    const bool failed = segment_.state_of(segment_.rank()) == Segment::State::kFailed;
    report_(failed ? segment_.reason_of(segment_.rank()) : reason.what());
    wait_.reset();
    overtaken_.reset();
    for (const auto& round : rounds) {
        if (round->gpus != nullptr) round->gpus->abort();
        round->fail(reason);
    }
}

}  // namespace syncbn
