// How a waiting thread tells a slow step from a stuck one: what its process computes, or would if the machine let it;
// Ctrl-C; the end of the main thread.
#pragma once

#include <deque>
#include <utility>

namespace syncbn {

// How many SIGINT have been counted; see watch_interrupts.
long interrupts();

// Lives as long as one wait; asked at every time slice.
class Stall {
  public:
    explicit Stall(long interrupts_before = interrupts());
    void sample();
    // Seconds since the wait began. Of a time in which this process did not run (Ctrl-Z), one counts.
    double waited() const { return waited_; }
    // True where the whole process has computed next to nothing for the last `seconds`, and not for want of a processor:
    // beside other programs, or throttled, a job may get a hundredth of one.
    bool idle_for(double seconds) const;
    // Whether somebody has pressed Ctrl-C since this wait began.
    bool interrupted() const { return interrupts() != interrupts_; }
    // True where somebody asked the process to end since this wait began, or nobody is left who could end it, and
    // nothing else is running: a step that still computes is left to finish, so that a handler that saves its work can
    // do so.
    bool asked_to_end() const;

  private:
    long interrupts_;
    double waited_ = 0, busy_ = 0;
    double processor_time_;
    double delay_ = -1;  // of all threads together, for want of a processor; -1 where nobody has asked yet
    std::deque<std::pair<double, double>> samples_;  // (time, seconds in which a thread ran or could have)
};

// Counts SIGINT beside whatever handler is installed, which is called as before. Without this, Ctrl-C waits for
// the main thread's call into MXNet, and that call waits for the step. Cheap to call again: a handler that was
// installed over ours in the meantime is chained anew.
void watch_interrupts();

// Whether every thread that could still call a replica has ended or waits itself: Python knows, and says so.
void nobody_left(bool so);

}  // namespace syncbn
