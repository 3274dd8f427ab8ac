// A mailbox in memory of this process: what has arrived, and what is known of the other ranks. A carrier fills it.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "exchange/mailbox.h"

namespace syncbn {

class Inbox : public Mailbox {
  public:
    Inbox(size_t rank, size_t ranks) : states_(ranks), rank_(rank), process_(getpid()), reasons_(ranks) {
        for (auto& state : states_) state = State::kPresent;
    }

    size_t ranks() const override { return states_.size(); }
    size_t rank() const override { return rank_; }
    bool is_own() const override { return getpid() == process_; }

    Found find(size_t rank, const Label& label) const override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const Received& one : received_)
            if (one.from == rank && one.label == label) return {one.values, one.count, one.length, 0};
        return {};
    }
    void done(size_t rank, const Label& label, const Found&) override {
        std::lock_guard<std::mutex> lock(mutex_);
        received_.remove_if([&](const Received& one) { return one.from == rank && one.label == label; });
    }
    std::vector<Label> left_by(size_t rank) const override {
        std::lock_guard<std::mutex> lock(mutex_);
        std::vector<Label> labels;
        for (const Received& one : received_)
            if (one.from == rank) labels.push_back(one.label);
        return labels;
    }
    bool is_here(const Label& label) const override {
        std::lock_guard<std::mutex> lock(mutex_);
        return std::find(here_.begin(), here_.end(), label) != here_.end();
    }
    void forget(const Label& label) override {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto found = std::find(here_.begin(), here_.end(), label);
        if (found != here_.end()) here_.erase(found);
    }

    uint32_t ring_of(const Label&) const override { return 0; }  // there is one for all

    State state_of(size_t rank) const override { return states_[rank]; }
    std::string reason_of(size_t rank) const override {
        std::lock_guard<std::mutex> lock(mutex_);
        return reasons_[rank];
    }
    bool crowded() const override { return false; }

  protected:
    struct Received {
        size_t from;
        Label label;
        size_t length, count;
        const double* values;
        std::shared_ptr<double> memory;  // of the values
    };
    Ranks others() const {
        Ranks ranks;
        for (size_t rank = 0; rank < states_.size(); ++rank)
            if (rank != rank_) ranks.push_back(rank);
        return ranks;
    }

    // The caller of the following holds the lock.
    void remember(const Label& label) {
        if (label.piece == 0) here_.push_back(label);
    }
    void keep(Received one) {
        received_.push_back(std::move(one));
        ++heard_;
    }
    void report(size_t rank, State state, std::string reason) {
        reasons_[rank] = std::move(reason);  // complete before the state changes
        states_[rank] = state;
        ++heard_;
    }

    mutable std::mutex mutex_;  // guards all but the states and what is heard
    std::vector<std::atomic<State>> states_;
    std::atomic<uint32_t> heard_{0};

  private:
    const size_t rank_;
    const pid_t process_;
    std::vector<std::string> reasons_;
    std::list<Received> received_;
    std::vector<Label> here_;
};

}  // namespace syncbn
