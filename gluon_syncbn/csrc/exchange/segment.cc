#include "exchange/segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstring>
#include <ctime>
#include <stdexcept>

namespace syncbn {
namespace {

[[noreturn]] void fail(const char* what) { throw std::runtime_error(std::string(what) + ": " + std::strerror(errno)); }

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

// The lock on a rank's byte ends with the rank's process, however that ends, and never earlier. A child of a fork has
// none.
struct flock lock_of(size_t rank) { return {F_WRLCK, SEEK_SET, static_cast<off_t>(rank), 1, 0}; }

int opened(size_t rank, const std::string& path) {
    if (rank > 0) return open(path.c_str(), O_RDWR | O_CLOEXEC);
    return static_cast<int>(syscall(SYS_memfd_create, "gluon_syncbn", 1u));  // MFD_CLOEXEC
}

}  // namespace

Segment::Segment(size_t ranks, size_t rank, const std::string& token, const std::string& path)
    : Mailbox(rank, ranks), file_{opened(rank, path)} {
    if (ranks > kMostRanks)
        throw std::runtime_error("a machine has more than " + std::to_string(kMostRanks) + " processes");
    const int file = file_.number;
    if (file < 0) fail(rank == 0 ? "memfd_create" : path.c_str());
    const size_t size = offsetof(Memory, of) + ranks * sizeof(Memory::OfRank);
    struct stat is;
    if (rank == 0 && fchmod(file, 0600) != 0) fail("fchmod");
    if (rank == 0 && ftruncate(file, static_cast<off_t>(size)) != 0) fail("ftruncate");
    if (fstat(file, &is) != 0) fail("fstat");
    if (static_cast<size_t>(is.st_size) != size) throw std::runtime_error("it is another file");
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (memory == MAP_FAILED) fail("mmap");
    memory_.reset(static_cast<Memory*>(memory), [size](Memory* all) { munmap(all, size); });
    if (rank == 0)
        token.copy(memory_->token, kTokenSize);
    else if (token != std::string(memory_->token, kTokenSize))
        throw std::runtime_error(path + " is of another process");
    struct flock lock = lock_of(rank);
    if (fcntl(file, F_SETLK, &lock) != 0) fail("fcntl(F_SETLK)");
    memory_->of[rank].process = process_;
}

std::optional<Label> Segment::label_in(const Outbox& outbox) const {
    const uint32_t stamp = outbox.stamp.load();
    if ((stamp & 1) == 0 || (outbox.readers & uint64_t{1} << rank_) == 0) return std::nullopt;
    Label::Words words;
    for (size_t i = 0; i < words.size(); ++i) words[i] = outbox.label[i].load(std::memory_order_acquire);
    if (outbox.stamp != stamp) return std::nullopt;
    Label label;
    std::memcpy(static_cast<void*>(&label), &words, sizeof label);
    return label;
}

// ---- vectors -------------------------------------------------------------------------------------------------------

void Segment::write(const Label& label, const void* values, size_t size, const Ranks& readers) {
    uint64_t bits = 0;
    for (const size_t reader : readers) bits |= uint64_t{1} << reader;
    Memory::OfRank& own = memory_->of[rank_];
    if (size > sizeof own.values[0])
        throw std::runtime_error(std::to_string(size) + " bytes do not fit into the memory of this machine");
    size_t index = 0;  // the lowest free one: the last used is in a cache
    while (index < kOutboxes && own.outboxes[index].readers != 0) ++index;
    if (index == kOutboxes)
        throw std::runtime_error(std::to_string(kOutboxes) +
                                 " exchanges wait at once for the processes of this machine");
    Outbox& box = own.outboxes[index];
    // A reader of a half-written label sees that the stamp has changed.
    const uint32_t stamp = box.stamp.load(std::memory_order_relaxed);
    box.stamp.store(stamp + (stamp & 1), std::memory_order_relaxed);
    const Label::Words words = label.words();
    for (size_t i = 0; i < words.size(); ++i) box.label[i].store(words[i], std::memory_order_release);
    box.size.store(size, std::memory_order_relaxed);
    std::copy_n(static_cast<const char*>(values), size, reinterpret_cast<char*>(own.values[index]));
    box.readers.store(bits, std::memory_order_relaxed);
    box.stamp.store(stamp + (stamp & 1) + 1);
    if (own.used <= index) own.used = static_cast<uint32_t>(index + 1);
    memory_->events[event_of(label)].posts.fetch_add(1);
}

Mailbox::Found Segment::find(size_t rank, const Label& label) const {
    Memory::OfRank& theirs = memory_->of[rank];
    const size_t used = theirs.used;
    for (size_t index = 0; index < used; ++index)
        if (const auto found = label_in(theirs.outboxes[index]); found && *found == label)
            return {theirs.values[index], theirs.outboxes[index].size, index};
    return {};
}

void Segment::done(size_t rank, const Found& found) {
    memory_->of[rank].outboxes[found.place].readers.fetch_and(~(uint64_t{1} << rank_));
}

std::vector<Label> Segment::posted_by(size_t rank) const {
    std::vector<Label> labels;
    for (const Outbox& outbox : memory_->of[rank].outboxes)
        if (const auto found = label_in(outbox)) labels.push_back(*found);
    return labels;
}

// ---- event counts --------------------------------------------------------------------------------------------------

uint32_t Segment::event_of(const Label& label) const {
    uint64_t hash = 0;
    for (const int64_t word : label.words()) hash = (hash ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15u;
    return static_cast<uint32_t>(hash >> 32) % kEvents;
}

void Segment::sleep(uint32_t event, uint32_t seen, double seconds) {
    timespec timeout;
    timeout.tv_sec = static_cast<time_t>(seconds);
    timeout.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
    memory_->events[event].sleepers.fetch_add(1);
    futex(&memory_->events[event].posts, FUTEX_WAIT, seen, &timeout);
    memory_->events[event].sleepers.fetch_sub(1);
}

// A sleeper registers before the kernel compares the number of posts, so a wake-up is never missed. A process that was
// killed asleep stays registered, which costs a call of the kernel.
void Segment::wake(uint32_t event) {
    if (memory_->events[event].sleepers != 0) futex(&memory_->events[event].posts, FUTEX_WAKE, INT_MAX, nullptr);
}

void Segment::advance(uint32_t event) {
    memory_->events[event].posts.fetch_add(1);
    wake(event);
}

// ---- members -------------------------------------------------------------------------------------------------------

int64_t Segment::died(size_t rank) const {
    const int64_t process = memory_->of[rank].process;
    if (rank == rank_ || process == process_) return 0;  // a process does not see its own locks
    struct flock lock = lock_of(rank);
    const bool free = fcntl(file_.number, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
    return free && state_of(rank) == State::kPresent ? process : 0;
}

void Segment::tell(State state, const std::string& reason) {
    Memory::OfRank& own = memory_->of[rank_];
    own.reason[reason.copy(own.reason, kReasonSize - 1)] = 0;
    own.state = state;
    for (uint32_t number = 0; number < kEvents + ranks(); ++number) advance(number);
}

}  // namespace syncbn
