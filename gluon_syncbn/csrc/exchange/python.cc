#include "exchange/python.h"

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

}  // namespace

void set_python_functions(const PythonFunctions& given) { functions = given; }

Vector add_in_python(int64_t exchange, const Ticket& ticket, const Vector& rows, size_t length) {
    Vector total(length);
    call(kAdd, exchange, functions.add, &ticket, static_cast<int64_t>(rows.size() / length),
         static_cast<int64_t>(length), rows.data(), total.data());
    return total;
}

std::deque<Vector> gather_in_python(int64_t exchange, const Ticket& ticket, int64_t key, double longer,
                                    const Ranks& ranks, const double* own, size_t length) {
    std::deque<Vector> parts;
    call(kBring, exchange, functions.gather, &ticket, name_of_call(ticket).c_str(), key, longer,
         static_cast<int64_t>(ranks.size()), ranks.data(), static_cast<int64_t>(length), own, &parts);
    return parts;
}

Agreed agreed_in_python(int64_t exchange, const Ticket& ticket, int64_t replicas) {
    Agreed agreed;
    call(kBring, exchange, functions.agreed, &ticket, replicas, &agreed);
    return agreed;
}

}  // namespace syncbn
