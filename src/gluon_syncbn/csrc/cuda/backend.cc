// The kernels of kernels.cu on MXNet's arrays. Whole tensors stay on the device; what the replicas exchange, a few
// numbers per channel, comes to the host, where one meeting serves every kind of device.
#include <algorithm>
#include <memory>

#include "backend.h"
#include "cuda/module.h"
#include "cuda/plan.h"
#include "pooling/statistics.h"

namespace syncbn {
namespace {

using cuda::ceil_div;
using cuda::Doubles;
using cuda::in;
using cuda::kBlock;
using cuda::launch;
using cuda::out;
using cuda::Plan;

std::string named(const char* kernel, Type type) { return std::string(kernel) + "_" + name_of(type); }

Plan plan_of(const Tensor& tensor) {
    return Plan(tensor.shape, tensor.samples, static_cast<int64_t>(tensor.slots.size()));
}

class CudaBackend : public Backend {
  public:
    explicit CudaBackend(int device) : device_(device) {}

    Vector moments(Array x, const Tensor& tensor) override {
        statistics_.reset();
        const int64_t channels = tensor.shape.channels;
        const size_t length = moments_length(channels);
        Vector packed(tensor.slots.size() * length, 0.0);
        if (tensor.shape.size() == 0) return packed;
        const Plan plan = plan_of(tensor);
        Doubles partial(device_, plan.chunks * plan.slots * 3 * channels);
        launch(named("moments", tensor.type), device_, plan.reduce(),
               {in(x, tensor.type), out(partial.handle(), Type::kFloat64), plan.samples, plan.per_sample, channels,
                tensor.shape.inner, plan.slots, plan.width});
        Vector parts(plan.chunks * plan.slots * 3 * channels);
        partial.download(parts.data());
        const double* count = parts.data();
        for (int64_t chunk = 0; chunk < plan.chunks; ++chunk)
            for (int64_t slot = 0; slot < plan.slots; ++slot, count += 3 * channels)
                merge(&packed[slot * length], count, channels);
        return packed;
    }

    Statistic frozen(Array running_mean, Array running_var, const Tensor& tensor, double epsilon) override {
        const int64_t channels = tensor.shape.channels;
        const Type type = tensor.parameter_type();
        statistics_ = std::make_unique<Doubles>(device_, 2 * channels);
        launch(named("frozen", type), device_, {ceil_div(channels, kBlock)},
               {in(running_mean, type), in(running_var, type), epsilon, out(statistics_->handle(), Type::kFloat64),
                channels});
        return {1, {}, {}};
    }

    void normalise(Array x, const Tensor& tensor, const Affine& affine, Array y, bool add) override {
        if (tensor.shape.size() == 0) return;
        const Plan plan = plan_of(tensor);
        const Type parameter = tensor.parameter_type();
        launch(named("normalise", tensor.type), device_, plan.each(),
               {in(x, tensor.type), in(statistics(tensor), Type::kFloat64), in(affine.gamma, parameter),
                in(affine.beta, parameter), affine.fix_gamma, out(y, tensor.type), add, plan.samples, plan.per_sample,
                tensor.shape.channels, tensor.shape.inner, plan.slots, plan.width, plan.segment});
    }

    void update_running(const Vector& mean, const Vector& variance, double momentum, Type type, Array running_mean,
                        Array running_var) override {
        const int64_t channels = static_cast<int64_t>(mean.size());
        Vector both(mean);
        both.insert(both.end(), variance.begin(), variance.end());
        Doubles batch(device_, 2 * channels);
        batch.upload(both.data());
        launch(
            named("update_running", type), device_, {ceil_div(channels, kBlock)},
            {in(batch.handle(), Type::kFloat64), momentum, out(running_mean, type), out(running_var, type), channels});
    }

