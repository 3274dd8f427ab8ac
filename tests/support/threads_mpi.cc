#include "threads_mpi.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr int kTruncated = 15, kNoRequest = 19;         // MPI_ERR_TRUNCATE, MPI_ERR_REQUEST
constexpr size_t kShort = 1 << 16;                      // bytes of a message, at most
constexpr int kLong = 2 << 20;                          // bytes of a sum, at most, so that buckets have an end
constexpr Handle kFloat32 = 4, kFloat64 = 8, kAdd = 1;  // a type is the size of its values
constexpr int kAny = -1;
constexpr void* kInPlace = nullptr;

struct Communicator;

// Values of all ranks that become their sum.
struct Sum {
    std::vector<void*> values;
    size_t come;
    int count;
    Handle type;
    bool done;
};

struct Operation {
    int from, tag;
    std::string message;  // of a short one
    const void* values;
    size_t size;  // bytes
    bool done;
    std::shared_ptr<Sum> sum = nullptr;
    Communicator* made = nullptr;
};
using Shared = std::shared_ptr<Operation>;

struct Member {
    Communicator* of;
    size_t rank;
    size_t sums = 0, copies = 0;   // that it has begun
    std::list<Shared> inbox = {};  // in the order in which they were sent
};

struct Communicator {
    MpiJob* job;
    std::vector<Member> members;
    std::deque<std::shared_ptr<Sum>> sums = {};  // by number, as the next
    std::deque<Communicator> copies = {};
    size_t come = 0;  // ranks that have begun to make it

    explicit Communicator(MpiJob* job, size_t size) : job(job) {
        for (size_t rank = 0; rank < size; ++rank) members.push_back({this, rank});
    }
    Communicator& copy(size_t number) {
        while (copies.size() <= number) copies.emplace_back(job, members.size());
        return copies[number];
    }
    Handle handle(size_t rank) { return reinterpret_cast<Handle>(&members[rank]); }
};

}  // namespace

struct MpiJob {
    explicit MpiJob(size_t ranks) : all(this, ranks) {}

    std::map<std::pair<size_t, std::string>, int> failing;
    Communicator all;
};

