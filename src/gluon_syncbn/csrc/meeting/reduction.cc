// What a meeting makes of what its replicas handed in.
#include <algorithm>
#include <cstring>

#include "meeting/rendezvous.h"

namespace syncbn {

// Order of the replicas: by context, and on one context by what they bring, because there the order of the
// calls says nothing. So the bits of the result do not depend on who came first.
static std::vector<const Phase::Entry*> in_order(const Meeting& meeting, const Phase& phase,
                                                 std::vector<size_t>* contexts) {
    std::vector<size_t> seats(meeting.seats.size());
    for (size_t i = 0; i < seats.size(); ++i) seats[i] = i;
    std::sort(seats.begin(), seats.end(), [&](size_t a, size_t b) {
        const size_t ca = meeting.seats[a].context, cb = meeting.seats[b].context;
        if (ca != cb) return ca < cb;
        const Vector &pa = phase.entries[a].payload, &pb = phase.entries[b].payload;
        return std::memcmp(pa.data(), pb.data(), std::min(pa.size(), pb.size()) * sizeof(double)) < 0;
    });
    std::vector<const Phase::Entry*> out;
    for (size_t seat : seats) {
        out.push_back(&phase.entries[seat]);
        contexts->push_back(meeting.seats[seat].context);
    }
    return out;
}

Total Layer::reduce(const Meeting& meeting, int phase_number, Reduction reduction, Reach reach, Hook hook) const {
    if (reduction == Reduction::kGather) return gather(meeting, phase_number, reach, hook);
    const Phase& phase = meeting.phases.at(phase_number);
    std::vector<size_t> context_of;
    const auto entries = in_order(meeting, phase, &context_of);
    const size_t length = entries[0]->payload.size(), contexts = meeting.contexts.size();
    const auto put = [&](double* total, const Vector& part) {
        if (reduction == Reduction::kMerge)
            syncbn::merge_moments(total, part.data(), static_cast<int64_t>(length / 2));  // 1 + 2 * channels
        else
            add_to(total, part);
    };
    if (reach == kMemory || (reach == kContexts && contexts == 1)) {
        Vector total(length, 0.0);
        for (const auto* entry : entries) put(total.data(), entry->payload);
        return {std::move(total), 0, id};
    }
    Vector rows(contexts * length, 0.0);
    for (size_t i = 0; i < entries.size(); ++i) put(rows.data() + context_of[i] * length, entries[i]->payload);
    return through(hook, meeting, phase_number, reduction, rows, contexts);
}

Total Layer::gather(const Meeting& meeting, int phase_number, Reach reach, Hook hook) const {
    const Phase& phase = meeting.phases.at(phase_number);
    const size_t length = phase.entries[0].payload.size();
    Vector all(meeting.replicas() * length);
    for (size_t seat = 0; seat < phase.entries.size(); ++seat) {
        const Vector& part = phase.entries[seat].payload;
        std::copy(part.begin(), part.end(), all.begin() + meeting.rank(seat) * length);
    }
    if (reach != kProcesses) return {std::move(all), 0, id};  // they are side by side already
    return through(hook, meeting, phase_number, Reduction::kGather, all, 1);
}

Total Layer::through(Hook hook, const Meeting& meeting, int phase, Reduction reduction, const Vector& rows,
                     size_t count) const {
    const Ticket ticket{id, meeting.draw.node, meeting.draw.call, phase};
    Total total;
    char error[1024] = "";
    if (hook(&ticket, static_cast<int>(reduction), static_cast<int64_t>(count),
             static_cast<int64_t>(rows.size() / count), rows.data(), &total, error, sizeof error) != 0)
        throw Failure("SyncBatchNorm '" + name + "': the KVStore could not add the statistics: " + error);
    return total;
}

}  // namespace syncbn
