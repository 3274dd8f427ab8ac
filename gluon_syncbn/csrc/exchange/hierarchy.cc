#include "exchange/hierarchy.h"

#include <exception>

namespace syncbn {
namespace {

// A process that waits for waiting processes waits this much longer, so that the one next to the cause reports it.
constexpr double kLonger = 1.0;

// One allreduce. This process has contributed to its machine.
class Levels : public Underway {
  public:
    Levels(SharedMemory& machine, Exchange& leaders, Combine combine, const Ticket& ticket, const Contribution& own)
        : machine_(machine),
          leaders_(leaders),
          combine_(combine),
          ticket_(ticket),
          reduction_(machine.begin_reduce(combine, ticket, own)) {
        if (machine.speaks()) return;
        Ticket longer = ticket;
        longer.timeout += kLonger;
        total_ = machine.begin_hearing(longer, own.length);
    }
    // The leader waits in the transport, which no thread of the engine may do.
    bool comes_within(double seconds) override { return total_ != nullptr && total_->comes_within(seconds); }
    Total total() override {
        if (total_ != nullptr) return total_->total();
        const Total here = reduction_->total();
        try {
            const Total all = leaders_.allreduce(combine_, ticket_, {{here.values.data()}, here.values.size()});
            machine_.broadcast(ticket_, all.values);
            return all;
        } catch (const std::exception& e) {
            machine_.fail(e.what());
            throw;
        }
    }

  private:
    SharedMemory& machine_;
    Exchange& leaders_;
    const Combine combine_;
    const Ticket ticket_;
    const std::unique_ptr<Underway> reduction_;
    std::unique_ptr<Underway> total_;  // null in the leader
};

class Hierarchy : public Exchange {
  public:
    Hierarchy(std::shared_ptr<SharedMemory> machine, std::shared_ptr<Exchange> leaders,
              std::shared_ptr<Exchange> transport)
        : machine_(std::move(machine)), leaders_(std::move(leaders)), transport_(std::move(transport)) {}

    bool spans_processes() const override { return true; }

    Total allreduce(Combine combine, const Ticket& ticket, const Contribution& own) override {
        if (!SharedMemory::has_space(own.length)) return transport_->allreduce(combine, ticket, own);
        return Levels(*machine_, *leaders_, combine, ticket, own).total();
    }
    // The first call asks later for the agreement, because that may take a while.
    std::unique_ptr<Underway> begin_allreduce(Combine combine, const Ticket& ticket, const Contribution& own) override {
        if (!SharedMemory::has_space(own.length) || !machine_->knows(ticket))
            return Exchange::begin_allreduce(combine, ticket, own);
        return std::make_unique<Levels>(*machine_, *leaders_, combine, ticket, own);
    }
    Total allgather(const Ticket& ticket, const Contribution& own) override {
        return transport_->allgather(ticket, own);
    }

  private:
    const std::shared_ptr<SharedMemory> machine_;
    const std::shared_ptr<Exchange> leaders_, transport_;
};

}  // namespace

std::shared_ptr<Exchange> hierarchy(std::shared_ptr<SharedMemory> machine, std::shared_ptr<Exchange> leaders,
                                    std::shared_ptr<Exchange> transport) {
    return std::make_shared<Hierarchy>(std::move(machine), std::move(leaders), std::move(transport));
}

}  // namespace syncbn
