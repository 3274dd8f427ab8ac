#include <unistd.h>
#include <future>

#include "exchange/sums.h"
#include "figures.h"
#include "random.h"
#include "runs.h"

namespace driver {
namespace {

constexpr size_t kRanks = 3, kChannels = 2;

// A rank of a job whose processes are threads here. It lasts as long as the process.
struct Rank {
    std::unique_ptr<syncbn::Segment> machine;
    std::unique_ptr<syncbn::Sums> sums;
};

std::vector<Rank>& ranks() {
    static auto& all = *[] {
        auto* made = new std::vector<Rank>(kRanks);
        for (size_t rank = 0; rank < kRanks; ++rank) {
            const int number = rank == 0 ? 0 : (*made)[0].machine->number();
            (*made)[rank].machine = std::make_unique<syncbn::Segment>(kRanks, rank, std::string(32, 'a'),
                                                                      "/proc/self/fd/" + std::to_string(number));
            const auto fail = [machine = (*made)[rank].machine.get()](const std::string& reason) {
                machine->report(syncbn::Segment::State::kFailed, reason);
            };
            (*made)[rank].sums = std::make_unique<syncbn::Sums>(*(*made)[rank].machine, nullptr, fail);
        }
        return made;
    }();
    return all;
}

// A round whose arrays become available one by one.
class Arrays : public syncbn::Round {
  public:
    Arrays(int64_t channel, int64_t number, const std::vector<size_t>& sizes, float value)
        : Round({channel, number, "", "an array (of a size)\n", 60, summands_of(sizes), nullptr}),
          here_(sizes.size(), false) {
        for (const size_t size : sizes) {
            memory_.emplace_back(size, value);
            places_.push_back({memory_.back().data()});
        }
    }
    void come(size_t index) {
        std::lock_guard<std::mutex> lock(mutex_);
        here_[index] = true;
    }
    const std::vector<void*>* values(size_t index) override {
        std::lock_guard<std::mutex> lock(mutex_);
        return here_[index] ? &places_[index] : nullptr;
    }
    void succeed() noexcept override { ended_.set_value(""); }
    void fail(const std::exception& reason) noexcept override { ended_.set_value(reason.what()); }

    void check(float total) {
        const std::string reason = ended_.get_future().get();
        expect(reason.empty(), "a sum ends well, not with '" + reason + "'");
        for (const std::vector<float>& values : memory_)
            expect(std::count(values.begin(), values.end(), total) == static_cast<long>(values.size()),
                   "each value is the sum of all ranks");
    }

  private:
    static std::vector<syncbn::Summand> summands_of(const std::vector<size_t>& sizes) {
        std::vector<syncbn::Summand> summands;
        for (const size_t size : sizes) summands.push_back({syncbn::Type::kFloat32, size});
        return summands;
    }

    std::mutex mutex_;
    std::vector<bool> here_;
    std::deque<std::vector<float>> memory_;
    std::vector<std::vector<void*>> places_;
    std::promise<std::string> ended_;
};

// What a rank does: its rounds in an order of its own, and their arrays, too.
void take_part(size_t rank, int64_t number, uint64_t seed, const std::vector<size_t>& sizes) {
    Random random(seed + rank);
    syncbn::Sums& sums = *ranks()[rank].sums;
    std::vector<std::shared_ptr<Arrays>> rounds;
    for (size_t i = 0; i < kChannels; ++i)
        rounds.push_back(std::make_shared<Arrays>(i, number, sizes, static_cast<float>(rank + 1 + i)));
    const size_t first = random.one_of<size_t>({0, 1});
    for (size_t i = 0; i < kChannels; ++i) sums.begin(rounds[(first + i) % kChannels]);
    for (size_t i = 0; i < sizes.size(); ++i)
        for (const auto& round : rounds) {
            round->come(first == 0 ? i : sizes.size() - 1 - i);
            sums.look();
        }
    for (size_t i = 0; i < kChannels; ++i) rounds[i]->check(static_cast<float>(6 + kRanks * i));
}

// Two threads report at once why a rank has failed: one reason stays, as it is.
void fail_at_once() {
    syncbn::Segment machine(1, 0, std::string(32, 'a'));
    std::vector<std::thread> threads;
    for (const char reason : {'a', 'b'})
        threads.emplace_back(
            [&machine, reason] { machine.report(syncbn::Segment::State::kFailed, std::string(1000, reason)); });
    for (std::thread& thread : threads) thread.join();
    const std::string kept = machine.reason_of(0);
    expect(kept == std::string(1000, kept[0]), "a reason is of one thread");
}

}  // namespace

void summing(Run& run) {
    static int64_t number = 0;
    do {
        fail_at_once();
        const std::vector<size_t> sizes = {3, run.random.one_of<size_t>({1, 100'000, 300'001}), 70'000, 1};
        const auto seed = static_cast<uint64_t>(number) * 100;
        std::vector<std::thread> threads;
        for (size_t rank = 0; rank < kRanks; ++rank) threads.emplace_back(take_part, rank, number, seed, sizes);
        for (std::thread& thread : threads) thread.join();
        ++number;
    } while (run.goes_on());
}

}  // namespace driver
