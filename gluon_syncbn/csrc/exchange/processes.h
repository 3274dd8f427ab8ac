// Exchanges between processes, in levels. Those of a machine share memory. Then one process of each machine, its leader,
// exchanges with the other leaders.
//
//     machine 0                                          machine 1
//     rank 1 ─► post ──────┐                             ┌────── post ◄─ rank 3
//     rank 0 ─► reduce ◄───┘                             └───► reduce ◄─ rank 2
//         leaders' allreduce ◄─── MPI or a carrier ───► leaders' allreduce
//     rank 1 ◄─ total ◄─ rank 0                                rank 2 ─► total ─► rank 3
//
// The total of a machine is rounded before the machines' totals are combined. All ranks have the same bits. They may
// differ from the bits of a single level in the last digits. An allgather needs the vector of every process, so with
// several machines it has one level.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/mailbox.h"
#include "exchange/mpi.h"
#include "exchange/segment.h"
#include "exchange/sums.h"

namespace syncbn {

// All processes of a job. They exchange by MPI, or by a carrier in Python.
class Job {
  public:
    // `number`: of the exchange in Python, which knows the layers.
    Job(int64_t number, std::unique_ptr<Mailbox> mail) : number(number), all(std::move(mail)) {}
    // The names of layers by their keys, for messages.
    void name(int64_t key, const char* name) {
        std::lock_guard<std::mutex> lock(mutex_);
        names_[key] = name;
    }
    std::string name_of(int64_t key) const {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto found = names_.find(key);
        return found == names_.end() ? "number " + std::to_string(key + 1) : found->second;
    }
    // The exchanges that this rank has come to, and has not finished.
    void enter(const Label& label) {
        std::lock_guard<std::mutex> lock(mutex_);
        here_.push_back(label);
    }
    void finish(const Label& label) {
        std::lock_guard<std::mutex> lock(mutex_);
        here_.erase(std::find(here_.begin(), here_.end(), label));
    }
    bool is_in(const Label& label) const {
        std::lock_guard<std::mutex> lock(mutex_);
        return std::find(here_.begin(), here_.end(), label) != here_.end();
    }

    const int64_t number;
    const std::unique_ptr<Mailbox> all;

  private:
    mutable std::mutex mutex_;
    std::map<int64_t, std::string> names_;
    std::vector<Label> here_;
};

class Processes : public Exchange {
  public:
    explicit Processes(std::shared_ptr<Job> job);
    // With memory of this machine. `leaders`: of all machines. They add gradients by MPI; if `mpi` is null, see Machines.
    Processes(std::shared_ptr<Job> job, std::unique_ptr<Segment> segment, Ranks leaders, const Mpi* mpi,
              size_t carried_from);
    ~Processes() override;

    bool spans_processes() const override { return true; }
    std::unique_ptr<Underway> begin(Combine combine, const CallId& id, const Contribution& own) override;

    // Sends bytes to all ranks, the same or `own` for each. Returns theirs, this one's included, in the order of the
    // ranks: the sizes, then all bytes. `key` identifies the messages.
    std::string bytes_of(int64_t key, const char* what, double timeout, const std::vector<std::string>& own);
    // Sums of long arrays over the same processes, with memory of this machine.
    Sums& sums() { return *sums_; }
    const std::shared_ptr<Job>& job() const { return job_; }

    // Reports to the others that this process has failed, or ends.
    void leave(Mailbox::State state, const std::string& reason);

  private:
    // In a step of an exchange, this rank leaves what it has for some others, and waits for the vectors of some.
    struct Step {
        Mailbox* mail;
        int64_t piece;  // of the label; below 0: what a leader tells its machine
        Ranks readers, from;
        double longer = 0;        // seconds, beside the time limit
        bool contributes = true;  // to what comes; otherwise, that is a total already
    };
    class Steps;
    // Returns the agreement of the processes; null if it is not known here yet.
    const Agreed* known(const CallId& id) const;
    void learn(const CallId& id);
    std::vector<Step> levels() const;
    std::vector<Step> between(const Ranks& ranks) const;

    const std::shared_ptr<Job> job_;
    const std::unique_ptr<Segment> machine_;  // null if memory is not shared
    const Ranks leaders_;
    const std::vector<Step> in_job_, in_levels_;  // of reductions
    std::unique_ptr<Sums> sums_;
    mutable std::mutex learning_;       // guards the next one
    std::map<int64_t, Agreed> agreed_;  // by layer
};

}  // namespace syncbn
