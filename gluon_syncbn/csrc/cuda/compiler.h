// kernels.cu, compiled by NVRTC in parts, once for each architecture, and kept on disk.
#pragma once

#include <string>

namespace syncbn {
namespace cuda {

// Where the source is, and the folder in which what was compiled is kept; none where that is empty. Read at the first use.
void set_source(const std::string& path);
void set_cache(const std::string& folder);

// kernels.cu and the headers of csrc that it includes, as one text.
std::string source(const std::string& path);

// The kernels of a type of data that depend on an activation or, where that is empty, those that depend on none and those
// without an activation.
struct Part {
    std::string type, activation;
    std::string name() const { return activation.empty() ? type : activation + "_" + type; }
};

// Intermediate code of a part, for a device of this compute capability (80 for 8.0). `anew`: not what was kept.
const std::string& compiled(int capability, const Part& part, bool anew = false);

}  // namespace cuda
}  // namespace syncbn
