#include "exchange/exchange.h"
#include "exchange/python.h"

namespace syncbn {
namespace {

class MxnetKvstore : public Exchange {
  public:
    explicit MxnetKvstore(int64_t number) : number_(number) {}

    // It takes as long as the interpreter and MXNet's engine like.
    Underway begin(Combine combine, const CallId& id, const Contribution& own) override {
        return later([=] {
            if (own.rows.size() == 1 || own.length == 0) return Total{combined(Combine::kSideBySide, own), 0, id.layer};
            Vector rows;
            for (const double* row : own.rows) rows.insert(rows.end(), row, row + own.length);
            return Total{combine == Combine::kAdd ? add_in_python(number_, id, rows, own.length)
                                                  : merged(id, std::move(rows), own.length),
                         0, id.layer};
        });
    }

  private:
    // A store can only add. Sums of squares about 0 lose the digits that an offset of the data takes. So the squares are
    // taken about a mean that is near all rows.
    Vector merged(const CallId& id, Vector rows, size_t length) const {
        const size_t channels = length / 2;
        size_t most = 0;  // where the row with the most values begins
        for (size_t at = 0; at < rows.size(); at += length)
            if (rows[at] > rows[most]) most = at;
        const Vector origin(rows.begin() + static_cast<int64_t>(most) + 1,
                            rows.begin() + static_cast<int64_t>(most + 1 + channels));
        for (size_t at = 0; at < rows.size(); at += length) {
            const double count = rows[at];
            for (size_t c = 0; c < channels; ++c) {
                double &mean = rows[at + 1 + c], &m2 = rows[at + 1 + channels + c];
                const double apart = count > 0 ? mean - origin[c] : 0;
                mean = count * apart;
                m2 += count * apart * apart;
            }
        }
        Vector total = add_in_python(number_, id, rows, length);
        const double count = total[0];
        for (size_t c = 0; c < channels && count != 0; ++c) {
            double &mean = total[1 + c], &m2 = total[1 + channels + c];
            const double apart = mean / count;
            mean = origin[c] + apart;
            m2 -= count * apart * apart;
            if (m2 < 0) m2 = 0;  // rounding; a NaN stays
        }
        return total;
    }

    const int64_t number_;
};

}  // namespace

std::shared_ptr<Exchange> kvstore_exchange(int64_t number) { return std::make_shared<MxnetKvstore>(number); }

}  // namespace syncbn
