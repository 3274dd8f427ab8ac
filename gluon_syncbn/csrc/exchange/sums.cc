#include "exchange/sums.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "cpu/numbers.h"
#include "exchange/exchange.h"
#include "failure.h"
#include "point.h"
#include "waiting/step.h"
#include "waiting/wait.h"

namespace syncbn {
namespace {

constexpr double kSleep = std::chrono::duration<double>(kSlice).count();
constexpr double kPoll = 5e-5;  // seconds between two looks at a sum of machines
constexpr double kForEver = std::numeric_limits<double>::infinity();
constexpr size_t kLine = 64;  // bytes of a cache line

// Values of one type in memory of a machine: a sum is made in the type of parameters.
template <typename F>
void with_wide(Type type, const F& f) {
    if (type == Type::kFloat64) return f(static_cast<double*>(nullptr));
    f(static_cast<float*>(nullptr));
}

// Widens the values of an array, added up over the contexts.
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

// Gluon's names without its counters, which depend on what else a process has built.
std::string without_digits(const std::string& name) {
    std::string text;
    for (const char c : name)
        if (std::isdigit(static_cast<unsigned char>(c)) == 0) text += c;
    return text;
}

// A line for each array.
std::string lines_of(const Round& round) {
    std::string text;
    for (const Summand& summand : round.summands)
        text += without_digits(summand.name) + " " + name_of(summand.type) + " " + std::to_string(summand.size) + "\n";
    return text;
}

// FNV-1a.
uint64_t digest_of(const std::string& text) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    return hash;
}

// An array of this process has its whole name; another process writes only a line.
std::string in_words(const std::string& name, const std::string& line) {
    const size_t size = line.rfind(' '), type = line.rfind(' ', size - 1);
    return (name.empty() ? line.substr(0, type) : name) + " (" + line.substr(size + 1) + " values of " +
           line.substr(type + 1, size - type - 1) + ")";
}

// "the gradient of 'conv0_weight' and 12 more, round 3", for the arrays from `begin` to `end`.
std::string name_of(const Round& round, size_t begin, size_t end) {
    std::string text = begin < end ? round.summands[begin].name : "a step without gradients";
    if (end > begin + 1) text += " and " + std::to_string(end - begin - 1) + " more";
    return text + ", round " + std::to_string(round.number + 1);
}

// Tells the first difference between the lines of two ranks.
Failure disagreement(const Round& round, const std::string& own_rank, const std::string& own_lines,
                     const std::string& rank, const std::string& lines) {
    std::istringstream ours(own_lines), theirs(lines);
    std::string one, another;
    size_t at = 0;
    for (;; ++at) {
        if (!std::getline(ours, one)) one.clear();
        if (!std::getline(theirs, another)) another.clear();
        if (one != another || one.empty()) break;
    }
    const auto told = [&](const std::string& name, const std::string& line) {
        return line.empty() ? "none" : in_words(name, line);
    };
    return Failure("the processes disagree about their arrays in " + name_of(round, 0, round.summands.size()) +
                   ": number " + std::to_string(at + 1) + " is " +
                   told(one.empty() ? "" : round.summands[at].name, one) + " on rank " + own_rank + " and " +
                   told("", another) + " on rank " + rank +
                   ". Build and cast the same net in all processes, and freeze the same parameters (grad_req='null').");
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

// What this rank waits for: a count of some ranks. Without one, it waits for its own arrays.
struct Sums::Need {
    std::atomic<uint64_t> Segment::Lane::* count = nullptr;
    uint64_t least = 0;
    bool of_leader = false;    // alone
    bool of_machines = false;  // other ones
    bool of_gpus = false;      // NCCL

    bool waits() const { return count != nullptr || of_machines || of_gpus; }
    bool operator==(const Need& other) const {
        return count == other.count && least == other.least && of_machines == other.of_machines &&
               of_gpus == other.of_gpus;
    }
    std::vector<size_t> missing(const Segment& segment) const {
        std::vector<size_t> ranks;
        for (size_t rank = 0; count != nullptr && rank < (of_leader ? 1 : segment.ranks()); ++rank)
            if (segment.lane(rank).*count < least) ranks.push_back(rank);
        return ranks;
    }
};

class Sums::WaitForRanks final : public WaitInTier {
  public:
    WaitForRanks(const Sums& sums, std::string what, Need need, double timeout)
        : WaitInTier(sums.tier_, need.waits() ? timeout : kForEver),
          sums_(sums),
          segment_(sums.segment_),
          what_(std::move(what)),
          need_(need) {}

    const Need& need() const { return need_; }
    // Throws if a rank has failed, or has ended too early.
    void check_members() {
        check_own();
        for (size_t other = 0; other < segment_.ranks(); ++other) {
            const Segment::State state = segment_.state_of(other);
            if (state == Segment::State::kFailed || (state == Segment::State::kEnded && is_missing(other))) gone(other);
        }
    }
    // Sleeps until the bell has not rung `heard` times, or for a while; `polls`: only for a moment.
    void sleep(uint32_t heard, bool polls) {
        check_members();
        look();
        segment_.listen(heard, polls ? kPoll : kSleep);
    }

  protected:
    std::string name() const override { return what_; }
    void check_others() override {
        for (size_t other = 0; other < segment_.ranks(); ++other)
            if (segment_.died(other) != 0 && (need_.count == nullptr || is_missing(other))) gone(other);
        if (sums_.machines_ != nullptr) sums_.machines_->check();
    }
    std::string missing() const override {
        if (need_.of_gpus) return others(true) + " (over NCCL; NCCL_DEBUG=INFO shows what it does)";
        if (need_.of_machines) return others(false);
        std::string missing;
        for (size_t other : need_.missing(segment_)) missing += (missing.empty() ? "" : ", ") + tier_.rank(other);
        return missing + (need_.of_leader ? ", the leader of this machine," : "");
    }

  private:
    bool is_missing(size_t other) const {
        const std::vector<size_t> missing = need_.missing(segment_);
        return std::find(missing.begin(), missing.end(), other) != missing.end();
    }
    // The other ranks, the first few of them; those of this machine only if `all`.
    std::string others(bool all) const {
        constexpr size_t kFew = 8;
        const Ranks& members = tier_.members.ranks;
        const Ranks here = all ? Ranks{members[segment_.rank()]} : members;
        std::string ranks;
        size_t count = 0;
        for (size_t rank = 0; rank < tier_.members.of && count <= kFew; ++rank) {
            if (std::find(here.begin(), here.end(), rank) != here.end()) continue;
            if (++count > kFew)
                ranks += " or others";
            else
                ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
        }
        return ranks;
    }
    const Sums& sums_;
    Segment& segment_;
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
          lane_(segment_.lane(segment_.rank())),
          first_(lane_.out),
          last_(first_ + pieces_.size()),
          totalled_(first_) {}

    void run() {
        meet();
        while (lane_.out < last_) {
            const uint32_t heard = lane_.bell;
            Need need;
            if (goes_on(&need))
                sums_.wait_.reset();
            else
                wait(need, heard);
        }
        Need end;
        end.of_gpus = true;
        while (round_.gpus != nullptr && !round_.gpus->idle()) wait(end, lane_.bell);
    }

  private:
    using Count = std::atomic<uint64_t> Segment::Lane::*;

    // Compares what the processes bring.
    void meet() {
        lane_.digest = digest_of(lines_of(round_));
        advance(&Segment::Lane::rounds);
        wait_for({&Segment::Lane::rounds, lane_.rounds});
        for (size_t rank = 0; rank < segment_.ranks(); ++rank)
            if (segment_.lane(rank).digest != lane_.digest) return disagree();
    }

    // Each rank shows what it brings, and finds the first difference.
    [[noreturn]] void disagree() {
        const std::string text = lines_of(round_).substr(0, Segment::kPiece - 1);
        std::strcpy(segment_.piece(segment_.rank(), first_), text.c_str());
        advance(&Segment::Lane::in);
        wait_for({&Segment::Lane::in, first_ + 1});
        size_t other = 0;
        while (segment_.lane(other).digest == lane_.digest) ++other;
        const Tier& tier = sums_.tier_;
        throw disagreement(round_, tier.rank(segment_.rank()), text, tier.rank(other), segment_.piece(other, first_));
    }

    // Does what can be done next. Returns false, with the reason, if there is nothing.
    bool goes_on(Need* need) {
        const bool several = sums_.machines_ != nullptr || sums_.tier_.members.of > segment_.ranks();
        const Count complete = several ? &Segment::Lane::total : &Segment::Lane::added;
        const uint64_t out = lane_.out, added = lane_.added, in = lane_.in;
        const uint64_t completed = several ? segment_.lane(0).total.load() : everywhere(complete);
        const bool gpus_are_busy = out < completed && round_.gpus != nullptr && !round_.gpus->ready();
        if (out < completed && !gpus_are_busy) {
            if (round_.gpus != nullptr)
                sum_on_gpus(piece_of(out));
            else
                copy_out(out, several);
            advance(&Segment::Lane::out);
            return true;
        }
        if (sums_.machines_ != nullptr && totalled_ < everywhere(&Segment::Lane::added)) {
            join_parts(totalled_);
            const Piece& piece = piece_of(totalled_);
            sums_.machines_->begin(piece.wide, segment_.piece(0, totalled_),
                                   piece.bytes / static_cast<size_t>(size_of(piece.wide)));
            ++totalled_;
            return true;
        }
        if (sums_.machines_ != nullptr && lane_.total < totalled_ && sums_.machines_->done()) {
            advance(&Segment::Lane::total);
            return true;
        }
        if (added < everywhere(&Segment::Lane::in)) {
            add_part(added);
            advance(&Segment::Lane::added);
            return true;
        }
        const bool room = in < last_ && in < everywhere(&Segment::Lane::out) + Segment::kPieces;
        if (room && copy_in(in)) {
            advance(&Segment::Lane::in);
            return true;
        }
        if (gpus_are_busy)
            need->of_gpus = true;
        else if (added < in)
            *need = {&Segment::Lane::in, added + 1};
        else if (out < added && sums_.machines_ != nullptr && totalled_ == added)
            need->of_machines = true;
        else if (out < added)
            *need = {complete, out + 1, several && sums_.machines_ == nullptr};
        else if (in < last_ && !room)
            *need = {&Segment::Lane::out, in + 1 - Segment::kPieces};
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

    void add_part(uint64_t number) {
        SYNCBN_POINT("before_add_part");
        const Piece& piece = piece_of(number);
        const size_t ranks = segment_.ranks(), own = segment_.rank();
        const size_t begin = piece.part(own, ranks), end = piece.part(own + 1, ranks);
        with_wide(piece.wide, [&](auto* kind) {
            using Wide = std::remove_pointer_t<decltype(kind)>;
            constexpr size_t kStrip = 4096;  // bytes that stay in the nearest cache
            alignas(kLine) Wide sum[kStrip / sizeof(Wide)];
            for (size_t at = begin; at < end; at += kStrip) {
                const size_t bytes = std::min(kStrip, end - at), count = bytes / sizeof(Wide);
                std::memcpy(sum, segment_.piece(0, number) + at, bytes);
                for (size_t rank = 1; rank < ranks; ++rank) {
                    const auto* from = reinterpret_cast<const Wide*>(segment_.piece(rank, number) + at);
                    for (size_t i = 0; i < count; ++i) sum[i] += from[i];
                }
                std::memcpy(segment_.piece(own, number) + at, sum, bytes);
            }
        });
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
        uint64_t least = segment_.lane(0).*count;
        for (size_t rank = 1; rank < segment_.ranks(); ++rank)
            least = std::min(least, (segment_.lane(rank).*count).load());
        return least;
    }
    // The last rank to get there wakes the others. They wait for the leader alone, too.
    void advance(Count count) {
        const uint64_t now = ++(lane_.*count);
        const bool leads = segment_.rank() == 0 && (count == &Segment::Lane::total || count == &Segment::Lane::rounds);
        if (!leads && everywhere(count) < now) return;
        for (size_t rank = 0; rank < segment_.ranks(); ++rank)
            if (rank != segment_.rank()) segment_.ring(rank);
    }

    void wait_for(const Need& need) {
        while (true) {
            const uint32_t heard = lane_.bell;
            if (need.missing(segment_).empty()) break;
            wait(need, heard);
        }
        sums_.wait_.reset();
    }
    void wait(const Need& need, uint32_t heard) {
        const uint64_t at = std::min(lane_.out.load(), last_ - 1);
        const std::vector<Piece::Span>& spans = piece_of(at).spans;
        const size_t begin = spans.empty() ? 0 : spans.back().summand, end = spans.empty() ? 0 : spans[0].summand + 1;
        const bool polls = need.of_gpus || (sums_.machines_ != nullptr && lane_.total < totalled_);
        sums_.wait(round_, begin, end, has_begun(round_) ? need : Need{}, heard, polls);
    }

    Sums& sums_;
    Segment& segment_;
    Round& round_;
    const std::vector<Piece> pieces_;
    Segment::Lane& lane_;
    const uint64_t first_, last_;  // pieces, counted over all rounds
    uint64_t totalled_;            // pieces that the leader has given to the other machines
};

Sums::Sums(Tier& machine) : tier_(machine), segment_(static_cast<Segment&>(*machine.mail)) {}

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

void Sums::look() { segment_.ring(segment_.rank()); }

void Sums::serve() noexcept {
    while (true) {
        try {
            serve_next();
        } catch (const std::exception& reason) {
            give_up(reason);
        }
    }
}

// Finds the round that is next in all processes. Null if nobody has said it yet, or it has not begun here. `oldest` has
// begun, and waits for what `need` says.
std::shared_ptr<Round> Sums::next(std::shared_ptr<Round>* oldest, Need* need) {
    std::vector<std::shared_ptr<Round>> queue;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        queue.assign(queue_.begin(), queue_.end());
    }
    if (queue.empty()) return nullptr;
    *oldest = queue[0];
    int64_t channel = queue[0]->channel;
    if (segment_.rank() != 0) {
        const uint64_t rounds = segment_.lane(segment_.rank()).rounds;
        if (segment_.lane(0).rounds == rounds) {
            *need = {&Segment::Lane::rounds, rounds + 1, true};
            return nullptr;
        }
        channel = segment_.lane(0).channel;
    } else if (machines_ != nullptr && !machines_->is_first()) {
        if (!told_ && has_begun(*queue[0])) {
            told_ = machines_->announced();
            need->of_machines = !told_;
        }
        if (!told_) return nullptr;
        channel = told_->channel;
    }
    for (const auto& round : queue)
        if (round->channel == channel) return round;
    return nullptr;
}

// Sleeps for a while, in the arrays of a round from `begin` to `end`. The same wait goes on while the need is the same.
void Sums::wait(Round& round, size_t begin, size_t end, const Need& need, uint32_t heard, bool polls) {
    if (wait_ == nullptr || !(wait_->need() == need))
        wait_ = std::make_unique<WaitForRanks>(*this, name_of(round, begin, end), need, round.timeout);
    wait_->sleep(heard, polls);
}

// Runs the next round, or sleeps for a while.
void Sums::serve_next() {
    Segment::Lane& own = segment_.lane(segment_.rank());
    const uint32_t heard = own.bell;
    Need need;
    std::shared_ptr<Round> oldest;
    const std::shared_ptr<Round> round = next(&oldest, &need);
    if (round != nullptr) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            current_ = round;
            queue_.erase(std::find(queue_.begin(), queue_.end(), round));
        }
        wait_.reset();
        if (machines_ != nullptr) announce(*round);
        if (segment_.rank() == 0) own.channel = round->channel;
        Pass(*this, *round).run();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            current_.reset();
        }
        round->succeed();
    } else if (need.waits() && has_begun(*oldest)) {
        wait(*oldest, 0, oldest->summands.size(), need, heard, need.of_machines);
    } else {
        wait_.reset();
        segment_.listen(heard, kSleep);
    }
}

// In a leader: tells the other leaders what is next, or compares it with what they were told.
void Sums::announce(const Round& round) {
    const std::string ours = lines_of(round);
    if (machines_->is_first()) return machines_->announce({round.channel, ours});
    const std::string theirs = std::exchange(told_, std::nullopt)->arrays;
    if (ours != theirs) throw disagreement(round, tier_.rank(segment_.rank()), ours, "0", theirs);
}

// Everything that this process has begun fails, and what it begins later.
void Sums::give_up(const std::exception& reason) noexcept {
    step().fail(reason);
    segment_.leave(Segment::State::kFailed, reason.what());
    if (machines_ != nullptr) machines_->fail(reason.what());
    std::vector<std::shared_ptr<Round>> rounds;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (current_ != nullptr) rounds.push_back(std::move(current_));
        rounds.insert(rounds.end(), queue_.begin(), queue_.end());
        queue_.clear();
    }
    wait_.reset();
    for (const auto& round : rounds) {
        if (round->gpus != nullptr) round->gpus->abort();
        round->fail(reason);
    }
}

}  // namespace syncbn
