#include "exchange/segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <utility>

namespace syncbn {
namespace {

constexpr size_t kOutboxes = 256;  // of a rank, which limits its simultaneous exchanges
constexpr size_t kRings = 256;
constexpr size_t kTokenSize = 16;
constexpr size_t kReasonSize = 1024;
constexpr size_t kCores = CPU_SETSIZE;

[[noreturn]] void fail(const char* what) { throw std::runtime_error(std::string(what) + ": " + std::strerror(errno)); }

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

// The lock on a rank's byte ends with the rank's process, however that ends, and never earlier. A child of a fork has
// none.
struct flock byte_of(size_t rank, short type) {
    struct flock lock = {};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = static_cast<off_t>(rank);
    lock.l_len = 1;
    return lock;
}

}  // namespace

struct alignas(64) Segment::Member {
    std::atomic<uint32_t> state;
    std::atomic<uint32_t> outboxes;  // the number that has been used
    std::atomic<int64_t> process;
    std::atomic<uint64_t> cores[kCores / 64];  // bits of the cores that it may run on
    char reason[kReasonSize];                  // complete before the state changes
};

struct alignas(64) Segment::Ring {
    std::atomic<uint32_t> posts, sleepers;
};

struct alignas(64) Segment::Outbox {  // whoever looks reads one cache line
    std::atomic<uint64_t> readers;    // bits of ranks that have not read it; 0 if it is free
    std::atomic<int64_t> label[5];
    std::atomic<uint32_t> stamp;  // odd while something is posted, and never repeated
    std::atomic<uint64_t> size;   // bytes
};

Segment::Segment(size_t ranks, size_t rank, int file) : Mailbox(rank, ranks), file_{file} {
    // Of so many bytes, in pages.
    const auto place = [&](size_t size) { return std::exchange(size_, size_ + (size + 4095) / 4096 * 4096); };
    const size_t token = place(kTokenSize), members = place(ranks * sizeof(Member));
    const size_t rings = place((kRings + ranks) * sizeof(Ring)), outboxes = place(ranks * kOutboxes * sizeof(Outbox));
    const size_t vectors = place(ranks * kOutboxes * kMostValues * sizeof(double));
    const size_t lanes = place(ranks * sizeof(Lane)), pieces = place(ranks * kPieces * kPiece);
    struct stat is;
    if (rank == 0 && fchmod(file, 0600) != 0) fail("fchmod");
    if (rank == 0 && ftruncate(file, static_cast<off_t>(size_)) != 0) fail("ftruncate");
    if (fstat(file, &is) != 0) fail("fstat");
    if (static_cast<size_t>(is.st_size) != size_) throw std::runtime_error("it is another file");
    void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (memory == MAP_FAILED) fail("mmap");
    memory_ = static_cast<char*>(memory);
    token_ = memory_ + token;
    members_ = reinterpret_cast<Member*>(memory_ + members);
    rings_ = reinterpret_cast<Ring*>(memory_ + rings);
    outboxes_ = reinterpret_cast<Outbox*>(memory_ + outboxes);
    values_ = reinterpret_cast<double*>(memory_ + vectors);
    lanes_ = reinterpret_cast<Lane*>(memory_ + lanes);
    pieces_ = memory_ + pieces;
}

void Segment::present() {
    struct flock lock = byte_of(rank_, F_WRLCK);
    if (fcntl(file_.number, F_SETLK, &lock) != 0) fail("fcntl(F_SETLK)");
    members_[rank_].process = process_;
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) != 0)
        CPU_ZERO(&cores);  // the machine may have more: we count it as crowded
    for (size_t core = 0; core < kCores; ++core)
        if (CPU_ISSET(core, &cores)) members_[rank_].cores[core / 64] |= uint64_t{1} << core % 64;
    members_[rank_].state = static_cast<uint32_t>(State::kPresent);
}

