// Finds which step each call of a layer belongs to, when calls are issued.
//
// The n-th calls on all contexts make a round, and these calls meet. They may come from one thread, or from one thread
// for each context. A step that calls several replicas must have them in the same rounds. While its scope is open, no
// other step may call the same replica:
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

// The rounds of one layer, with one replica on each of several contexts; guarded by the lock of its rendezvous.
class Rounds {
  public:
    // Adds a call of this node of a graph, or of this whole graph, in this scope. Throws Failure, to both threads, if
    // the layer is in the middle of a step of another thread.
    void add(const Terms& terms, const std::string& context, int64_t node, const std::shared_ptr<Scope>& scope);
    // Forgets all rounds, which ends the steps of other threads.
    void forget();
    // Called in the child of a fork, which has no other threads.
    void forked() { nodes_.clear(); }

  private:
    struct Round {
        std::vector<std::shared_ptr<Scope>> callers;  // [contexts]; null before the call
        size_t missing;
        // Whether no later call can make it wrong.
        bool settled() const;
    };
    struct Node {
        std::deque<Round> rounds;                  // beginning with the first that is not settled
        std::vector<std::shared_ptr<Scope>> last;  // [contexts], the last caller
    };
    std::map<int64_t, Node> nodes_;  // of graphs
};

}  // namespace syncbn
