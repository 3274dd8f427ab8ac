// The functions of csrc/api.cc. The Makefile takes their declarations from there.
#pragma once

#include <cstdint>

#include "exchange/machines.h"
#include "exchange/python.h"
#include "types.h"

using syncbn::Span;
using NDArrayHandle = void*;

constexpr char kProcess[] = "this:";  // begins the names of layers in graphs

extern "C" {
#include "functions.h"
}
