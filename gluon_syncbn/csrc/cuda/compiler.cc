#include "cuda/compiler.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "failure.h"

namespace syncbn {
namespace cuda {
namespace {

std::string source_path, cache_folder;

template <typename F>
F* nvrtc(const char* name) {
    void* const function = find(name);
    if (function == nullptr) throw Failure(std::string(name) + " is missing: this MXNet was built without NVRTC");
    return reinterpret_cast<F*>(function);
}

template <typename... Parameters>
void call(const char* name, Parameters... parameters) {
    const int status = nvrtc<int(Parameters...)>(name)(parameters...);
    if (status != 0) throw Failure(std::string(name) + ": " + nvrtc<const char*(int)>("nvrtcGetErrorString")(status));
}

// Appends a file with its includes inserted in their place, each once. So NVRTC needs no headers, and this text
// identifies kept results.
void append(const std::string& folder, const std::string& name, std::set<std::string>* seen, std::string* text) {
    if (!seen->insert(name).second) return;
    std::ifstream file(folder + name);
    std::string line;
    while (std::getline(file, line)) {
        if (line.compare(0, 10, "#include \"") == 0)
            append(folder, line.substr(10, line.rfind('"') - 10), seen, text);
        else if (line != "#pragma once")
            *text += line + '\n';
    }
    if (!file.eof()) throw Failure("cannot read " + folder + name + "; install gluon_syncbn again");
}

// FNV-1a, twice with different factors: 128 bits.
std::string hash(const std::string& text) {
    uint64_t a = 0xcbf29ce484222325u, b = 0x84222325cbf29ce4u;
    for (const unsigned char c : text) {
        a = (a ^ c) * 0x100000001b3u;
        b = (b ^ c) * 0x100000001b5u;
    }
    char digits[33];
    std::snprintf(digits, sizeof digits, "%016llx%016llx", static_cast<unsigned long long>(a),
                  static_cast<unsigned long long>(b));
    return digits;
}

// Intermediate code runs on its architecture and on later ones, so the compiler may be older than the device.
int architecture(int capability) {
    int count = 0;
    if (find("nvrtcGetNumSupportedArchs") == nullptr) return capability;
    call("nvrtcGetNumSupportedArchs", &count);
    std::vector<int> known(count);
    call("nvrtcGetSupportedArchs", known.data());
    int best = 0;
    for (int one : known)
        if (one <= capability) best = std::max(best, one);
    if (best == 0)
        throw Failure("NVRTC compiles for no device of compute capability " + std::to_string(capability / 10) + "." +
                      std::to_string(capability % 10));
    return best;
}

std::string compile(const std::string& text, const std::vector<std::string>& options) {
    void* program = nullptr;
    const char** const no_headers = nullptr;
    call("nvrtcCreateProgram", &program, text.c_str(), "kernels.cu", 0, no_headers, no_headers);
    std::vector<const char*> pointers;
    for (const std::string& option : options) pointers.push_back(option.c_str());
    const bool compiles = nvrtc<int(void*, int, const char**)>("nvrtcCompileProgram")(
                              program, static_cast<int>(pointers.size()), pointers.data()) == 0;
    size_t size = 0;
    call(compiles ? "nvrtcGetPTXSize" : "nvrtcGetProgramLogSize", program, &size);
    std::string out(size, '\0');
    call(compiles ? "nvrtcGetPTX" : "nvrtcGetProgramLog", program, &out[0]);
    call("nvrtcDestroyProgram", &program);
    if (!compiles) throw Failure("NVRTC does not compile " + source_path + ": " + out.c_str());
    out.resize(size - 1);  // the last character is a 0
    return out;
}

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return file ? text.str() : "";
}

// Renames, so that another process finds the whole file or none. If the folder cannot be written, the next process has
// to compile again.
void keep(const std::string& path, const std::string& image) {
    for (size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1))
        mkdir(path.substr(0, at).c_str(), 0777);
    const std::string unfinished = path + "." + std::to_string(getpid());
    std::ofstream file(unfinished, std::ios::binary);
    file << image;
    file.close();
    if (!file || std::rename(unfinished.c_str(), path.c_str()) != 0) unlink(unfinished.c_str());
}

}  // namespace

void set_source(const std::string& path) { source_path = path; }

void set_cache(const std::string& folder) { cache_folder = folder; }

const std::string& compiled(int capability, const Part& part, bool anew) {
    static std::mutex mutex;
    // The key is architecture and part.
    static auto& images = *new std::map<std::pair<int, std::string>, std::string>;
    std::lock_guard<std::mutex> lock(mutex);
    const int target = architecture(capability);
    std::string& image = images[{target, part.name()}];
    if (!image.empty() && !anew) return image;
    std::vector<std::string> options = {"--gpu-architecture=compute_" + std::to_string(target), "--std=c++14",
                                        "-DSYNCBN_BLOCK=" + std::to_string(kBlock), "-DSYNCBN_TYPE=" + part.type};
    if (part.activation == kMasked)
        options.push_back("-DSYNCBN_MASKED");
    else if (!part.activation.empty())
        options.push_back("-DSYNCBN_ACTIVATION=" + part.activation);
    const size_t name = source_path.rfind('/', source_path.rfind('/') - 1) + 1;  // after the folder csrc
    std::set<std::string> seen;
    std::string text;
    append(source_path.substr(0, name), source_path.substr(name), &seen, &text);
    int major = 0, minor = 0;
    call("nvrtcVersion", &major, &minor);
    std::string key = text + '\0' + std::to_string(major) + '.' + std::to_string(minor);
    for (const std::string& option : options) key += '\0' + option;
    const std::string path = cache_folder.empty() ? "" : cache_folder + "/" + part.name() + "-" + hash(key) + ".ptx";
    image = path.empty() || anew ? "" : read(path);
    if (image.empty()) {
        image = compile(text, options);
        if (!path.empty()) keep(path, image);
    }
    return image;
}

}  // namespace cuda
}  // namespace syncbn
