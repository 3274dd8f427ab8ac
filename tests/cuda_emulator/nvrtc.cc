// NVRTC: compiles CUDA C++ with g++ into a shared library. What it calls PTX is a text that names the library;
// driver.cc opens it.
#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

enum Result : int {
    kSuccess = 0,
    kInvalidInput = 3,
    kInvalidProgram = 4,
    kCompilation = 6,
    kInternal = 11,
};

// What __global__ stands for: found again in the preprocessed text, and in nothing else there.
const char* const kGlobal = "__attribute__((used, noinline, noclone))";

// no-gnu-unique, hidden: a library must not find its variables in another that was loaded before.
// What is misaligned or has an index outside of its array ends in a trap.
// gnu++14 has __integer_pack.
const char* const kFlags =
    "-std=gnu++14 -O1 -g1 -fPIC -fvisibility=hidden -fno-gnu-unique -fno-exceptions -fno-rtti -fno-threadsafe-statics "
    "-ffp-contract=off -fno-stack-protector -fsanitize=alignment,bounds -fsanitize-undefined-trap-on-error "
    "-Wall -Wno-attributes -Wno-unknown-pragmas -Wno-unused-function -Wno-unused-variable";

struct Program {
    std::string source, name, log, ptx;
    bool compiled = false;
};

std::string folder() {  // the one that holds lib/, include/ and kernels/
    static const std::string path = [] {
        Dl_info info;
        dladdr(reinterpret_cast<void*>(&folder), &info);
        char* const whole = realpath(info.dli_fname, nullptr);
        std::string text(whole ? whole : info.dli_fname);
        std::free(whole);
        for (int up = 0; up < 2; ++up) text.erase(text.rfind('/'));
        return text;
    }();
    return path;
}

std::string read(const std::string& path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

std::string quoted(const std::string& text) {
    std::string result = "'";
    for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return result + "'";
}

bool shell(const std::string& command) {
    const int status = std::system(("LC_ALL=C; export LC_ALL; " + command).c_str());
    return status != -1 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::string compiler() {
    const char* const chosen = std::getenv("CXX");
    return chosen && *chosen ? chosen : "g++";
}

// The names of all `extern "C" __global__ void` functions of a preprocessed text.
std::set<std::string> exported_kernels(const std::string& text) {
    static const std::regex kernel(
        R"(extern\s+"C"\s+__attribute__\(\(used, noinline, noclone\)\)\s+void\s+(\w+)\s*\()");
    using Names = std::sregex_token_iterator;
    return {Names(text.begin(), text.end(), kernel, 1), Names()};
}

Result compile(Program* program, const std::vector<std::string>& options) {
    std::string architecture = "52";
    for (const std::string& option : options)  // or --std=c++14: the core and MXNet write no other options
        if (const size_t at = option.find('_'); at != std::string::npos) architecture = option.substr(at + 1);
    const std::string shim = folder() + "/include/shim.h";
    // What else the results depend on is a new build of the emulator.
    const size_t key = std::hash<std::string>()(program->source + '\0' + program->name + '\0' + compiler());
    const std::string library = folder() + "/kernels/" + std::to_string(key) + ".so";

    struct stat status;
    if (stat(library.c_str(), &status) != 0) {
        mkdir((folder() + "/kernels").c_str(), 0777);
        const std::string base = library + "." + std::to_string(getpid()) + "." +
                                 std::to_string(reinterpret_cast<uintptr_t>(program) & 0xffffff);
        const std::string input = base + ".cu", preprocessed = base + ".ii", log = base + ".log";
        const std::string messages = " 2>>" + quoted(log);
        std::ofstream(input) << "#line 1 \"" << program->name << "\"\n" << program->source;
        bool good = shell(compiler() + " -x c++ -E -nostdinc -include " + quoted(shim) + " " +
                          quoted(std::string("-D__global__=") + kGlobal) + " " + kFlags + " " + quoted(input) + " -o " +
                          quoted(preprocessed) + messages);
        if (good) {
            std::ofstream table(preprocessed, std::ios::app);
            table << "\n# 1 \"kernels\"\nextern \"C\" __attribute__((visibility(\"default\"))) const EmulatedKernel "
                     "emulated_kernels[] = {\n";
            for (const std::string& name : exported_kernels(read(preprocessed)))
                table << "    EmulatedEntry<decltype(&::" << name << "), &::" << name << ">::make(\"" << name
                      << "\"),\n";
            table << "    {nullptr, 0, nullptr, nullptr}};\n";
        }
        good =
            good && shell(compiler() + " -shared -Wl,-z,defs " + kFlags + " -x c++-cpp-output " + quoted(preprocessed) +
                          " -o " + quoted(base) + " -L" + quoted(folder() + "/lib") + " -l:libcuda.so.1" + messages);
        program->log += read(log);
        for (const std::string& file : {input, preprocessed, log}) unlink(file.c_str());
        // A rename, so that another process finds all of it or nothing.
        if (good && std::rename(base.c_str(), library.c_str()) != 0) return kInternal;
        if (!good) return kCompilation;
    }
    program->ptx = "// CUDA emulator\n// architecture " + architecture + "\n// library " + library + "\n";
    program->compiled = true;
    return kSuccess;
}

}  // namespace

extern "C" {

Result nvrtcVersion(int* major, int* minor) {
    *major = 11;
    *minor = 2;
    return kSuccess;
}

Result nvrtcCreateProgram(Program** out, const char* source, const char* name, int headers, const char* const*,
                          const char* const*) {
    if (!out || !source || headers != 0) return kInvalidInput;
    *out = new Program;
    (*out)->source = source;
    (*out)->name = name ? name : "default_program";
    return kSuccess;
}
Result nvrtcDestroyProgram(Program** program) {
    if (!program || !*program) return kInvalidProgram;
    delete *program;
    *program = nullptr;
    return kSuccess;
}
Result nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    return compile(program, std::vector<std::string>(options, options + count));
}
Result nvrtcGetPTXSize(Program* program, size_t* out) {
    if (!program->compiled) return kInvalidProgram;
    *out = program->ptx.size() + 1;
    return kSuccess;
}
Result nvrtcGetPTX(Program* program, char* out) {
    if (!program->compiled) return kInvalidProgram;
    std::memcpy(out, program->ptx.c_str(), program->ptx.size() + 1);
    return kSuccess;
}
Result nvrtcGetProgramLogSize(Program* program, size_t* out) {
    *out = program->log.size() + 1;
    return kSuccess;
}
Result nvrtcGetProgramLog(Program* program, char* out) {
    std::memcpy(out, program->log.c_str(), program->log.size() + 1);
    return kSuccess;
}
const char* nvrtcGetErrorString(Result result) { return result == kSuccess ? "NVRTC_SUCCESS" : "NVRTC_ERROR"; }
}
