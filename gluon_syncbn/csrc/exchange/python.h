// Calls exchanges in Python, each of which takes the interpreter lock: MXNet's KVStores, and a transport of messages
// between processes.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "exchange/exchange.h"
#include "exchange/mailbox.h"

namespace syncbn {

// The one function in Python that an exchange calls, because the user asked for a KVStore of MXNet's. `exchange` is its
// number. Several threads call at once. Returns whether it has succeeded. Otherwise the reason is in `python_problem`.
inline thread_local std::string python_problem;
// The sum over these contexts, "cpu(0), cpu(1)", from [rows][length].
using AddInPython = bool(int64_t exchange, const char* contexts, int64_t rows, int64_t length, const double*,
                         double* total);
// Set once, before the first use. It must stay as long as the process.
inline AddInPython* python_add = nullptr;

// The mailbox of a transport in Python. A message is the number of its readers and their ranks, as int64, then a Head and
// what follows it. The following are for the transport.
std::unique_ptr<Mailbox> mailbox(size_t rank, size_t ranks);
// Waits at most so long for something to send; empty: there was nothing. Returns nothing after the last message.
std::optional<std::string> next_message(Mailbox& mailbox, double seconds);
// Takes a message that has arrived.
void deliver(Mailbox& mailbox, const char* message, size_t size);

}  // namespace syncbn
