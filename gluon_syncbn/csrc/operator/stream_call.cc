#include "operator/stream_call.h"

#include <chrono>
#include <thread>
#include <utility>

#include "clock.h"

namespace syncbn {
namespace {

constexpr double kGrace = 2;    // seconds that a stream gets to end after its collective has been ended
constexpr double kSpin = 1e-3;  // seconds in which a stream is polled without a pause
constexpr auto kPause = std::chrono::microseconds(20);
constexpr auto kLongPause = std::chrono::milliseconds(1);
constexpr double kWatchAfter = 0.05;  // seconds after which a wait checks for other reasons to end

}  // namespace

void StreamCall::fill(Array to, Type type, int64_t n, double value) {
    run_on_each(kernel_of("fill", type), n, cuda::FillArguments{n, data(to), value});
}

void StreamCall::fill_with_zeros(Array to, int64_t bytes) {
    cuda::fill_with_zeros(data(to), bytes, work().lease.stream());
}

void StreamCall::contribute_part(Direction direction, Vector counts) {
    const cuda::Memory& own = gathered_->own;
    gathered_->part = {device().id, work().lease.stream(), own.data(), gathered_->all.data(), own.size()};
    may_be_posted_ = true;
    const std::shared_ptr<const cuda::OnDevice> part(gathered_, &gathered_->part);
    still_current([&] { contribute(direction, std::move(counts), part); });
}

Vector StreamCall::downloaded(const cuda::Memory& from) {
    Vector values(static_cast<size_t>(from.size()));
    wait();
    if (!values.empty()) from.download(values.data(), work().lease);
    return values;
}

bool StreamCall::idle_within(double limit) const {
    for (const double end = seconds() + limit; !work_->lease.idle(); std::this_thread::sleep_for(kPause))
        if (seconds() > end) return false;
    return true;
}

std::unique_ptr<Wait> StreamCall::wait_for_gpu() {
    const auto terms = node_.layer->terms();
    return std::make_unique<WaitFor>(
        terms->name, "the GPU has not finished", terms->timeout,
        "Either a GPU of this layer is lost (nvidia-smi), or another user of NCCL in this process waits for the same "
        "GPUs. NCCL_DEBUG=INFO shows what NCCL does. configure(kvstore='host') avoids NCCL.");
}

// Polls instead of waiting in the driver: that wait would not end if a collective hangs.
void StreamCall::wait() {
    const double start = seconds();
    std::unique_ptr<Wait> wait;
    while (!work_->lease.idle()) {
        const double waited = seconds() - start;
        if (waited < kSpin) {
            std::this_thread::yield();
            continue;
        }
        std::this_thread::sleep_for(waited < kWatchAfter ? std::chrono::microseconds(kPause) : kLongPause);
        if (waited < kWatchAfter) continue;
        if (!wait) wait = wait_for_gpu();
        wait->look();
    }
}

void StreamCall::finish() {
    exchange_ = nullptr;
    scratch_.clear();
    gathered_.reset();
    work_.reset();
}

void StreamCall::clear_up() {
    exchange_ = nullptr;
    if (!work_) return;
    work_->lease.findings()->given_up = 1;
    bool idle = false;
    try {
        idle = idle_within(kWatchAfter);
        if (!idle) {
            cuda::abort_collectives(device().id);
            idle = idle_within(kGrace);
        }
    } catch (const Failure&) {  // the device's own error is reported already
    }
    if (!idle || may_be_posted_) {
        work_->lease.abandon();
        for (cuda::Memory& one : scratch_) one.abandon();
        if (gathered_) {
            gathered_->own.abandon();
            gathered_->all.abandon();
        }
        abandon();
    }
    may_be_posted_ = false;
    scratch_.clear();
    gathered_.reset();
    work_.reset();
}

}  // namespace syncbn
