// The functions of csrc/api.cc that this program calls; `_native.py` has the same list.
#pragma once

#include <cstdint>

#include "exchange/python.h"
#include "span.h"

extern "C" {
int syncbn_register(void* library, const syncbn::Span<void*>& functions);
int64_t syncbn_layer_create(const char* name, int mode, int64_t virtual_devices, int64_t group,
                            const syncbn::Span<const int>& groups);
int64_t syncbn_layers();
bool syncbn_contexts_are_shared();
void syncbn_layer_drop(int64_t layer);
const char* syncbn_layer_token(int64_t layer);
int syncbn_layer_place(int64_t layer, const syncbn::Span<const char*>& contexts, int64_t replicas);
int syncbn_layer_timeout(int64_t layer, double seconds);
int syncbn_layer_exchange(int64_t layer, void* exchange);
int syncbn_default_timeout(double seconds);
double syncbn_timeout_of(int64_t layer);
void* syncbn_wait_begin(const char* what, const char* rank, double timeout, double warn_after);
int syncbn_wait_is_late(void* wait, const char* missing);
void syncbn_wait_end(void* wait);
int syncbn_default_exchange(void* exchange);
void* syncbn_memory_exchange(const char* gpus);
void* syncbn_kvstore_exchange(int64_t number);
void* syncbn_processes(int64_t number, int64_t rank, int64_t ranks, const void* mpi);
void* syncbn_exchange_machine(void* processes, void* segment, const syncbn::Span<const size_t>& ranks,
                              const syncbn::Span<const size_t>& leaders);
void syncbn_python_functions(const syncbn::PythonFunctions* functions);
int syncbn_deliver(void* processes, int64_t from, const syncbn::Span<const int64_t>& label, int64_t length,
                   const char* values, int64_t count);
int syncbn_devices(const syncbn::Span<const char*>& contexts);
int syncbn_seed(uint64_t seed);
void syncbn_fail(const char* reason);
const char* syncbn_failure();
int syncbn_reset();
void syncbn_nobody_left(bool so);
int syncbn_close();
void syncbn_forking(bool inside);
void syncbn_debug(bool so);
const char* syncbn_next_record(double seconds);
const char* syncbn_slowest();
}
