// An MPI whose ranks are in one process, for tests. As with an MPI, a short message has left when it is sent, and a long
// one when its reader takes it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "exchange/mpi.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using syncbn::Mpi;
using Handle = Mpi::Handle;

struct MpiJob;
EXPORTED MpiJob* threads_mpi_job(size_t ranks);
// What the core needs to know of it in a rank. Returns the number of words.
EXPORTED size_t threads_mpi_of(MpiJob* job, size_t rank, Mpi* mpi);
// From now on, this function returns this status to a rank.
EXPORTED void threads_mpi_fail(MpiJob* job, size_t rank, const char* function, int status);
