// Defines a part of a list, from `begin` up to `end`; for kernels, too.
#pragma once

namespace syncbn {

struct Range {
    int begin, end;
};

}  // namespace syncbn
