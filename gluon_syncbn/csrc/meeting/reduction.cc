#include "meeting/reduction.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

#include "point.h"
#include "pooling/statistics.h"

namespace syncbn {
namespace {

constexpr int kAddOnDevices = 6;  // what the hook is asked for: behind reductions and the questions of meeting/turn.cc

Total by_store(Hook hook, const Ticket& ticket, int reduction, const Vector& rows, size_t count) {
    try {
        return through(hook, ticket, reduction, rows, count);
    } catch (const std::exception& e) {
        throw std::runtime_error(std::string("the KVStore could not add the statistics: ") + e.what());
    }
}

}  // namespace

Total through(Hook hook, const Ticket& ticket, int reduction, const Vector& rows, size_t count) {
    SYNCBN_POINT("before_exchange");
    Total total;
    char error[1024] = "";
    if (hook(&ticket, reduction, static_cast<int64_t>(count), static_cast<int64_t>(rows.size() / count), rows.data(),
             &total, error, sizeof error) != 0)
        throw std::runtime_error(error);
    SYNCBN_POINT("after_exchange");
    return total;
}

void add_on_devices(const std::vector<OnDevice>& parts, const Ticket& ticket, Hook hook) {
    // [parts][device, addresses, length]: integers in the place of numbers, with which nobody reckons
    Vector rows;
    for (const OnDevice& part : parts) {
        const int64_t row[] = {part.device, reinterpret_cast<int64_t>(part.own),
                               reinterpret_cast<int64_t>(part.gathered), part.length};
        rows.resize(rows.size() + std::size(row));
        std::memcpy(&rows[rows.size() - std::size(row)], row, sizeof row);
    }
    by_store(hook, ticket, kAddOnDevices, rows, parts.size());
}

Total reduce(Reduction reduction, std::vector<Part> parts, size_t contexts, int64_t channels, const Ticket& ticket,
             Reach reach, Hook hook) {
    const size_t length = parts[0].values->size();
    if (reduction == Reduction::kGather) {
        Vector all(parts.size() * length);
        for (const Part& part : parts)
            std::copy(part.values->begin(), part.values->end(), all.begin() + static_cast<int64_t>(part.rank * length));
        if (reach != Reach::kProcesses) return {std::move(all), 0, ticket.layer};  // they are side by side already
        return by_store(hook, ticket, static_cast<int>(reduction), all, 1);
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
    return by_store(hook, ticket, static_cast<int>(reduction), rows, contexts);
}

}  // namespace syncbn
