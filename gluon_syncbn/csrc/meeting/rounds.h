// Whose step each call of a layer is part of, seen where calls are issued.
//
// The n-th calls on all contexts make a round, and they are what meets. They may come from one thread, or from one thread
// for each context. But a step that calls several replicas has to have them in the same rounds. As long as its scope is open,
// no other may call the same replica:
//
//                 cpu(0)   cpu(1)
//     round 1     A        B           A and B have begun at the same time, and each is about to call both:
//     round 2     B        A           cpu(0) of A would meet cpu(1) of B
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "meeting/scope.h"

namespace syncbn {

struct Terms;

// Of one layer, with several contexts and a replica on each; guarded by the lock of its room.
class Rounds {
  public:
    // A call of this node of a graph, or of this whole graph, in this scope. Throws Failure, to both threads, where it is
    // in the middle of a step of another thread.
    void add(const Terms& terms, const std::string& context, int64_t node, const std::shared_ptr<Scope>& scope);
    // All of them. What other threads have begun ends with that.
    void forget();
    // In the child of a fork, where there are no other threads.
    void forked() { nodes_.clear(); }

  private:
    struct Round {
        std::vector<std::shared_ptr<Scope>> callers;  // [contexts]; null before the call
        size_t missing;
        // Nothing that is called from now on can make it wrong.
        bool settled() const;
    };
    struct Node {
        std::deque<Round> rounds;                  // from the first that is not settled
        std::vector<std::shared_ptr<Scope>> last;  // [contexts], that has called
    };
    std::map<int64_t, Node> nodes_;  // of graphs
};

}  // namespace syncbn
