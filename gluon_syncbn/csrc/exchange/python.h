// Calls exchanges in Python, each of which takes the interpreter lock: those of Horovod and of MXNet's KVStores.
#pragma once

#include <deque>

#include "exchange/exchange.h"
#include "exchange/mailbox.h"

namespace syncbn {

// A Python function writes its failure here, as text that ends in 0.
struct Problem {
    char text[1024];
};

// The functions of all exchanges in Python. `exchange` is the number of the exchange. Each returns 0, or 1 with the
// reason in `problem`. Several threads call at once.
struct PythonFunctions {
    // The sum over the contexts of this process, from [rows][length].
    int (*add)(int64_t exchange, const Ticket*, int64_t rows, int64_t length, const double*, double* total, Problem*);
    // From some ranks, and to them, in their order. `what` is for messages, `longer` are seconds beyond the time limit.
    int (*gather)(int64_t exchange, const Ticket*, const char* what, int64_t key, double longer, int64_t ranks,
                  const size_t*, int64_t length, const double*, std::deque<Vector>*, Problem*);
    // The agreement about a layer, for a step with so many replicas in this process; 0: with all.
    int (*agreed)(int64_t exchange, const Ticket*, int64_t replicas, Agreed*, Problem*);
};

// Called once, before the first use. The functions must stay as long as the process.
void set_python_functions(const PythonFunctions& functions);

// Adds rows of this length, one after the other.
Vector add_in_python(int64_t exchange, const Ticket& ticket, const Vector& rows, size_t length);
std::deque<Vector> gather_in_python(int64_t exchange, const Ticket& ticket, int64_t key, double longer,
                                    const Ranks& ranks, const double* own, size_t length);
Agreed agreed_in_python(int64_t exchange, const Ticket& ticket, int64_t replicas);

}  // namespace syncbn
