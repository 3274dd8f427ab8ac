// Passes the native core's records to the logger `gluon_syncbn`. A thread of Python's fetches them. A thread of MXNet's
// must not call Python itself: it would wait for the interpreter lock, and when the interpreter ends, for ever.
#pragma once

#include <string>

namespace syncbn {

// Python's numbers.
enum class Level : int { kDebug = 10, kWarning = 30 };

// Without memory for a record, it is lost, and counted.
void log(Level level, std::string text) noexcept;

// Whether the logger wants a record of every meeting.
bool debugging();
void set_debugging(bool enabled);

// Returns the next record, after at most `seconds`: its level, a blank and the text. Empty if there is none.
std::string next_record(double seconds);

// Forgets all records in the child of a fork.
void forget_records();

}  // namespace syncbn
