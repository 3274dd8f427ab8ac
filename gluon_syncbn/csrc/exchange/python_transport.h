// Exchanges between processes by a transport in Python: MPI, Horovod, or another one. Each call takes the interpreter
// lock.
#pragma once

#include "exchange/exchange.h"

namespace syncbn {

// A Python function writes its failure here, as text that ends in 0.
struct Problem {
    char text[1024];
};

// The functions of all exchanges in Python, each with its own types. `exchange` is the number of the exchange. Each
// returns 0, or 1 with the reason in `problem`. Several threads call at once.
struct PythonFunctions {
    // [rows][length]; one row to gather.
    int (*merge)(int64_t exchange, const Ticket*, int64_t rows, int64_t length, const double*, Total*, Problem*);
    int (*add)(int64_t exchange, const Ticket*, int64_t rows, int64_t length, const double*, Total*, Problem*);
    int (*gather)(int64_t exchange, const Ticket*, int64_t rows, int64_t length, const double*, Total*, Problem*);
    int (*agreed)(int64_t exchange, const Ticket*, Agreed*, Problem*);
};

// Called once, before the first use. The functions must stay as long as the process.
void set_python_functions(const PythonFunctions& functions);

std::shared_ptr<Exchange> python_transport(int64_t number);

// For other exchanges that add in Python, by their number.
Total reduce_in_python(int64_t exchange, Combine combine, const Ticket& ticket, const Contribution& own);

}  // namespace syncbn
