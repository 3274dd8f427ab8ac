// SIGINT, and handlers of it as Python and libraries have them.
#pragma once

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <deque>

#include "core.h"
#include "figures.h"
#include "layer.h"

namespace driver {

inline std::atomic<long> taken{0};
inline std::atomic<const struct sigaction*> beneath{nullptr};

inline void plain(int) { ++taken; }

inline void with_information(int, siginfo_t*, void*) { ++taken; }

// Calls what was there before it: the core's handler, perhaps.
inline void chaining(int signal, siginfo_t* information, void* context) {
    ++taken;
    const struct sigaction& before = *beneath.load();
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(signal, information, context);
    else
        before.sa_handler(signal);
}

inline struct sigaction current_handler() {
    struct sigaction current;
    sigaction(SIGINT, nullptr, &current);
    return current;
}

template <typename Condition>
void until(const Condition& condition, const char* what) {
    const double begin = now();
    while (!condition() && now() < begin + kPatience) continue;
    expect(condition(), what);
}

// As long as it lives, SIGINT does not end the process. Somebody has to wait in the core while one of these works.
class Interrupts {
  public:
    enum Handler { kPlain, kWithInformation, kChaining };

    Interrupts() : before_(current_handler()) {
        const auto first = make_handler(kPlain);  // whatever chains has something beneath
        sigaction(SIGINT, &first, nullptr);
    }
    ~Interrupts() { sigaction(SIGINT, &before_, nullptr); }
    Interrupts(const Interrupts&) = delete;
    Interrupts& operator=(const Interrupts&) = delete;

    // As signal.signal does in the midst of a wait, which notices.
    void install(Handler which) const {
        static std::deque<struct sigaction> replaced;  // for good: a handler may be running
        if (which == kChaining) {
            replaced.push_back(current_handler());
            beneath = &replaced.back();
        }
        const auto handler = make_handler(which);
        sigaction(SIGINT, &handler, nullptr);
        until([&] { return current_handler().sa_handler != handler.sa_handler; },
              "a wait notices a new handler of SIGINT");
    }

    // Until it has been counted and handed on.
    void send() const {
        const long counted = syncbn::interrupts, before = taken;
        kill(getpid(), SIGINT);
        until([&] { return syncbn::interrupts > counted && taken > before; }, "SIGINT is counted and handed on");
    }

  private:
    static struct sigaction make_handler(Handler which) {
        struct sigaction handler{};
        if (which == kPlain) {
            handler.sa_handler = plain;
        } else {
            handler.sa_flags = SA_SIGINFO;
            handler.sa_sigaction = which == kChaining ? chaining : with_information;
        }
        return handler;
    }

    struct sigaction before_;
};

}  // namespace driver
