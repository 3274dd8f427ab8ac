// The functions that Python calls. The Makefile takes their declarations from csrc.
#pragma once

#include "exchange/exchange.h"
#include "exchange/mpi.h"
#include "meeting/tape.h"
#include "types.h"

using syncbn::Asked;
using syncbn::Span;
using NDArrayHandle = void*;

constexpr char kProcess[] = "this:";  // begins the names of layers in graphs

#define SYNCBN_API(result, name, ...) extern result (*syncbn_##name)(__VA_ARGS__)
extern "C" {
#include "functions.h"
}

inline std::string text_of(const Span<const char>* text) { return {text->begin(), text->end()}; }