std::unique_ptr<Segment> Segment::create(size_t ranks) {
    if (ranks > kMostRanks)
        throw std::runtime_error("a machine has more than " + std::to_string(kMostRanks) + " processes");
    const int file = static_cast<int>(syscall(SYS_memfd_create, "gluon_syncbn", 1u));  // MFD_CLOEXEC
    if (file < 0) fail("memfd_create");
    std::unique_ptr<Segment> made(new Segment(ranks, 0, file));
    std::FILE* random = std::fopen("/dev/urandom", "rb");
    const bool read = random != nullptr && std::fread(made->token_, kTokenSize, 1, random) == 1;
    if (random != nullptr) std::fclose(random);
    if (!read) throw std::runtime_error("cannot read /dev/urandom");
    made->present();
    return made;
}

std::unique_ptr<Segment> Segment::open(size_t ranks, size_t rank, int64_t process, int number,
                                       const std::string& token) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%lld/fd/%d", static_cast<long long>(process), number);
    const int file = ::open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) fail(path);
    std::unique_ptr<Segment> opened(new Segment(ranks, rank, file));
    if (opened->token() != token) throw std::runtime_error(std::string(path) + " is of another process");
    opened->present();
    return opened;
}

Segment::~Segment() {
    if (memory_ != nullptr) munmap(memory_, size_);
}

Segment::File::~File() { close(number); }

std::string Segment::token() const { return std::string(token_, kTokenSize); }

Segment::Outbox& Segment::outbox(size_t rank, size_t index) const { return outboxes_[rank * kOutboxes + index]; }

double* Segment::values(size_t rank, size_t index) const { return values_ + (rank * kOutboxes + index) * kMostValues; }

// ---- vectors -------------------------------------------------------------------------------------------------------

void Segment::write(const Label& label, const void* values, size_t size, const Ranks& readers) {
    uint64_t bits = 0;
    for (const size_t reader : readers) bits |= uint64_t{1} << reader;
    std::atomic<uint32_t>& used = members_[rank_].outboxes;
    size_t index = 0;  // the lowest free one: the last used is in a cache
    while (index < kOutboxes && outbox(rank_, index).readers != 0) ++index;
    if (index == kOutboxes)
        throw std::runtime_error(std::to_string(kOutboxes) +
                                 " exchanges wait at once for the processes of this machine");
    Outbox& box = outbox(rank_, index);
    // A reader of a half-written label sees that the stamp has changed.
    const uint32_t stamp = box.stamp.load(std::memory_order_relaxed);
    box.stamp.store(stamp + (stamp & 1), std::memory_order_relaxed);
    const int64_t fields[] = {label.key, label.node, label.call, label.phase, label.piece};
    for (size_t i = 0; i < 5; ++i) box.label[i].store(fields[i], std::memory_order_release);
    box.size.store(size, std::memory_order_relaxed);
    if (size <= kMostValues * sizeof(double))
        std::copy_n(static_cast<const char*>(values), size, reinterpret_cast<char*>(this->values(rank_, index)));
    box.readers.store(bits, std::memory_order_relaxed);
    box.stamp.store(stamp + (stamp & 1) + 1);
    if (used <= index) used = static_cast<uint32_t>(index + 1);
    rings_[ring_of(label)].posts.fetch_add(1);
}

Mailbox::Found Segment::find(size_t rank, const Label& label) const {
    const uint64_t own = uint64_t{1} << rank_;
    const size_t used = members_[rank].outboxes;
    for (size_t index = 0; index < used; ++index) {
        const Outbox& box = outbox(rank, index);
        const uint32_t stamp = box.stamp.load();
        if ((stamp & 1) == 0 || (box.readers & own) == 0) continue;
        int64_t at[5];
        for (size_t i = 0; i < 5; ++i) at[i] = box.label[i].load(std::memory_order_acquire);
        if (box.stamp != stamp || !(Label{at[0], at[1], at[2], at[3], at[4]} == label)) continue;
        return {values(rank, index), box.size, index};
    }
    return {};
}

