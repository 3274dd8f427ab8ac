// What leaves shared memory: plays the exchanges that Python has behind the core's hook.
#pragma once

namespace driver {

// Sets the hook, the only one of the process.
void set_hook();
// So many of the next exchanges fail.
void fail_exchanges(int count);

}  // namespace driver
