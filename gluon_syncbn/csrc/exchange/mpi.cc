#include "exchange/mpi.h"

#include <stdexcept>
#include <string>

namespace syncbn {

bool Mpi::has_ended(Request* request) const {
    alignas(std::max_align_t) char status[256];
    int ended = 0;
    check(test(request, &ended, status));
    return ended != 0;
}

void Mpi::check(int status) {
    if (status != 0) throw std::runtime_error("MPI reports error " + std::to_string(status));
}

}  // namespace syncbn
