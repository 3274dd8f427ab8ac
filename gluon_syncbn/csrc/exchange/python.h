// Calls exchanges in Python, each of which takes the interpreter lock: MXNet's KVStores, and a carrier of messages
// between processes.
#pragma once

#include <memory>

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
    // Sends a vector off; `label` has the five numbers of a Label. Must not wait for other processes.
    int (*post)(int64_t exchange, const int64_t* label, int64_t length, int64_t count, const double*, int64_t readers,
                const size_t*, Problem*);
    // Tells the other ranks that this one has ended, or has failed, with a reason.
    int (*tell)(int64_t exchange, int failed, const char* reason, Problem*);
    // The agreement about a layer, for a step with so many replicas in this process; 0: with all.
    int (*agreed)(int64_t exchange, const Ticket*, int64_t replicas, Agreed*, Problem*);
};

// Called once, before the first use. The functions must stay as long as the process.
void set_python_functions(const PythonFunctions& functions);

// Adds rows of this length, one after the other.
Vector add_in_python(int64_t exchange, const Ticket& ticket, const Vector& rows, size_t length);
Agreed agreed_in_python(int64_t exchange, const Ticket& ticket, int64_t replicas);

// The mailbox of a carrier in Python.
std::unique_ptr<Mailbox> mailbox(int64_t exchange, size_t rank, size_t ranks);
// For the carrier: puts a vector there, which a rank has sent.
void deliver(Mailbox& mailbox, size_t from, const Label& label, size_t length, const void* values, size_t count);
// Says what has become of a rank. `process`: it has ended without a word.
void report(Mailbox& mailbox, size_t rank, Mailbox::State state, const char* reason, int64_t process);

}  // namespace syncbn
