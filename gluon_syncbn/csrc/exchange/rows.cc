#include "exchange/rows.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "failure.h"

namespace syncbn {
namespace {

std::string text_of(const RowsHead& head) {
    return "rows of " + std::to_string(head.values) + " values of " + name_of(head.type);
}

}  // namespace

Vector RowsHead::packed() const {
    return {static_cast<double>(rows), static_cast<double>(values), static_cast<double>(static_cast<int>(type)),
            static_cast<double>(expected)};
}

std::vector<RowsHead> heads_of(const Vector& packed) {
    std::vector<RowsHead> heads;
    for (size_t at = 0; at < packed.size(); at += RowsHead::kLength)
        heads.push_back({static_cast<int64_t>(packed[at]), static_cast<int64_t>(packed[at + 1]),
                         static_cast<Type>(static_cast<int>(packed[at + 2])), static_cast<int64_t>(packed[at + 3])});
    return heads;
}

int64_t first_row_of(const std::vector<RowsHead>& heads, size_t own) {
    int64_t first = 0, sum = 0;
    std::string counts;
    for (size_t i = 0; i < heads.size(); ++i) {
        if (heads[i].values != heads[own].values || heads[i].type != heads[own].type)
            throw Failure(text_of(heads[own]) + " met " + text_of(heads[i]) +
                          ". All replicas need rows of one shape and type.");
        if (i == own) first = sum;
        sum += heads[i].rows;
        counts += (i == 0 ? "" : ", ") + std::to_string(heads[i].rows);
    }
    const auto wrong = [&](const RowsHead& head) { return head.expected != sum; };
    const auto other = std::find_if(heads.begin(), heads.end(), wrong);
    if (other == heads.end()) return first;
    const int64_t expected = wrong(heads[own]) ? heads[own].expected : other->expected;
    throw Failure("the parts have " + counts + " rows, " + std::to_string(sum) + " in all, where " +
                  std::to_string(expected) + " were expected. Give gather(..., rows=" + std::to_string(sum) +
                  ") in all of them.");
}

Vector contribution_of(const RowsHead& head, const void* rows) {
    Vector out = head.packed();
    out.resize(RowsHead::kLength + static_cast<size_t>(doubles_for(head.bytes())));
    if (head.bytes() > 0) std::memcpy(&out[RowsHead::kLength], rows, static_cast<size_t>(head.bytes()));
    return out;
}

Rows rows_of(const Total& total) {
    Vector packed;
    size_t own = 0;
    std::vector<const double*> values;
    for (size_t at = 0; at < total.values.size();) {
        const double* const part = &total.values[at];
        if (at == total.first) own = values.size();
        packed.insert(packed.end(), part, part + RowsHead::kLength);
        values.push_back(part + RowsHead::kLength);
        at += RowsHead::kLength + static_cast<size_t>(doubles_for(heads_of({part, values.back()})[0].bytes()));
    }
    const std::vector<RowsHead> heads = heads_of(packed);
    Rows rows{{}, first_row_of(heads, own)};
    int64_t bytes = 0;
    for (const RowsHead& head : heads) bytes += head.bytes();
    rows.all.resize(static_cast<size_t>(doubles_for(bytes)));
    char* to = reinterpret_cast<char*>(rows.all.data());
    for (size_t i = 0; i < heads.size(); ++i) {
        if (heads[i].bytes() > 0) std::memcpy(to, values[i], static_cast<size_t>(heads[i].bytes()));
        to += heads[i].bytes();
    }
    return rows;
}

}  // namespace syncbn
