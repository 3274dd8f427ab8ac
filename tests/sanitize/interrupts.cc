#include "interrupts.h"

#include <unistd.h>

#include <atomic>
#include <deque>

#include "core.h"
#include "figures.h"
#include "layer.h"

namespace driver {
namespace {

std::atomic<long> taken{0};
std::atomic<const struct sigaction*> beneath{nullptr};

void plain(int) { ++taken; }

void with_information(int, siginfo_t*, void*) { ++taken; }

// Calls what was there before it: the core's handler, perhaps.
void chaining(int signal, siginfo_t* information, void* context) {
    ++taken;
    const struct sigaction& before = *beneath.load();
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(signal, information, context);
    else
        before.sa_handler(signal);
}

struct sigaction current_handler() {
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

struct sigaction make_handler(Interrupts::Handler which) {
    struct sigaction handler{};
    if (which == Interrupts::kPlain) {
        handler.sa_handler = plain;
    } else {
        handler.sa_flags = SA_SIGINFO;
        handler.sa_sigaction = which == Interrupts::kChaining ? chaining : with_information;
    }
    return handler;
}

}  // namespace

Interrupts::Interrupts() : before_(current_handler()) {
    const auto first = make_handler(kPlain);  // whatever chains has something beneath
    sigaction(SIGINT, &first, nullptr);
}

Interrupts::~Interrupts() { sigaction(SIGINT, &before_, nullptr); }

void Interrupts::install(Handler which) const {
    static std::deque<struct sigaction> replaced;  // for good: a handler may be running
    if (which == kChaining) {
        replaced.push_back(current_handler());
        beneath = &replaced.back();
    }
    const auto handler = make_handler(which);
    sigaction(SIGINT, &handler, nullptr);
    until([&] { return current_handler().sa_handler != handler.sa_handler; }, "a wait notices a new handler of SIGINT");
}

void Interrupts::send() const {
    const long counted = syncbn::interrupts(), before = taken;
    kill(getpid(), SIGINT);
    until([&] { return syncbn::interrupts() > counted && taken > before; }, "SIGINT is counted and handed on");
}

}  // namespace driver
