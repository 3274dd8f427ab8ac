#include "meeting/rounds.h"

#include <algorithm>

#include "meeting/meeting.h"
#include "waiting/step.h"

namespace syncbn {
namespace {

void refuse(const Terms& terms, const std::string& context, Scope& caller, Scope& other) {
    if (step().failure() != nullptr) return;  // the call fails anyway, for the first reason
    std::string text;
    if (caller.thread == other.thread)
        text = "thread '" + caller.thread +
               "' calls the layer in a new step, while an earlier step of that thread has not " +
               "called all replicas. After a step that broke off, call gluon_syncbn.reset().";
    else
        text = "thread '" + caller.thread + "' calls the layer while it is in a step of thread '" + other.thread +
               "', and the replicas of the two would meet. Hold one lock around each whole step " +
               "(record, backward, update), or let each thread call one replica.";
    const Failure failure(terms.name, context, "", text);
    caller.end(failure);
    other.end(failure);
    step().fail(failure);
    throw Failure(failure);
}

}  // namespace

bool Rounds::Round::settled() const {
    if (missing > 0) return false;
    const bool one = std::all_of(callers.begin(), callers.end(), [&](const auto& c) { return c == callers[0]; });
    return one || std::none_of(callers.begin(), callers.end(), [](const auto& c) { return c && c->open; });
}

void Rounds::add(const Terms& terms, const std::string& context, int64_t node, const std::shared_ptr<Scope>& scope) {
    const auto place = std::find(terms.contexts.begin(), terms.contexts.end(), context);
    if (place == terms.contexts.end()) return;  // joining reports the error
    if (terms.taking_part.size() == 1 && !terms.asked.host->spans_processes())
        return;  // no other replica it could meet
    const auto own = static_cast<size_t>(place - terms.contexts.begin());

    auto& [rounds, last] = nodes_[node];
    while (!rounds.empty() && rounds.front().settled()) rounds.pop_front();
    const auto at = std::find_if(rounds.begin(), rounds.end(), [&](const Round& r) { return !r.callers[own]; });
    const auto calls = [&](const Round& r, size_t c) { return r.callers[c] == scope; };

    // The last caller's thread may not have passed its call to MXNet's engine, which orders calls anew for each
    // context.
    last.resize(terms.contexts.size());
    if (last[own] && last[own] != scope && last[own]->open) refuse(terms, context, *scope, *last[own]);
    if (scope->open) {
        // Error: this step has called another replica in a round where another step has called this replica.
        for (auto r = rounds.begin(); r != at; ++r)
            for (size_t c = 0; c < r->callers.size(); ++c)
                if (calls(*r, c) && !calls(*r, own)) refuse(terms, context, *scope, *r->callers[own]);
        // Error: another step has called a replica in this round, and this step has called it in a later one.
        if (at != rounds.end())
            for (size_t c = 0; c < at->callers.size(); ++c)
                if (at->callers[c] && !calls(*at, c) &&
                    std::any_of(at, rounds.end(), [&](const Round& r) { return calls(r, c); }))
                    refuse(terms, context, *scope, *at->callers[c]);
    }

    if (scope->open) scope->step = step().number;
    last[own] = scope;
    if (at == rounds.end()) {
        rounds.push_back({std::vector<std::shared_ptr<Scope>>(terms.contexts.size()), terms.taking_part.size()});
        rounds.back().callers[own] = scope;
        --rounds.back().missing;
    } else {
        at->callers[own] = scope;
        --at->missing;
    }
}

void Rounds::forget() {
    for (const auto& node : nodes_)
        for (const Round& round : node.second.rounds)
            for (const auto& caller : round.callers)
                if (!round.settled() && caller && caller->open && caller != current_scope())
                    caller->end(Failure("the step of thread '" + caller->thread +
                                        "' is over: another thread has called gluon_syncbn.reset() before all replicas "
                                        "were called."));
    nodes_.clear();
}

}  // namespace syncbn
