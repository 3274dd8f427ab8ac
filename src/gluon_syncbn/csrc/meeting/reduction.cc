#include "meeting/reduction.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pooling/statistics.h"

namespace syncbn {

Total through(Hook hook, const Ticket& ticket, int reduction, const Vector& rows, size_t count) {
    Total total;
    char error[1024] = "";
    if (hook(&ticket, reduction, static_cast<int64_t>(count), static_cast<int64_t>(rows.size() / count), rows.data(),
             &total, error, sizeof error) != 0)
        throw std::runtime_error(error);
    return total;
}

Total reduce(Reduction reduction, std::vector<Part> parts, size_t contexts, int64_t channels, const Ticket& ticket,
             Reach reach, Hook hook) {
    const size_t length = parts[0].values->size();
    if (reduction == Reduction::kGather) {
        Vector all(parts.size() * length);
        for (const Part& part : parts)
            std::copy(part.values->begin(), part.values->end(), all.begin() + static_cast<int64_t>(part.rank * length));
        if (reach != Reach::kProcesses) return {std::move(all), 0, ticket.layer};  // they are side by side already
        return through(hook, ticket, static_cast<int>(reduction), all, 1);
    }
    // Among the replicas of one context the order of the calls says nothing, so what they bring decides.
    std::sort(parts.begin(), parts.end(), [&](const Part& a, const Part& b) {
        if (a.context != b.context) return a.context < b.context;
        return std::memcmp(a.values->data(), b.values->data(), length * sizeof(double)) < 0;
    });
    const auto put = [&](double* total, const Vector& part) {
        if (reduction == Reduction::kMerge)
            merge_moments(total, part.data(), channels);
        else
            add_to(total, part.data(), static_cast<int64_t>(length));
    };
    if (!(reach == Reach::kProcesses || (reach == Reach::kContexts && contexts > 1))) {
        Vector total(length, 0.0);
        for (const Part& part : parts) put(total.data(), *part.values);
        return {std::move(total), 0, ticket.layer};
    }
    Vector rows(contexts * length, 0.0);
    for (const Part& part : parts) put(rows.data() + part.context * length, *part.values);
    return through(hook, ticket, static_cast<int>(reduction), rows, contexts);
}

}  // namespace syncbn
