#include "../support/threads_mpi.h"
#include "exchange/processes.h"
#include "step.h"

namespace driver {
namespace {

constexpr size_t kRanks = 3, kTrainers = 2;

// The ranks of a job. They last as long as the process.
std::vector<std::unique_ptr<syncbn::Processes>>& ranks() {
    static auto& all = *[] {
        auto* made = new std::vector<std::unique_ptr<syncbn::Processes>>;
        MpiJob* const job = threads_mpi_job(kRanks);
        for (size_t rank = 0; rank < kRanks; ++rank) {
            Mpi mpi;
            threads_mpi_of(job, rank, &mpi);
            made->push_back(std::make_unique<syncbn::Processes>(mpi, rank, kRanks));
            for (size_t i = 0; i < kTrainers; ++i) made->back()->gradients().add_trainer();
        }
        return made;
    }();
    return all;
}

// A round whose arrays become available one by one.
class Arrays {
  public:
    const std::shared_ptr<syncbn::Gradients::Round> round;

    Arrays(syncbn::Gradients& gradients, int64_t trainer, const std::vector<size_t>& sizes, float value)
        : round(std::make_shared<syncbn::Gradients::Round>(
              gradients, syncbn::Brought{trainer, "", list_of(sizes), 60, summands_of(sizes)})) {
        for (const size_t size : sizes) memory_.emplace_back(size, value);
        ended_.resize(sizes.size());
    }
    void come(size_t index) {
        round->come(index, {memory_[index].data()}, [this, index](const std::exception_ptr& failure) {
            failure == nullptr ? ended_[index].set_value() : ended_[index].set_exception(failure);
        });
    }

    void check(float total) {
        for (std::promise<void>& one : ended_) one.get_future().get();  // throws what has failed
        for (const std::vector<float>& values : memory_)
            expect(std::count(values.begin(), values.end(), total) == static_cast<long>(values.size()),
                   "each value is the sum of all ranks");
    }

  private:
    static std::string list_of(const std::vector<size_t>& sizes) {
        std::string list;
        for (const size_t size : sizes) list += "an array (" + std::to_string(size) + " values)\n";
        return list;
    }
    static std::vector<syncbn::Summand> summands_of(const std::vector<size_t>& sizes) {
        std::vector<syncbn::Summand> summands;
        for (const size_t size : sizes) summands.push_back({syncbn::Type::kFloat32, size});
        return summands;
    }

    std::deque<std::vector<float>> memory_;
    std::vector<std::promise<void>> ended_;  // of each array
};

// What a rank does: its rounds in an order of its own, and their arrays, too.
void take_part(size_t rank, uint64_t seed, const std::vector<size_t>& sizes) {
    Random random(seed + rank);
    syncbn::Gradients& gradients = ranks()[rank]->gradients();
    std::deque<Arrays> rounds;
    for (size_t i = 0; i < kTrainers; ++i)
        rounds.emplace_back(gradients, i + 1, sizes, static_cast<float>(rank + 1 + i));
    const size_t first = random.one_of<size_t>({0, 1});
    for (size_t i = 0; i < kTrainers; ++i) gradients.begin(rounds[(first + i) % kTrainers].round);
    for (size_t i = 0; i < sizes.size(); ++i)
        for (Arrays& one : rounds) one.come(first == 0 ? i : sizes.size() - 1 - i);
    for (size_t i = 0; i < kTrainers; ++i) rounds[i].check(static_cast<float>(6 + kRanks * i));
}

// Two threads report at once why a rank has failed: one reason stays, as it is.
void fail_at_once() {
    Mpi mpi;
    threads_mpi_of(threads_mpi_job(1), 0, &mpi);
    syncbn::Mailbox mail(mpi, 0, 1);
    std::vector<std::thread> threads;
    for (const char reason : {'a', 'b'})
        threads.emplace_back(
            [&mail, reason] { mail.report(syncbn::Mailbox::State::kFailed, std::string(1000, reason)); });
    for (std::thread& thread : threads) thread.join();
    const std::string kept = mail.reason_of(0);
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
        for (size_t rank = 0; rank < kRanks; ++rank) threads.emplace_back(take_part, rank, seed, sizes);
        for (std::thread& thread : threads) thread.join();
        ++number;
    } while (run.goes_on());
}

}  // namespace driver
