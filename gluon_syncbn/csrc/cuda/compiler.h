// kernels.cu, compiled by NVRTC in parts, once for each architecture, and kept on disk.
#pragma once

#include <string>

namespace syncbn {
namespace cuda {

// Where the source is, and the folder in which what was compiled is kept; none where that is empty. Read at the first use.
void set_source(const std::string& path);
void set_cache(const std::string& folder);

// The part that has a kernel: with the names that end like its, such as "activated_float32".
std::string part_of(const std::string& kernel);

// Intermediate code of a part, for a device of this compute capability (80 for 8.0). `anew`: not what was kept.
const std::string& compiled(int capability, const std::string& part, bool anew = false);

}  // namespace cuda
}  // namespace syncbn
