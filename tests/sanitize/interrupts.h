// SIGINT, and handlers of it as Python and libraries have them.
#pragma once

#include <csignal>

namespace driver {

// As long as it lives, SIGINT does not end the process. Somebody has to wait in the core while one of these works.
class Interrupts {
  public:
    enum Handler { kPlain, kWithInformation, kChaining };

    Interrupts();
    ~Interrupts();
    Interrupts(const Interrupts&) = delete;
    Interrupts& operator=(const Interrupts&) = delete;

    // As signal.signal does in the midst of a wait, which notices.
    void install(Handler handler) const;
    // Until it has been counted and handed on.
    void send() const;

  private:
    struct sigaction before_;
};

}  // namespace driver
