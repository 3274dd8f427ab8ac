// Calls exchanges in Python, each of which takes the interpreter lock: MXNet's KVStores, and a carrier of messages
// between processes.
#pragma once

#include <memory>
#include <string>

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
    // The agreement about a layer, for a step with so many replicas in this process; 0: with all.
    int (*agreed)(int64_t exchange, const Ticket*, int64_t replicas, Agreed*, Problem*);
};

// Called once, before the first use. The functions must stay as long as the process.
void set_python_functions(const PythonFunctions& functions);

// Adds rows of this length, one after the other.
Vector add_in_python(int64_t exchange, const Ticket& ticket, const Vector& rows, size_t length);
Agreed agreed_in_python(int64_t exchange, const Ticket& ticket, int64_t replicas);

// The mailbox of a carrier in Python. The following are for the carrier.
std::unique_ptr<Mailbox> mailbox(size_t rank, size_t ranks);
// Waits at most so long for something to send; empty: there was nothing. It begins with a line of JSON, after which bytes
// follow, aligned: ["message", rank, [the five numbers of the label], length, [readers]], or ["left", rank, failed].
std::string next_message(Mailbox& mailbox, double seconds);
// Puts a vector there, which a rank has sent.
void deliver(Mailbox& mailbox, size_t from, const Label& label, size_t length, const void* values, size_t count);
// Says what has become of a rank. `process`: it has ended without a word.
void report(Mailbox& mailbox, size_t rank, Mailbox::State state, const char* reason, int64_t process);

}  // namespace syncbn
