#include "meeting/turn.h"

#include <stdexcept>

namespace syncbn {
namespace {

// What the hook is asked for beside reductions.
enum Question : int { kSpread = 3, kTurn = 4, kLook = 5 };

Total ask(Question question, const Ticket& ticket, const Vector& rows, size_t count, Hook hook) {
    try {
        return through(hook, ticket, question, rows, count);
    } catch (const std::exception& e) {
        throw std::runtime_error(std::string("the KVStore could not bring the statistics together: ") + e.what());
    }
}

}  // namespace

int64_t spread_of(const Ticket& ticket, Hook hook) {
    return static_cast<int64_t>(ask(kSpread, ticket, {0}, 1, hook).values[0]);
}

Turn turn_of(const Ticket& ticket, const std::vector<OnDevice>& parts, const Vector& counts, Hook hook) {
    const size_t slots = counts.size() / parts.size();
    Vector rows;  // [parts][device, counts of the slots]
    for (size_t i = 0; i < parts.size(); ++i) {
        rows.push_back(parts[i].device);
        rows.insert(rows.end(), counts.begin() + static_cast<int64_t>(i * slots),
                    counts.begin() + static_cast<int64_t>((i + 1) * slots));
    }
    // [channel, number, clique, world, first, bytes of the id][id][counts]
    const Total answer = ask(kTurn, ticket, rows, parts.size(), hook);
    const double* at = answer.values.data();
    Turn turn;
    turn.key = answer.key;
    turn.channel = static_cast<int64_t>(at[0]);
    turn.number = static_cast<int64_t>(at[1]);
    turn.clique = static_cast<int64_t>(at[2]);
    turn.world = static_cast<size_t>(at[3]);
    turn.first = static_cast<size_t>(at[4]);
    const double *id = at + 6, *rest = id + static_cast<size_t>(at[5]);
    for (; id != rest; ++id) turn.id.push_back(static_cast<char>(static_cast<unsigned char>(*id)));
    turn.counts.assign(rest, at + answer.values.size());
    if (turn.counts.size() != turn.world * slots)
        throw std::runtime_error("the replicas of the processes have different numbers of virtual devices");
    return turn;
}

void look_out(const Ticket& ticket, Hook hook) { ask(kLook, ticket, {0}, 1, hook); }

}  // namespace syncbn
