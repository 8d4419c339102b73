// What a status carries besides its words survives every rewording, and the words are never read.
#include "dtensor/tensor/status.h"

#include <new>
#include <stdexcept>

#include "dtensor/tensor/control_flow.h"
#include "dtensor/tensor/text.h"
#include "gtest/gtest.h"

namespace dtensor::status_test {
namespace {

absl::Status Marked() {
  return WithReport(WithCulprit(RankLocal(absl::OutOfRangeError("no row 9; inputs: none")), 3),
                    "\nreport: [comm tp] rank 3");
}

void ExpectMarks(const absl::Status& status) {
  EXPECT_TRUE(IsRankLocal(status)) << status;
  EXPECT_EQ(CulpritOf(status), 3) << status;
}

TEST(Status, UniformUnlessMarked) {
  const absl::Status plain = absl::OutOfRangeError("rank 3 failed");
  EXPECT_FALSE(IsRankLocal(plain));
  EXPECT_EQ(CulpritOf(plain), std::nullopt);
  EXPECT_FALSE(OriginOf(plain).has_value());
}

TEST(Status, MarksSurviveOtherWordsAndTheReportStaysLast) {
  const absl::Status prefixed = Prefixed("rank 3", Marked());
  ExpectMarks(prefixed);
  EXPECT_EQ(prefixed.message(), "rank 3: no row 9; inputs: none\nreport: [comm tp] rank 3");

  const absl::Status recoded = Recoded(prefixed, absl::StatusCode::kAborted);
  ExpectMarks(recoded);
  EXPECT_EQ(recoded.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(recoded.message(), prefixed.message());

  const absl::Status named = InFunction("embedding", recoded, "; inputs: w (rank 3 of 4)");
  ExpectMarks(named);
  EXPECT_EQ(named.message(),
            "[embedding] rank 3: no row 9; inputs: none; inputs: w (rank 3 of 4)"
            "\nreport: [comm tp] rank 3");
  EXPECT_EQ(Prefixed("a", WithReport(named, "\nmore")).message(),
            "a: [embedding] rank 3: no row 9; inputs: none; inputs: w (rank 3 of 4)"
            "\nreport: [comm tp] rank 3\nmore");
}

// A function that is made of others says their causes in its own words.
TEST(Status, OriginGivesTheCauseBack) {
  const absl::Status inner = InFunction("add", Marked(), "; inputs: x, y");
  const std::optional<ErrorOrigin> origin = OriginOf(inner);
  ASSERT_TRUE(origin.has_value());
  EXPECT_EQ(origin->function, "add");
  EXPECT_EQ(origin->cause.message(), Marked().message());
  ExpectMarks(origin->cause);
  EXPECT_EQ(InFunction("linear", Prefixed("in add", origin->cause), "; inputs: b").message(),
            "[linear] in add: no row 9; inputs: none; inputs: b\nreport: [comm tp] rank 3");
  EXPECT_FALSE(OriginOf(Prefixed("other words", inner)).has_value());
  EXPECT_EQ(OriginOf(Recoded(inner, absl::StatusCode::kAborted))->function, "add");
}

TEST(Status, FailureOfNamesTheRankOnce) {
  const absl::Status notice = FailureOf(2, absl::InternalError("boom"));
  EXPECT_EQ(notice.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(notice.message(), "rank 2 failed: boom");
  EXPECT_TRUE(IsRankLocal(notice));
  EXPECT_EQ(CulpritOf(notice), 2);
  EXPECT_EQ(CulpritOf(FailureOf(0, notice)), 2) << "whoever passes it on is not the culprit";
}

template <class Thrown>
absl::Status Caught(const Thrown& thrown) {
  try {
    throw thrown;
  } catch (...) {
    return CurrentException();
  }
}

TEST(Status, ExceptionsOfOthersAreRankLocal) {
  EXPECT_EQ(Caught(Error(absl::NotFoundError("none"))), absl::NotFoundError("none"));
  ExpectMarks(Caught(Error(Marked())));
  const absl::Status memory = Caught(std::bad_alloc());
  EXPECT_EQ(memory.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(IsRankLocal(memory));
  const absl::Status text = Caught(std::runtime_error("boom"));
  EXPECT_EQ(text.message(), "boom");
  EXPECT_TRUE(IsRankLocal(text));
  EXPECT_TRUE(IsRankLocal(Caught(42)));
}

TEST(Status, AnExceptionThatIsNoErrorPasses) {
  struct Stop : ControlFlow {};
  EXPECT_THROW(Caught(Stop()), Stop);
}

TEST(Text, LongListsAreCut) {
  EXPECT_EQ(JoinSome(std::vector<int>{}), "");
  EXPECT_EQ(JoinSome(std::vector<int>{1, 2}), "1, 2");
  EXPECT_EQ(JoinSome(std::vector<int>(8, 1)), "1, 1, 1, 1, 1, 1, 1, 1");
  EXPECT_EQ(JoinSome(std::vector<int>(300, 1)), "1, 1, 1, 1, 1, 1, 1, 1 and 292 more");
}

}  // namespace
}  // namespace dtensor::status_test
