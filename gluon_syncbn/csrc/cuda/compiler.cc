// Compiles kernels.cu with NVRTC.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iterator>

#include "cuda/driver.h"
#include "failure.h"

namespace syncbn::cuda {
namespace {

template <typename... Arguments>
void nvrtc(const char* name, Arguments... arguments) {
    const int status = call(need(name, "NVRTC"), arguments...);
    if (status == 0) return;
    const char* (*const text)(int) = need("nvrtcGetErrorString", "NVRTC");
    throw Failure(std::string(name) + ": " + text(status));
}

// The kernels behind the headers that they include. So NVRTC needs none, and this text identifies what is cached.
std::string source() {
    std::string text;
    for (const char* name : {"activation.h", "plain.h", "cuda/params.h", "cuda/kernels.cu"}) {
        const std::string path = setup.csrc + "/" + name;
        std::ifstream file(path);
        for (std::string line; std::getline(file, line);)
            if (line.compare(0, 10, "#include \"") != 0 && line != "#pragma once") text += line + '\n';
        if (!file.eof()) throw Failure("cannot read " + path + "; install gluon_syncbn again");
    }
    return text;
}

std::string compile(const std::string& text) {
    void* program = nullptr;
    nvrtc("nvrtcCreateProgram", &program, text.c_str(), "kernels.cu", 0, nullptr, nullptr);
    // The oldest architecture that MXNet has code for. Intermediate code runs on later ones too, and NVRTC writes the same
    // for them.
    const char* options[] = {"--gpu-architecture=compute_50", "--std=c++14"};
    const bool compiles = call(need("nvrtcCompileProgram", "NVRTC"), program, 2, options) == 0;
    size_t size = 0;
    nvrtc(compiles ? "nvrtcGetPTXSize" : "nvrtcGetProgramLogSize", program, &size);
    std::string out(size, '\0');
    nvrtc(compiles ? "nvrtcGetPTX" : "nvrtcGetProgramLog", program, &out[0]);
    nvrtc("nvrtcDestroyProgram", &program);
    if (!compiles) throw Failure(std::string("NVRTC does not compile kernels.cu: ") + out.c_str());
    out.resize(size - 1);  // the last character is a 0
    return out;
}

// Renames, so that another process finds the whole file or none. If the folder cannot be written, the next process has
// to compile again.
void cache(const std::string& path, const std::string& image) {
    for (size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1))
        mkdir(path.substr(0, at).c_str(), 0777);
    const std::string unfinished = path + "." + std::to_string(getpid());
    std::ofstream file(unfinished, std::ios::binary);
    file << image;
    file.close();
    if (!file || std::rename(unfinished.c_str(), path.c_str()) != 0) unlink(unfinished.c_str());
}

}  // namespace

const std::string& compiled(const std::string& line, bool anew) {
    static Mutex mutex;
    static auto& images = *new std::map<std::string, std::string>;  // by line
    std::lock_guard<std::mutex> lock(mutex);
    std::string& image = images[line];
    if (!image.empty() && !anew) return image;
    const std::string text = source() + line + '\n';
    int major = 0, minor = 0;
    nvrtc("nvrtcVersion", &major, &minor);
    const std::string key = text + std::to_string(major) + "." + std::to_string(minor);
    const std::string path = setup.cache + "/kernels-" + std::to_string(std::hash<std::string>()(key)) + ".ptx";
    std::ifstream cached(path, std::ios::binary);
    image = anew ? "" : std::string(std::istreambuf_iterator<char>(cached), {});
    if (image.empty()) {
        image = compile(text);
        cache(path, image);
    }
    return image;
}

}  // namespace syncbn::cuda