namespace {

std::mutex& mutex = *new std::mutex;     // for threads that outlive main
auto& jobs = *new std::vector<MpiJob*>;  // all of them, so that none counts as lost

template <typename T>
void add(Sum& sum) {
    std::vector<T> total(static_cast<size_t>(sum.count));
    for (const void* values : sum.values)
        for (size_t i = 0; i < total.size(); ++i) total[i] += static_cast<const T*>(values)[i];
    for (void* values : sum.values) std::memcpy(values, total.data(), total.size() * sizeof(T));
}

// What a request and a message have in their memory: where an operation is.
void put(void* memory, const Shared& operation) {
    auto* kept = new Shared(operation);
    std::memcpy(memory, &kept, sizeof kept);
}
Shared taken(void* memory) {  // null: there is none
    Shared* kept;
    std::memcpy(&kept, memory, sizeof kept);
    const std::unique_ptr<Shared> owner(kept);
    return kept != nullptr ? *kept : nullptr;
}

Member& member_of(Handle communicator) { return *reinterpret_cast<Member*>(communicator); }
int failure(const Member& member, const char* function) {
    const auto& failing = member.of->job->failing;
    const auto found = failing.find({member.rank, function});
    return found == failing.end() ? 0 : found->second;
}

int MPI_Isend(const void* from, int count, Handle type, int to, int tag, Handle communicator, Mpi::Request* request) {
    const std::lock_guard<std::mutex> lock(mutex);
    Member& member = member_of(communicator);
    if (const int status = failure(member, "MPI_Isend"); status != 0) return status;
    const size_t size = static_cast<size_t>(count) * static_cast<size_t>(type);
    const auto sent =
        std::make_shared<Operation>(Operation{static_cast<int>(member.rank), tag, "", from, size, size <= kShort});
    if (sent->done) sent->message.assign(static_cast<const char*>(from), size);
    member.of->members[static_cast<size_t>(to)].inbox.push_back(sent);
    put(request, sent);
    return 0;
}

int MPI_Improbe(int from, int tag, Handle communicator, int* found, void* message, void* status) {
    const std::lock_guard<std::mutex> lock(mutex);
    Member& member = member_of(communicator);
    const auto next = std::find_if(member.inbox.begin(), member.inbox.end(), [&](const Shared& sent) {
        return (from == kAny || from == sent->from) && (tag == kAny || tag == sent->tag);
    });
    *found = next != member.inbox.end();
    if (*found != 0) {
        put(message, *next);
        std::memcpy(status, &(*next)->size, sizeof(size_t));
        member.inbox.erase(next);
    }
    return 0;
}

int MPI_Get_count(const void* status, Handle type, int* count) {
    size_t size;
    std::memcpy(&size, status, sizeof size);
    *count = static_cast<int>(size / static_cast<size_t>(type));
    return 0;
}

int MPI_Imrecv(void* to, int count, Handle type, void* message, Mpi::Request* request) {
    const std::lock_guard<std::mutex> lock(mutex);
    const Shared sent = taken(message);
    if (sent->size > static_cast<size_t>(count) * static_cast<size_t>(type)) return kTruncated;
    std::memcpy(to, sent->done ? sent->message.data() : sent->values, sent->size);
    sent->done = true;
    put(request, sent);
    return 0;
}

int MPI_Iallreduce(const void* from, void* values, int count, Handle type, Handle, Handle communicator,
                   Mpi::Request* request) {
    const std::lock_guard<std::mutex> lock(mutex);
    Member& member = member_of(communicator);
    if (const int status = failure(member, "MPI_Iallreduce"); status != 0) return status;
    if (count * type > kLong) return kTruncated;
    auto& sums = member.of->sums;
    if (member.sums == sums.size())
        sums.push_back(
            std::make_shared<Sum>(Sum{std::vector<void*>(member.of->members.size()), 0, count, type, false}));
    const std::shared_ptr<Sum> sum = sums[member.sums++];
    if (sum->count != count || sum->type != type) return kTruncated;
    if (from != kInPlace) std::memcpy(values, from, static_cast<size_t>(count * type));
    sum->values[member.rank] = values;
    ++sum->come;
    put(request, std::make_shared<Operation>(Operation{0, 0, "", nullptr, 0, false, sum}));
    return 0;
}

int MPI_Comm_idup(Handle communicator, Handle* made, Mpi::Request* request) {
    const std::lock_guard<std::mutex> lock(mutex);
    Member& member = member_of(communicator);
    Communicator& copy = member.of->copy(member.copies++);
    ++copy.come;
    *made = copy.handle(member.rank);
    put(request, std::make_shared<Operation>(Operation{0, 0, "", nullptr, 0, false, nullptr, &copy}));
    return 0;
}

int MPI_Test(Mpi::Request* request, int* done, void*) {
    const std::lock_guard<std::mutex> lock(mutex);
    const Shared operation = taken(request);
    if (operation == nullptr) return kNoRequest;
    const auto [sum, made] = std::make_pair(operation->sum.get(), operation->made);
    if (sum != nullptr) {
        if (!sum->done && sum->come == sum->values.size()) {
            sum->type == kFloat64 ? add<double>(*sum) : add<float>(*sum);
            sum->done = true;
        }
        operation->done = sum->done;
    }
    if (made != nullptr) {  // MPICH says here, and not before, that it has none left
        if (const int status = failure(made->members[0], "MPI_Comm_idup"); status != 0) return status;
        operation->done = made->come == made->members.size();
    }
    *done = operation->done;
    if (*done == 0) put(request, operation);
    return 0;
}

}  // namespace

EXPORTED MpiJob* threads_mpi_job(size_t ranks) {
    const std::lock_guard<std::mutex> lock(mutex);
    jobs.push_back(new MpiJob(ranks));
    return jobs.back();
}

EXPORTED size_t threads_mpi_of(MpiJob* job, size_t rank, Mpi* mpi) {
    const std::lock_guard<std::mutex> lock(mutex);
    mpi->send = MPI_Isend;
    mpi->probe = MPI_Improbe;
    mpi->receive = MPI_Imrecv;
    mpi->count = MPI_Get_count;
    mpi->test = MPI_Test;
    mpi->all_reduce = MPI_Iallreduce;
    mpi->duplicate = MPI_Comm_idup;
    mpi->in_place = kInPlace;
    mpi->any_rank = mpi->any_tag = kAny;
    mpi->float32 = kFloat32;
    mpi->float64 = kFloat64;
    mpi->add = kAdd;
    mpi->communicator = job->all.handle(rank);
    return sizeof *mpi / sizeof(Handle);
}

EXPORTED void threads_mpi_fail(MpiJob* job, size_t rank, const char* function, int status) {
    const std::lock_guard<std::mutex> lock(mutex);
    job->failing[{rank, function}] = status;
}
