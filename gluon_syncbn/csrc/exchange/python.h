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
    int (*add)(int64_t exchange, const CallId*, int64_t rows, int64_t length, const double*, double* total, Problem*);
    // The agreement about a layer, for a step with so many replicas in this process; 0: with all.
    int (*agreed)(int64_t exchange, const CallId*, int64_t replicas, Agreed*, Problem*);
};

// Called once, before the first use. The functions must stay as long as the process.
void set_python_functions(const PythonFunctions& functions);

Agreed agreed_in_python(int64_t exchange, const CallId& id, int64_t replicas);

// The mailbox of a carrier in Python. A message is the number of its readers and their ranks, as int64, then a Head and
// what follows it. The following are for the carrier.
std::unique_ptr<Mailbox> mailbox(size_t rank, size_t ranks);
// Waits at most so long for something to send; empty: there was nothing. Returns false after the last message.
bool next_message(Mailbox& mailbox, double seconds, std::string* message);
// Takes a message that has arrived.
void deliver(Mailbox& mailbox, const char* message, size_t size);

}  // namespace syncbn