    Vector grad_sums(Array dy, Array x, const Tensor& tensor) override {
        const int64_t channels = tensor.shape.channels;
        Vector sums(tensor.slots.size() * 2 * channels, 0.0);
        if (tensor.shape.size() == 0) return sums;
        const Plan plan = plan_of(tensor);
        const int64_t size = plan.slots * 2 * channels;
        Doubles partial(device_, plan.chunks * size);
        launch(named("grad_sums", tensor.type), device_, plan.reduce(),
               {in(dy, tensor.type), in(x, tensor.type), in(statistics(tensor), Type::kFloat64),
                out(partial.handle(), Type::kFloat64), plan.samples, plan.per_sample, channels, tensor.shape.inner,
                plan.slots, plan.width});
        Vector parts(plan.chunks * size);
        partial.download(parts.data());
        for (size_t i = 0; i < parts.size(); ++i) sums[i % sums.size()] += parts[i];
        return sums;
    }

    void grad_input(Array dy, Array x, const Tensor& tensor, const Affine& affine, const ThroughStatistics& through,
                    Array dx, bool add) override {
        if (tensor.shape.size() == 0) return;
        const Plan plan = plan_of(tensor);
        const int64_t channels = tensor.shape.channels;
        Vector packed(plan.slots * 3 * channels, 0.0);
        for (int64_t slot = 0; slot < plan.slots; ++slot) {
            double* to = &packed[slot * 3 * channels];
            const auto& fed = tensor.slots[slot].fed;
            if (fed) std::copy(fed->mean.begin(), fed->mean.end(), to);  // frozen ones have a slope of 0
            std::copy_n(&through.mean_dy[slot * channels], channels, to + channels);
            std::copy_n(&through.slope[slot * channels], channels, to + 2 * channels);
        }
        Doubles staged(device_, plan.slots * 3 * channels);
        staged.upload(packed.data());
        launch(named("grad_input", tensor.type), device_, plan.each(),
               {in(dy, tensor.type), in(x, tensor.type), in(statistics(tensor), Type::kFloat64),
                in(staged.handle(), Type::kFloat64), in(affine.gamma, tensor.parameter_type()), affine.fix_gamma,
                out(dx, tensor.type), add, plan.samples, plan.per_sample, channels, tensor.shape.inner, plan.slots,
                plan.width, plan.segment});
    }

    void copy(Array from, Type type, int64_t n, Array to, bool add) override {
        if (n > 0) launch(named("copy", type), device_, {ceil_div(n, kBlock)}, {in(from, type), out(to, type), add, n});
    }

    Vector read(Array from, int64_t n) override {
        Vector values(n);
        cuda::read(from, values.data(), n);
        return values;
    }

    void write(const Vector& values, Type type, Array to, bool add) override {
        const int64_t n = static_cast<int64_t>(values.size());
        Doubles staged(device_, n);
        staged.upload(values.data());
        launch(named("write", type), device_, {ceil_div(n, kBlock)},
               {in(staged.handle(), Type::kFloat64), out(to, type), add, n});
    }

    void fill(Array to, Type type, int64_t n, double value) override {
        if (n > 0) launch(named("fill", type), device_, {ceil_div(n, kBlock)}, {out(to, type), value, n});
    }

  private:
    // Packed moments grow by the partial [count[C], mean[C], m2[C]], whose counts are all the same.
    static void merge(double* packed, const double* part, int64_t channels) {
        Vector more{part[0]};
        more.insert(more.end(), part + channels, part + 3 * channels);
        merge_moments(packed, more.data(), channels);
    }

    // [slots][2][channels] of what each slot uses; kept for the backward.
    void* statistics(const Tensor& tensor) {
        if (statistics_) return statistics_->handle();
        const int64_t channels = tensor.shape.channels;
        Vector packed(tensor.slots.size() * 2 * channels, 0.0);
        for (size_t i = 0; i < tensor.slots.size(); ++i) {
            if (!tensor.slots[i].used) continue;
            std::copy_n(tensor.slots[i].used->mean.begin(), channels, &packed[i * 2 * channels]);
            std::copy_n(tensor.slots[i].used->invstd.begin(), channels, &packed[i * 2 * channels + channels]);
        }
        statistics_ = std::make_unique<Doubles>(device_, static_cast<int64_t>(packed.size()));
        statistics_->upload(packed.data());
        return statistics_->handle();
    }

    const int device_;
    std::unique_ptr<Doubles> statistics_;
};

}  // namespace

std::unique_ptr<Backend> cuda_backend(int device) { return std::make_unique<CudaBackend>(device); }

}  // namespace syncbn
