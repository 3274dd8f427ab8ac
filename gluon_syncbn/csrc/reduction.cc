// What a meeting makes of what its replicas handed in.
#include <algorithm>
#include <cstring>

#include "rendezvous.h"

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

Vector Layer::reduce(const Meeting& meeting, const Phase& phase, Reduction reduction, bool through_hook) const {
    if (reduction == Reduction::kGather) return gather(meeting, phase, through_hook);
    const bool moments = reduction == Reduction::kMerge;
    std::vector<size_t> context_of;
    const auto entries = in_order(meeting, phase, &context_of);
    const size_t length = entries[0]->payload.size(), contexts = meeting.contexts.size();
    Vector total(length, 0.0);
    if (!through_hook) {
        for (const auto* entry : entries)
            if (moments)
                syncbn::merge_moments(&total, entry->payload);
            else
                add_to(total.data(), entry->payload);
        return total;
    }
    Vector rows(contexts * length, 0.0);
    for (size_t i = 0; i < entries.size(); ++i) {
        double* row = rows.data() + context_of[i] * length;
        if (moments)
            add_as_sums(row, entries[i]->payload);
        else
            add_to(row, entries[i]->payload);
    }
    total = add_through_hook(rows, contexts);
    return moments ? moments_from_sums(std::move(total)) : total;
}

Vector Layer::gather(const Meeting& meeting, const Phase& phase, bool through_hook) const {
    const size_t length = phase.entries[0].payload.size(), all = meeting.replicas() * length;
    const size_t contexts = through_hook ? meeting.contexts.size() : 1;
    Vector rows(contexts * all, 0.0);  // what others hold is 0, so that adding the rows puts the parts side by side
    for (size_t seat = 0; seat < phase.entries.size(); ++seat) {
        const size_t row = through_hook ? meeting.seats[seat].context : 0;
        const Vector& part = phase.entries[seat].payload;
        std::copy(part.begin(), part.end(), rows.begin() + row * all + meeting.rank(seat) * length);
    }
    return through_hook ? add_through_hook(rows, contexts) : rows;
}

Vector Layer::add_through_hook(const Vector& rows, size_t contexts) const {
    Vector total(rows.size() / contexts);
    char error[1024] = "";
    if (process().hook(id, static_cast<int64_t>(contexts), static_cast<int64_t>(total.size()), rows.data(),
                       total.data(), error, sizeof error) != 0)
        throw Failure("SyncBatchNorm '" + name + "': the KVStore could not add the statistics: " + error);
    return total;
}

}  // namespace syncbn
