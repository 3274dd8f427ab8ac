#include "exchange/nccl.h"

#include <condition_variable>
#include <map>
#include <mutex>

#include "cuda/collective.h"
#include "exchange/rows.h"
#include "failure.h"
#include "waiting/wait.h"

namespace syncbn {
namespace {

// Orders the collectives with other processes by their numbers.
class Queue {
  public:
    // Returns when it is this collective's turn.
    void wait(const Turn& turn, const Ticket& ticket) {
        std::unique_lock<std::mutex> lock(mutex_);
        const std::string number = std::to_string(turn.number), now = std::to_string(next_[turn.channel]);
        WaitFor wait(ticket.name, "collective " + number + " of this process has waited for number " + now,
                     ticket.timeout, "A layer that comes before it has not called all its replicas.");
        while (!changed_.wait_for(lock, kSlice, [&] { return next_[turn.channel] == turn.number; })) wait.look();
    }
    // Marks the collective as posted. Otherwise all later ones stay blocked, because processes could not tell them
    // apart.
    void pass(const Turn& turn) {
        std::lock_guard<std::mutex> lock(mutex_);
        next_[turn.channel] = turn.number + 1;
        changed_.notify_all();
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<int64_t, int64_t> next_;  // by channel
};
Queue& queue = *new Queue;

class Nccl : public Exchange {
  public:
    Nccl(size_t replicas, std::shared_ptr<Exchange> processes, Sharing sharing)
        : replicas_(replicas), gathers_rows_(sharing == Sharing::kRows), processes_(std::move(processes)) {}

    bool spans_processes() const override { return processes_ != nullptr; }
    Form form() const override { return Form::kDevice; }
    size_t replicas() const override { return replicas_; }

    Total allgather(const Ticket& ticket, const DeviceContribution& own) override {
        if (!spans_processes()) {
            if (replicas_ > 1) post(ticket, own, own.counts, {});
            return {own.counts, 0, ticket.layer};
        }
        Turn turn = processes_->turn(ticket, own);
        if (turn.world > replicas_)
            throw Failure("a step with " + std::to_string(turn.world) + " GPUs, where the processes have agreed on " +
                          std::to_string(replicas_) + ": start the job again after `reset_ctx`.");
        if (turn.number >= 0)
            post_in_turn(ticket, own, turn);
        else if (replicas_ > 1)  // of a single GPU, too: its kernels read what a collective has written
            post(ticket, own, turn.counts, {});
        const size_t mine = turn.first * (turn.counts.size() / turn.world);
        return {std::move(turn.counts), mine, turn.key, std::move(turn.groups)};
    }
    void check(const Ticket& ticket) override {
        if (spans_processes()) processes_->check(ticket);
    }

  private:
    // `counts` are those of all replicas.
    void post(const Ticket& ticket, const DeviceContribution& own, const Vector& counts,
              const cuda::Clique& clique) const {
        using cuda::Collective;
        cuda::Operation operation{gathers_rows_ ? Collective::kAllReduce : Collective::kAllGather};
        if (gathers_rows_) {
            const std::vector<RowsHead> heads = heads_of(counts);
            first_row_of(heads, 0);  // throws before a device writes beyond its memory
            if (heads[0].expected * heads[0].values == 0) return;
            if (ticket.phase == 0) operation.what = Collective::kAllGatherBytes;
            for (const RowsHead& head : heads) operation.bytes.push_back(static_cast<size_t>(head.bytes()));
        }
        cuda::post_collective(operation, own.parts, clique, ticket.name, ticket.timeout, ticket.interrupts);
    }
    void post_in_turn(const Ticket& ticket, const DeviceContribution& own, const Turn& turn) const {
        queue.wait(turn, ticket);
        post(ticket, own, turn.counts, {turn.channel, turn.clique, turn.world, turn.first, turn.id});
        queue.pass(turn);
    }

    const size_t replicas_;
    const bool gathers_rows_;
    const std::shared_ptr<Exchange> processes_;
};

}  // namespace

std::shared_ptr<Exchange> nccl_exchange(size_t replicas, std::shared_ptr<Exchange> processes, Sharing sharing) {
    return std::make_shared<Nccl>(replicas, std::move(processes), sharing);
}

}  // namespace syncbn
