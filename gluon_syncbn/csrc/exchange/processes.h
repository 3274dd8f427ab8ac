// Exchanges between the processes of a job: "Between processes" in docs/architecture.md.
#pragma once

#include <list>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/gradients.h"
#include "exchange/mailbox.h"
#include "lock.h"

namespace syncbn {

class Processes : public Exchange {
  public:
    Processes(const Mpi& mpi, size_t rank, size_t ranks);

    bool spans_processes() const override { return true; }
    Underway begin(Combine combine, const CallId& id, const Contribution& own) override;

    // Sends bytes to all ranks, the same or `own` for each. Returns theirs, this one's included, in the order of the ranks.
    std::vector<std::string> bytes_of(const Label& label, const std::string& what, double timeout,
                                      const std::vector<std::string>& own);
    Mailbox& mail() { return mail_; }
    Gradients& gradients() { return gradients_; }

  private:
    // In a hop of an exchange, some ranks post what they have for each other.
    struct Hop {
        int64_t piece;  // of the label
        Ranks others;
    };
    class WaitForVectors;
    class Hops;
    std::vector<Hop> hops() const;

    Mailbox mail_;
    const std::vector<Hop> hops_;  // of reductions
    Gradients gradients_;
    Mutex mutex_;            // guards the next one
    std::list<Label> here_;  // the exchanges that this rank has come to, and has not finished
};

}  // namespace syncbn
