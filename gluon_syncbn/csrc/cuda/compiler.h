// Compiles kernels.cu with NVRTC, in parts, once for each architecture, and keeps the results on disk.
#pragma once

#include <string>

namespace syncbn {
namespace cuda {

// Sets the path of the source, and the folder of compiled kernels (empty: none is kept). Read at the first use.
void set_source(const std::string& path);
void set_cache(const std::string& folder);

// The kernels of one type of data that depend on one activation. If that is empty: kernels without an activation, and
// those that depend on none. If it is `kMasked`: those that take a mask, for all activations.
constexpr const char* kMasked = "masked";
struct Part {
    std::string type, activation;
    std::string name() const { return activation.empty() ? type : activation + "_" + type; }
};

// Returns intermediate code of a part, for this compute capability (80 for 8.0). `anew` ignores the kept results.
const std::string& compiled(int capability, const Part& part, bool anew = false);

}  // namespace cuda
}  // namespace syncbn
