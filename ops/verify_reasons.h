// Why a true row is not offered by a shipped op (ops/verify_reasons.inc).
#pragma once

#include <string>
#include <vector>

#include "dtensor/verify/verify.h"

namespace dtensor {

struct MissingReason {
  std::string ops;      // separated by blanks
  std::string pattern;  // of rows; `*` stands for any text
  std::string reason;
};
const std::vector<MissingReason>& MissingReasons();

// The line that explains a missing row, or null.
const MissingReason* ReasonFor(const std::string& op, const VerifyFinding& missing);

// One paragraph per reason with the rows it explains, then those that none does, with their
// reproducers.
std::string DescribeMissing(
    const std::vector<std::pair<std::string, std::vector<VerifyFinding>>>& by_op);

}  // namespace dtensor