void Segment::done(size_t rank, const Label&, const Found& found) {
    outbox(rank, found.place).readers.fetch_and(~(uint64_t{1} << rank_));
}

std::vector<Label> Segment::left_by(size_t rank) const {
    std::vector<Label> labels;
    const size_t used = members_[rank].outboxes;
    for (size_t index = 0; index < used; ++index) {
        const Outbox& box = outbox(rank, index);
        const uint32_t stamp = box.stamp.load();
        if ((stamp & 1) == 0 || (box.readers & uint64_t{1} << rank_) == 0) continue;
        const Label label{box.label[0], box.label[1], box.label[2], box.label[3], box.label[4]};
        if (box.stamp.load() == stamp) labels.push_back(label);
    }
    return labels;
}

// ---- rings ---------------------------------------------------------------------------------------------------------

uint32_t Segment::ring_of(const Label& label) const {
    uint64_t hash = 0;
    for (const int64_t field : {label.key, label.node, label.call, label.phase, label.piece})
        hash = (hash ^ static_cast<uint64_t>(field)) * 0x9E3779B97F4A7C15u;
    return static_cast<uint32_t>(hash >> 32) % kRings;
}

uint32_t Segment::ring_of(size_t rank) { return static_cast<uint32_t>(kRings + rank); }

uint32_t Segment::heard(uint32_t ring) { return rings_[ring].posts; }

void Segment::sleep(uint32_t ring, uint32_t seen, double seconds) {
    timespec timeout;
    timeout.tv_sec = static_cast<time_t>(seconds);
    timeout.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
    rings_[ring].sleepers.fetch_add(1);
    futex(&rings_[ring].posts, FUTEX_WAIT, seen, &timeout);
    rings_[ring].sleepers.fetch_sub(1);
}

// A sleeper registers before the kernel compares the number of posts, so a wake-up is never missed. A process that was
// killed asleep stays registered, which costs a call of the kernel.
void Segment::wake(uint32_t ring) {
    if (rings_[ring].sleepers != 0) futex(&rings_[ring].posts, FUTEX_WAKE, INT_MAX, nullptr);
}

void Segment::ring(uint32_t ring) {
    rings_[ring].posts.fetch_add(1);
    wake(ring);
}

// ---- members -------------------------------------------------------------------------------------------------------

Mailbox::State Segment::state_of(size_t rank) const { return static_cast<State>(members_[rank].state.load()); }

bool Segment::crowded() const {
    if (cores_ == 0) {
        size_t cores = 0;
        for (size_t word = 0; word < kCores / 64; ++word) {
            uint64_t bits = 0;
            for (size_t rank = 0; rank < ranks(); ++rank) {
                if (state_of(rank) == State::kAbsent) return true;
                bits |= members_[rank].cores[word];
            }
            cores += static_cast<size_t>(__builtin_popcountll(bits));
        }
        cores_ = static_cast<int>(std::max<size_t>(1, std::min(cores, ranks())));
    }
    return static_cast<size_t>(cores_) < ranks();
}

int64_t Segment::died(size_t rank) const {
    const int64_t process = members_[rank].process;
    if (rank == rank_ || process == process_) return 0;  // a process does not see its own locks
    struct flock lock = byte_of(rank, F_WRLCK);
    const bool free = fcntl(file_.number, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
    return free && state_of(rank) == State::kPresent ? process : 0;
}

std::string Segment::reason_of(size_t rank) const { return members_[rank].reason; }

void Segment::leave(State state, const std::string& reason) {
    Member& member = members_[rank_];
    if (!is_own() || state_of(rank_) != State::kPresent) return;
    const size_t size = std::min(reason.size(), kReasonSize - 1);
    std::copy(reason.begin(), reason.begin() + static_cast<int64_t>(size), member.reason);
    member.reason[size] = 0;
    member.state = static_cast<uint32_t>(state);
    for (uint32_t number = 0; number < kRings + ranks(); ++number) ring(number);
}

}  // namespace syncbn
