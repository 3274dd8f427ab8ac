#include "exchange/exchange.h"

#include <stdexcept>
#include <utility>

#include "failure.h"

namespace syncbn {
namespace {

[[noreturn]] void not_offered() { throw std::logic_error("this exchange does not support the operation"); }

class Later : public Underway {
  public:
    Later(std::function<Total()> total, bool at_once) : total_(std::move(total)), at_once_(at_once) {}
    bool comes_within(double) override { return at_once_; }
    Total total() override { return total_(); }

  private:
    const std::function<Total()> total_;
    const bool at_once_;
};

}  // namespace

std::unique_ptr<Underway> later(std::function<Total()> total, bool at_once) {
    return std::make_unique<Later>(std::move(total), at_once);
}

std::unique_ptr<Underway> Exchange::begin_allreduce(Combine combine, const Ticket& ticket, const Contribution& own) {
    return later([this, combine, ticket, own] { return allreduce(combine, ticket, own); }, !calls_out());
}
std::unique_ptr<Underway> Exchange::begin_allgather(const Ticket& ticket, const Contribution& own) {
    return later([this, ticket, own] { return allgather(ticket, own); }, !calls_out());
}

size_t Exchange::replicas() const { not_offered(); }
Total Exchange::allreduce(Combine, const Ticket&, const Contribution&) { not_offered(); }
Total Exchange::allgather(const Ticket&, const Contribution&) { not_offered(); }
Total Exchange::allgather(const Ticket&, const DeviceContribution&) { not_offered(); }

std::string name_of_call(const Ticket& ticket) {
    if (ticket.phase < 0) return ticket.name;
    return std::string("the ") + (ticket.phase == 0 ? "forward" : "backward") + " of call " +
           std::to_string(ticket.call + 1) + " of " + title_of(ticket.name);
}

}  // namespace syncbn
