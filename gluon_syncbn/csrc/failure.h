// Describes why a step cannot be finished, in fields. MXNet or Python gets it as text.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <vector>

namespace syncbn {

constexpr char kNoMemory[] =
    "no memory is left for this step. Raise the limit (ulimit -v, or that of the container), or use a smaller batch.";

// The text of an exception, for the user.
inline const char* reason_of(const std::exception& error) noexcept {
    return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? kNoMemory : error.what();
}

inline std::string join_names(const std::vector<std::string>& names) {
    std::string out;
    for (const auto& name : names) out += (out.empty() ? "" : ", ") + name;
    return out.empty() ? "nobody" : out;
}

inline std::string title_of(const std::string& layer) { return "SyncBatchNorm '" + layer + "'"; }

class Failure : public std::exception {
  public:
    const std::string layer;   // its name; empty if the reason is not about one layer
    const std::string reason;  // for the user: what happened and what to do

    // A failure of no particular layer.
    explicit Failure(std::string reason) : Failure("", "", "", std::move(reason)) {}
    // `context`: "cpu(1)", if it is about one replica. `call`: "forward of call 3", if it is about all of them.
    Failure(std::string layer, const std::string& context, const std::string& call, std::string reason)
        : layer(std::move(layer)), reason(std::move(reason)) {
        if (!this->layer.empty()) text_ = title_of(this->layer);
        if (!context.empty()) text_ += " on " + context;
        if (!call.empty()) text_ += ", " + call;
        if (!text_.empty()) text_ += ": ";
        text_ += this->reason;
    }

    const char* what() const noexcept override { return text_.c_str(); }

  private:
    std::string text_;
};

}  // namespace syncbn
