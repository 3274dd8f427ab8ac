// Calls exchanges in Python, each of which takes the interpreter lock: MXNet's KVStores, and a transport of messages
// between processes.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "exchange/exchange.h"
#include "exchange/mailbox.h"

namespace syncbn {

// Functions in Python. `exchange` is the number of the exchange. Several threads call at once. They return whether they
// have succeeded. Otherwise the reason is in `python_problem`.
inline thread_local std::string python_problem;
// The sum over the contexts of this process, from [rows][length].
using AddInPython = bool(int64_t exchange, int64_t layer, int64_t rows, int64_t length, const double*, double* total);
// The agreement about a layer.
using AgreedInPython = bool(int64_t exchange, int64_t layer, Agreed*);
// Set once, before the first use. They must stay as long as the process.
inline AddInPython* python_add = nullptr;
inline AgreedInPython* python_agreed = nullptr;

Agreed agreed_in_python(int64_t exchange, const CallId& id);

// The mailbox of a transport in Python. A message is the number of its readers and their ranks, as int64, then a Head and
// what follows it. The following are for the transport.
std::unique_ptr<Mailbox> mailbox(size_t rank, size_t ranks);
// Waits at most so long for something to send; empty: there was nothing. Returns nothing after the last message.
std::optional<std::string> next_message(Mailbox& mailbox, double seconds);
// Takes a message that has arrived.
void deliver(Mailbox& mailbox, const char* message, size_t size);

}  // namespace syncbn
