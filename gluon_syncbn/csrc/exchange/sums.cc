#include "exchange/sums.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "cpu/numbers.h"
#include "failure.h"
#include "point.h"
#include "waiting/wait.h"

namespace syncbn {
namespace {

constexpr double kSleep = std::chrono::duration<double>(kSlice).count();
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

// A line without Gluon's counters in the name, which depend on what else a process has built.
std::string without_counters(const std::string& line) {
    const size_t end = line.rfind(" (");
    std::string text;
    for (size_t i = 0; i < line.size(); ++i)
        if (i >= end || std::isdigit(static_cast<unsigned char>(line[i])) == 0) text += line[i];
    return text;
}

// What a rank says of a round: its channel, a digest of its arrays (FNV-1a), what is done with the sums, and a line for each
// array, as far as there is space.
std::string text_of(const Round& round) {
    uint64_t digest = 0xcbf29ce484222325u;
    std::string lines;
    for (const Summand& summand : round.summands) {
        // "the gradient of 'conv0_weight' (864 values of float32)"
        const std::string line =
            summand.name + " (" + std::to_string(summand.size) + " values of " + name_of(summand.type) + ")\n";
        for (const char c : without_counters(line)) digest = (digest ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
        lines += line;
    }
    return std::to_string(round.channel) + " " + std::to_string(digest) + " " + round.update + "\n" +
           lines.substr(0, Segment::kPiece);
}

// "the gradient of 'conv0_weight' and 12 more", for the first of so many arrays.
std::string name_of(const std::string& first, size_t count) {
    return count == 0 ? "a step without gradients"
                      : first + (count > 1 ? " and " + std::to_string(count - 1) + " more" : "");
}

// The same of a round's arrays from `begin` to `end`: "..., round 3".
std::string name_of(const Round& round, size_t begin, size_t end) {
    return name_of(begin < end ? round.summands[begin].name : "", end - begin) + ", round " +
           std::to_string(round.number + 1);
}

// The same of a round that rank 0 has told.
std::string name_of_told(const std::string& told) {
    const size_t begin = told.find('\n') + 1, end = told.find('\n', begin);
    const auto count = static_cast<size_t>(std::count(told.begin() + static_cast<int64_t>(begin), told.end(), '\n'));
    return name_of(told.substr(begin, told.rfind(" (", end) - begin), count);
}

// Compares what this rank has for a round with what rank 0 has told. Throws Failure with the first difference.
void compare(const Round& round, const std::string& own_rank, const std::string& told) {
    std::istringstream ours(text_of(round)), theirs(told);
    std::string one, another;
    std::getline(ours, one);
    std::getline(theirs, another);
    if (one == another) return;
    const std::string where = " in " + name_of(round, 0, round.summands.size()) + ":";
    const auto update_in = [](const std::string& line) { return line.substr(line.find(' ', line.find(' ') + 1)); };
    const std::string update = update_in(one), their_update = update_in(another);
    size_t number = 0;
    do {
        if (!std::getline(ours, one)) one = "none";
        if (!std::getline(theirs, another)) another = "none";
        ++number;
    } while (without_counters(one) == without_counters(another) && one != "none");
    if (one != "none" || another != "none")
        throw Failure("the processes disagree about their arrays" + where + " number " + std::to_string(number) +
                      " is " + one + " on rank " + own_rank + " and " + another +
                      " on rank 0. Build and cast the same net in all processes, and freeze the same parameters "
                      "(grad_req='null').");
    throw Failure("the processes disagree about the update" + where + update + " on rank " + own_rank + " and" +
                  their_update +
                  " on rank 0. Give all Trainers the same settings; trainer.step takes the samples of all.");
}

// Whether the backward has come to this round. Until then nothing waits for other processes. A layer may keep the
// backward, which waits for them with a limit of its own and a better message.
bool has_begun(Round& round) { return round.summands.empty() || round.values(round.summands.size() - 1) != nullptr; }

}  // namespace

// A part of a round, in one type. It may have the end of one array and the beginning of another.
struct Sums::Piece {
    struct Span {
        size_t summand, begin, count, offset;  // the offset is in bytes
    };
    Type wide;
    std::vector<Span> spans;
    size_t bytes;       // in memory of the machine
    size_t bucket = 0;  // bytes on GPUs

