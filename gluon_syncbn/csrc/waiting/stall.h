// Tells a waiting thread whether its step is slow or stuck. It measures the computing time of the process, including
// time without a processor, and notices Ctrl-C and the end of the main thread.
#pragma once

#include <deque>
#include <utility>

namespace syncbn {

// The number of SIGINT so far; see watch_interrupts.
long interrupts();

// Lives as long as one wait; it is polled in every time slice.
class Stall {
  public:
    explicit Stall(long interrupts_before = interrupts());
    void sample();
    // Seconds since the wait began. Of a time in which this process was stopped (Ctrl-Z), one second counts.
    double waited() const { return waited_; }
    // Whether the whole process has computed next to nothing for the last `seconds` although it had a processor. Beside
    // other programs, or throttled, a job may get a hundredth of one.
    bool idle_for(double seconds) const;
    // Whether Ctrl-C was pressed since this wait began.
    bool interrupted() const { return interrupts() != interrupts_; }
    // Whether the process should end: it was asked to since this wait began, or no thread is left that could end it. A
    // step that still computes may finish first, so that a handler can save its work.
    bool asked_to_end() const;

  private:
    long interrupts_;
    double waited_ = 0, busy_ = 0;
    double processor_time_;
    double delay_ = -1;  // of all threads together, waiting for a processor; -1 before the first measurement
    std::deque<std::pair<double, double>> samples_;  // (time, seconds in which a thread ran or was ready)
};

// Counts SIGINT before the installed handler, which is called as before. Otherwise Ctrl-C would wait for the main
// thread's call into MXNet, and the call for the step. Repeated calls are cheap: a handler that was installed over ours
// is chained anew.
void watch_interrupts();

// Python says whether every thread that could still call a replica has ended or waits itself.
void set_nobody_left(bool is_nobody_left);

}  // namespace syncbn
