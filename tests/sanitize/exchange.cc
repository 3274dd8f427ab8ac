#include "../support/threads_mpi.h"
#include "driver.h"
#include "exchange/processes.h"

namespace driver {
namespace {

constexpr char kFault[] = "the cable is out";

std::atomic<int> failing{0};

bool fails() {
    int left = failing;
    while (left > 0)
        if (failing.compare_exchange_weak(left, left - 1)) return true;
    return false;
}

// Python's. Now and then it takes longer than a wait needs to look around.
bool add(const char*, const int64_t*, double, int64_t rows, int64_t length, const double* values, double* all) {
    static std::atomic<int> exchanges{0};
    const Within program(false);
    WaitForOthers wait;
    for (int i = 0; i < 3 && wait.looks(); ++i) pause(1e-4);
    if (++exchanges % 50 == 0) {
        pause(0.07);
        wait.looks();
    }
    if (fails()) {
        syncbn_failed_in_python(kFault);
        return false;
    }
    std::copy(values, values + rows * length, all);
    return true;
}

std::mutex& gathering_mutex = *new std::mutex;
std::set<int64_t>& gathering = *new std::set<int64_t>;  // for a thread that outlives main

Asked* in_memory = nullptr;
Asked* of_contexts = nullptr;
Asked* of_processes = nullptr;
std::atomic<Asked*> current{nullptr};  // the same, for threads of earlier ones

// Rank 1 answers each vector of rank 0 with an empty one, or with as many zeros, until rank 0 fails. It may fail itself.
void play_rank_1(syncbn::Mailbox& mail, const std::function<bool()>& failed) {
    double rest = 0;
    while (mail.state_of(0) == syncbn::Mailbox::State::kPresent) {
        rest = std::min(0.05, 1e-4 + 1.5 * rest);  // a process that polls without a rest never looks idle
        mail.arrivals();
        for (const syncbn::Label& label : mail.posted_by(0)) {
            rest = 0;
            const syncbn::Mailbox::Taken taken = mail.take(0, label);
            if (failed()) return mail.report(syncbn::Mailbox::State::kFailed, kFault);
            std::lock_guard<std::mutex> lock(gathering_mutex);
            const size_t size = gathering.count(label.key) != 0 ? 0 : taken.size;
            mail.post(label, std::string(size, 0).data(), size, {0});
        }
        pause(rest);
    }
}

void make_exchange_of_processes() {
    static auto& made = *new std::vector<Asked*>;  // all of them, so that none counts as lost
    MpiJob* const job = threads_mpi_job(2);
    Mpi mpi[2];
    for (size_t rank : {0, 1}) threads_mpi_of(job, rank, &mpi[rank]);
    of_processes = syncbn_processes(&mpi[0], 0, 2);
    made.push_back(of_processes);
    current = of_processes;
    std::thread([own = of_processes, rank_1 = std::make_shared<syncbn::Mailbox>(mpi[1], 1, 2)] {
        play_rank_1(*rank_1, [own] { return own == current && fails(); });
    }).detach();
}

}  // namespace

void gathers(int64_t layer) {
    std::lock_guard<std::mutex> lock(gathering_mutex);
    gathering.insert(layer);
}

void make_exchanges() {
    in_memory = syncbn_memory_exchange(0);
    of_contexts = syncbn_python_exchange(add, 0);
    make_exchange_of_processes();
}

void renew_exchanges() {
    auto& mail = static_cast<syncbn::Processes&>(*of_processes->host).mail();
    if (mail.state_of(0) != syncbn::Mailbox::State::kPresent) make_exchange_of_processes();
}

Asked* const* any_exchange(Random& random) {
    return random.one_of<Asked* const*>({&in_memory, &of_contexts, &of_processes});
}

Asked* const* exchange_in_memory() { return &in_memory; }

Asked* const* exchange_of_processes() { return &of_processes; }

void fail_exchanges(int count) { failing = count; }

}  // namespace driver