    // The last arrays come first.
    static std::vector<Piece> cut(const Round& round) {
        std::vector<Piece> pieces;
        const size_t most = round.gpus != nullptr ? round.gpus->bucket() : Segment::kPiece;
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
                piece.spans.push_back({i, begin, count, piece.bytes});
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

// What this rank waits for: its own arrays, or its own step although it has come to another one, which the others have
// overtaken; a count of the ranks, the leader of the machine or a count of it, other machines, or NCCL.
struct Sums::Need {
    enum Of { kOwn, kOvertaken, kRanks, kLeader, kMachines, kGpus } of = kOwn;
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
        return mail_.name_of(mail_.rank()) + " waits in " + name() + ", because the others have gone on to " +
               name_of_told(sums_.told_) + ", which this rank has not computed";
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

// One round.
class Sums::Pass {
  public:
    Pass(Sums& sums, Round& round)
        : sums_(sums),
          segment_(sums.segment_),
          round_(round),
          pieces_(Piece::cut(round)),
          pipeline_(segment_.pipeline(segment_.rank())),
          first_(pipeline_.out),
          last_(first_ + pieces_.size()),
          totalled_(first_) {}

    void run() {
        while (pipeline_.out < last_) {
            const uint32_t seen = segment_.arrivals(sums_.event_);
            Need need;
            if (goes_on(&need))
                sums_.wait_.reset();
            else
                wait(need, seen);
        }
        while (round_.gpus != nullptr && !round_.gpus->idle()) wait({Need::kGpus}, segment_.arrivals(sums_.event_));
    }

  private:
    using Count = std::atomic<uint64_t> Segment::Pipeline::*;

    // Does what can be done next. Returns false, with the reason, if there is nothing.
    bool goes_on(Need* need) {
        const bool several = sums_.machines_ != nullptr || segment_.members.of > segment_.ranks();
        const Count complete = several ? &Segment::Pipeline::total : &Segment::Pipeline::added;
        const uint64_t out = pipeline_.out, added = pipeline_.added, in = pipeline_.in;
        const uint64_t completed = several ? segment_.pipeline(0).total.load() : everywhere(complete);
        const bool gpus_are_busy = out < completed && round_.gpus != nullptr && !round_.gpus->ready();
        if (out < completed && !gpus_are_busy) {
            if (round_.gpus != nullptr)
                sum_on_gpus(piece_of(out));
            else
                copy_out(out, several);
            advance(&Segment::Pipeline::out);
            return true;
        }
        if (sums_.machines_ != nullptr && totalled_ < everywhere(&Segment::Pipeline::added)) {
            join_parts(totalled_);
            const Piece& piece = piece_of(totalled_);
            sums_.machines_->begin(piece.wide, segment_.piece(0, totalled_),
                                   piece.bytes / static_cast<size_t>(size_of(piece.wide)));
            ++totalled_;
            return true;
        }
        if (sums_.machines_ != nullptr && pipeline_.total < totalled_ && sums_.machines_->done()) {
            advance(&Segment::Pipeline::total);
            return true;
        }
        if (added < everywhere(&Segment::Pipeline::in)) {
            if (piece_of(added).wide == Type::kFloat64)
                add_part<double>(added);
            else
                add_part<float>(added);
            advance(&Segment::Pipeline::added);
            return true;
        }
        const bool room = in < last_ && in < everywhere(&Segment::Pipeline::out) + Segment::kPieces;
        if (room && copy_in(in)) {
            advance(&Segment::Pipeline::in);
            return true;
        }
        if (gpus_are_busy)
            *need = {Need::kGpus};
        else if (added < in)
            *need = {Need::kRanks, &Segment::Pipeline::in, added + 1};
        else if (out < added && sums_.machines_ != nullptr && totalled_ == added)
            *need = {Need::kMachines};
        else if (out < added)
            *need = {several && sums_.machines_ == nullptr ? Need::kLeader : Need::kRanks, complete, out + 1};
        else if (in < last_ && !room)
            *need = {Need::kRanks, &Segment::Pipeline::out, in + 1 - Segment::kPieces};
        return false;
    }

    const Piece& piece_of(uint64_t number) const { return pieces_[number - first_]; }

    // Returns false if some array is not available yet.
    bool copy_in(uint64_t number) {
        const Piece& piece = piece_of(number);
        for (const Piece::Span& span : piece.spans)
            if (round_.values(span.summand) == nullptr) return false;
        SYNCBN_POINT("before_copy_in");
        if (round_.gpus != nullptr) return true;
        char* to = segment_.piece(segment_.rank(), number);
        for (const Piece::Span& span : piece.spans)
            widen(round_.summands[span.summand].type, *round_.values(span.summand), span.begin, span.count,
                  to + span.offset);
        return true;
    }

    template <typename Wide>
    void add_part(uint64_t number) {
        SYNCBN_POINT("before_add_part");
        const Piece& piece = piece_of(number);
        const size_t ranks = segment_.ranks(), own = segment_.rank(), end = piece.part(own + 1, ranks);
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

    // Puts the parts of all ranks of this machine side by side.
    void join_parts(uint64_t number) {
        const Piece& piece = piece_of(number);
        for (size_t rank = 1; rank < segment_.ranks(); ++rank) {
            const size_t begin = piece.part(rank, segment_.ranks()), end = piece.part(rank + 1, segment_.ranks());
            std::memcpy(segment_.piece(0, number) + begin, segment_.piece(rank, number) + begin, end - begin);
        }
    }

    // `joined`: rank 0 has all parts.
    void copy_out(uint64_t number, bool joined) {
        SYNCBN_POINT("before_copy_out");
        const Piece& piece = piece_of(number);
        const auto size = static_cast<size_t>(size_of(piece.wide));
        const size_t ranks = joined ? 1 : segment_.ranks();
        for (const Piece::Span& span : piece.spans) {
            const size_t first = span.offset, last = span.offset + span.count * size;
            for (size_t rank = 0; rank < ranks; ++rank) {
                const size_t begin = std::max(first, piece.part(rank, ranks));
                const size_t end = std::min(last, piece.part(rank + 1, ranks));
                if (begin < end)
                    narrow(round_.summands[span.summand].type, segment_.piece(rank, number) + begin,
                           *round_.values(span.summand), span.begin + (begin - first) / size, (end - begin) / size);
            }
        }
    }

    void sum_on_gpus(const Piece& piece) {
        std::vector<cuda::AllReduce::Part> parts;
        for (const Piece::Span& span : piece.spans)
            parts.push_back({round_.summands[span.summand].type, *round_.values(span.summand), span.begin, span.count,
                             span.offset});
        if (!parts.empty()) round_.gpus->begin(piece.wide, piece.bucket, std::move(parts));
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
        const std::vector<Piece::Span>& spans = piece_of(at).spans;
        const size_t begin = spans.empty() ? 0 : spans.back().summand, end = spans.empty() ? 0 : spans[0].summand + 1;
        const bool polls = need.of == Need::kGpus || (sums_.machines_ != nullptr && pipeline_.total < totalled_);
        sums_.wait(round_, begin, end, has_begun(round_) ? need : Need{}, seen, polls);
    }

    Sums& sums_;
    Segment& segment_;
    Round& round_;
    const std::vector<Piece> pieces_;
    Segment::Pipeline& pipeline_;
    const uint64_t first_, last_;  // pieces, counted over all rounds
    uint64_t totalled_;            // pieces that the leader has given to the other machines
};

Sums::Sums(Segment& machine, std::unique_ptr<Machines> machines, std::function<void(const std::string&)> leave)
    : segment_(machine),
      machines_(std::move(machines)),
      leave_(std::move(leave)),
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
void Sums::announce(const std::string& text) {
    segment_.check_open();
    if (machines_ != nullptr && decides()) machines_->announce(rounds_, text);
    const Ranks others = without(segment_.everybody, 0);
    segment_.post(Label::of_gradients(Label::kOrder, rounds_), text.data(), text.size(), others);
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

// Finds out which round is next in all processes, and makes it the current one if it has begun here.
void Sums::take_next(const Round& oldest) {
    if (told_.empty()) {
        const auto told = decides()              ? text_of(oldest)
                          : segment_.rank() == 0 ? machines_->announced(rounds_)
                                                 : segment_.take_bytes(0, Label::of_gradients(Label::kOrder, rounds_));
        if (!told) return;
        told_ = *told;
    }
    const int64_t channel = std::stoll(told_);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto next =
        std::find_if(queue_.begin(), queue_.end(), [&](const auto& round) { return round->channel == channel; });
    overtaken_ = next == queue_.begin() ? nullptr : queue_[0];
    if (next == queue_.end()) return;
    current_ = *next;
    queue_.erase(next);
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
    take_next(*oldest);
    if (current_ == nullptr) {
        const bool leads = segment_.rank() == 0, has_come = told_.empty() && has_begun(*oldest);
        const Need need = {!has_come ? Need::kOwn : leads ? Need::kMachines : Need::kLeader};
        return wait(*oldest, 0, oldest->summands.size(), need, seen, has_come && leads);
    }
    wait_.reset();
    if (segment_.rank() == 0) announce(told_);
    if (!decides()) compare(*current_, segment_.number_of(segment_.rank()), told_);
    ++rounds_;
    Pass(*this, *current_).run();
    told_.clear();
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
    leave_(failed ? segment_.reason_of(segment_.rank()) : reason.what());
    wait_.reset();
    overtaken_.reset();
    for (const auto& round : rounds) {
        if (round->gpus != nullptr) round->gpus->abort();
        round->fail(reason);
    }
}

}  // namespace syncbn
