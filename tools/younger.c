// What today's headers make of the C++ library's threads and pointers, and glibc 2.17 does not have (tools/old_symbols.py).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>

// glibc 2.32. Never a single thread: counts of references are always atomic.
char __libc_single_threaded = 0;

// glibc 2.30, what std::condition_variable waits with until a point of the steady clock. Where it is missing, the wait
// is on the wall clock, and at most a second long: a clock that is set cannot make it longer, and an early end is one
// of those that every user of a condition variable expects.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
    typedef int (*Wait)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
    static Wait known;
    static int looked;
    if (!__atomic_load_n(&looked, __ATOMIC_ACQUIRE)) {
        known = (Wait)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
        __atomic_store_n(&looked, 1, __ATOMIC_RELEASE);
    }
    if (known) return known(condition, mutex, clock, until);
    struct timespec now, wall;
    clock_gettime(clock, &now);
    long long left = (until->tv_sec - now.tv_sec) * 1000000000LL + (until->tv_nsec - now.tv_nsec);
    if (left <= 0) return ETIMEDOUT;
    const int whole = left <= 1000000000LL;
    if (!whole) left = 1000000000LL;
    clock_gettime(CLOCK_REALTIME, &wall);
    const long long end = wall.tv_nsec + left;
    wall.tv_sec += end / 1000000000LL;
    wall.tv_nsec = end % 1000000000LL;
    const int status = pthread_cond_timedwait(condition, mutex, &wall);
    return status == ETIMEDOUT && !whole ? 0 : status;
}

// glibc 2.33, what the file of shared memory is asked for its size with. Before, this was a macro.
int __fxstat(int version, int file, struct stat* is);

int fstat(int file, struct stat* is) {
#if defined(__x86_64__)
    return __fxstat(1, file, is);
#else
    return __fxstat(0, file, is);
#endif
}
