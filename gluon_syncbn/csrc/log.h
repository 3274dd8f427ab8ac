// What the native core has to say, for the logger `gluon_syncbn`. A thread of Python's fetches the records: a thread of
// MXNet's that called Python itself would have to wait for whoever holds the interpreter, and at its end for ever.
#pragma once

#include <string>

namespace syncbn {

// Python's numbers.
enum class Level : int { kDebug = 10, kInfo = 20, kWarning = 30 };

struct Record {
    Level level;
    std::string text;
};

// What there is no memory for is lost, and counted.
void log(Level level, std::string text) noexcept;

// Whether somebody wants to know of every meeting.
bool debugging();
void set_debugging(bool so);

// The next record, after at most `seconds`; false where there is none.
bool next_record(double seconds, Record* record);

// In the child of a fork.
void forget_records();

}  // namespace syncbn
