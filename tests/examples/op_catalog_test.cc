// docs/reference/ops.md and the golden file of derived strategies say what the declarations say.
#include "examples/op_catalog.h"

#include <gtest/gtest.h>

#include "absl/strings/str_split.h"
#include "tests/common/torch_samples.h"

namespace dtensor::op_catalog_test {
namespace {

// The first line that differs, with its number; "" if none does.
std::string FirstDifference(const std::string& now, const std::string& file) {
  const std::vector<std::string> a = absl::StrSplit(now, '\n'), b = absl::StrSplit(file, '\n');
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    const std::string x = i < a.size() ? a[i] : "(ends)", y = i < b.size() ? b[i] : "(ends)";
    if (x != y) return absl::StrCat("line ", i + 1, ": now \"", x, "\", in the file \"", y, "\"");
  }
  return "";
}

TEST(OpCatalog, TheReferenceIsUpToDate) {
  const absl::StatusOr<std::string> now = OpCatalog();
  ASSERT_TRUE(now.ok()) << now.status();
  EXPECT_EQ(FirstDifference(*now, testing::ReadFile(DT_TEST_DATA "/../../docs/reference/ops.md")),
            "")
      << "write it anew with ./dev ops, and look at the diff";
}

TEST(OpCatalog, DerivedStrategiesAreThoseReviewed) {
  const absl::StatusOr<std::string> now = DerivedStrategies();
  ASSERT_TRUE(now.ok()) << now.status();
  EXPECT_EQ(FirstDifference(*now, testing::ReadFile(DT_TEST_DATA "/ops/strategies.txt")), "")
      << "write it anew with ./dev ops, and look at the diff";
}

}  // namespace
}  // namespace dtensor::op_catalog_test
