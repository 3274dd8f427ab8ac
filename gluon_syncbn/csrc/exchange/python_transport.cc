#include "exchange/python_transport.h"

#include <stdexcept>

#include "point.h"

namespace syncbn {
namespace {

PythonFunctions& functions() {
    static PythonFunctions one;
    return one;
}

class PythonTransport : public Exchange {
  public:
    PythonTransport(int64_t number, GpuRoute route) : number_(number), route_(route) {}

    bool calls_out() const override { return true; }
    bool spans_processes() const override { return route_ == GpuRoute::kProcesses; }

    Total allreduce(Combine combine, const Ticket& ticket, const Contribution& own) override {
        if (!spans_processes() && own.rows.size() == 1) return only_row(ticket, own);
        return reduce(combine == Combine::kMerge ? functions().merge : functions().add, ticket, own);
    }
    Total allgather(const Ticket& ticket, const Contribution& own) override {
        if (!spans_processes()) return only_row(ticket, own);
        return reduce(functions().gather, ticket, own);
    }
    GpuRoute gpu_route() const override { return route_; }
    void add_on_devices(const Ticket& ticket, const std::vector<OnDevice>& parts) override {
        call("could not add the statistics", functions().add_on_devices, &ticket, static_cast<int64_t>(parts.size()),
             parts.data());
    }
    int64_t gpus_of_all_processes(const Ticket& ticket) override {
        int64_t replicas = 0;
        call(kBring, functions().gpus_of_all_processes, &ticket, &replicas);
        return replicas;
    }
    Turn turn(const Ticket& ticket, const std::vector<OnDevice>& parts, const Vector& counts) override {
        std::vector<int64_t> devices;
        for (const OnDevice& part : parts) devices.push_back(part.device);
        const size_t slots = counts.size() / parts.size();
        Turn turn;
        call(kBring, functions().turn, &ticket, static_cast<int64_t>(parts.size()), static_cast<int64_t>(slots),
             devices.data(), counts.data(), &turn);
        if (turn.counts.size() != turn.world * slots)
            throw std::runtime_error("the replicas of the processes have different numbers of virtual devices");
        return turn;
    }
    Agreed agreed(const Ticket& ticket) override {
        Agreed agreed;
        call(kBring, functions().agreed, &ticket, &agreed);
        return agreed;
    }
    void check(const Ticket& ticket) override { call(kBring, functions().check, &ticket); }

  private:
    static constexpr const char* kBring = "could not bring the statistics together";

    static Total only_row(const Ticket& ticket, const Contribution& own) {
        return {Vector(own.rows[0], own.rows[0] + own.length), 0, ticket.layer};
    }
    template <typename Function>
    Total reduce(Function* function, const Ticket& ticket, const Contribution& own) {
        Vector rows;
        for (const double* row : own.rows) rows.insert(rows.end(), row, row + own.length);
        Total total;
        call("could not add the statistics", function, &ticket, static_cast<int64_t>(own.rows.size()),
             static_cast<int64_t>(own.length), rows.data(), &total);
        return total;
    }
    template <typename Function, typename... Arguments>
    void call(const char* what, Function* function, Arguments... arguments) {
        SYNCBN_POINT("before_exchange");
        Problem problem{};
        if (function(number_, arguments..., &problem) != 0)
            throw std::runtime_error(std::string("the KVStore ") + what + ": " + problem.text);
        SYNCBN_POINT("after_exchange");
    }

    const int64_t number_;
    const GpuRoute route_;
};

}  // namespace

void set_python_functions(const PythonFunctions& given) { functions() = given; }

std::shared_ptr<Exchange> python_transport(int64_t number, GpuRoute route) {
    return std::make_shared<PythonTransport>(number, route);
}

}  // namespace syncbn
