#include "exchange/python_transport.h"

#include <stdexcept>

#include "point.h"

namespace syncbn {
namespace {

constexpr const char *kAdd = "could not add the statistics", *kBring = "could not gather the statistics";

PythonFunctions functions;

template <typename Function, typename... Arguments>
void call(const char* what, int64_t exchange, Function* function, Arguments... arguments) {
    SYNCBN_POINT("before_exchange");
    Problem problem{};
    if (function(exchange, arguments..., &problem) != 0)
        throw std::runtime_error(std::string("the KVStore ") + what + ": " + problem.text);
    SYNCBN_POINT("after_exchange");
}

Total reduce(int64_t exchange, decltype(PythonFunctions::add) function, const Ticket& ticket, const Contribution& own) {
    Vector rows;
    for (const double* row : own.rows) rows.insert(rows.end(), row, row + own.length);
    Total total;
    call(kAdd, exchange, function, &ticket, static_cast<int64_t>(own.rows.size()), static_cast<int64_t>(own.length),
         rows.data(), &total);
    return total;
}

class PythonTransport : public Exchange {
  public:
    explicit PythonTransport(int64_t number) : number_(number) {}

    bool spans_processes() const override { return true; }

    Total allreduce(Combine combine, const Ticket& ticket, const Contribution& own) override {
        return reduce_in_python(number_, combine, ticket, own);
    }
    Total allgather(const Ticket& ticket, const Contribution& own) override {
        return reduce(number_, functions.gather, ticket, own);
    }
    Agreed agreed(const Ticket& ticket) override {
        Agreed agreed;
        call(kBring, number_, functions.agreed, &ticket, &agreed);
        return agreed;
    }

  private:
    const int64_t number_;
};

}  // namespace

void set_python_functions(const PythonFunctions& given) { functions = given; }

Total reduce_in_python(int64_t exchange, Combine combine, const Ticket& ticket, const Contribution& own) {
    return reduce(exchange, combine == Combine::kMerge ? functions.merge : functions.add, ticket, own);
}

std::shared_ptr<Exchange> python_transport(int64_t number) { return std::make_shared<PythonTransport>(number); }

}  // namespace syncbn
