// The parts of a training: learning rates, token files and samplers, what is told and where, and
// clipping over several meshes; generators in checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>

#include "absl/strings/str_replace.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/data/sampler.h"
#include "dtensor/parallel/io/checkpoint.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/model_plans.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/parallel/train/describe.h"
#include "dtensor/parallel/train/log.h"
#include "dtensor/parallel/train/recompute.h"
#include "dtensor/parallel/train/schedule.h"
#include "dtensor/parallel/train/trainer.h"
#include "dtensor/rng/generator.h"
#include "dtensor/rng/tracker.h"
#include "dtensor/tensor/file.h"
#include "nlohmann/json.hpp"
#include "tests/common/temp_folder.h"
#include "tests/parallel/support.h"

namespace dtensor::train_parts_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A path of its own, gone with the test.
class Temporary {
 public:
  explicit Temporary(const std::string& name) : path_(folder_.Path(name)) {}
  const std::string& path() const { return path_; }

 private:
  const testing::TempFolder folder_;
  const std::string path_;
};

std::string Message(const absl::Status& status) { return std::string(status.message()); }

// --- schedules ---

// transformers 5.23, get_cosine_schedule_with_warmup(optimizer of lr 1, 3, 10) and the linear one,
// at the steps after the warm-up.
TEST(LearningRate, IsThatOfTransformersAfterTheWarmUp) {
  const std::vector<double> cosine = {1.0,
                                      0.9504844339512095,
                                      0.8117449009293668,
                                      0.6112604669781572,
                                      0.38873953302184283,
                                      0.1882550990706332,
                                      0.04951556604879043,
                                      0.0};
  for (int64_t step = 3; step <= 10; ++step) {
    const LearningRate c = {1, LearningRate::Decay::kCosine, 3, 10};
    EXPECT_NEAR(c.At(step), cosine[step - 3], 1e-15) << step;
    const LearningRate l = {1, LearningRate::Decay::kLinear, 3, 10};
    EXPECT_NEAR(l.At(step), (10 - step) / 7.0, 1e-15) << step;
    const LearningRate k = {2, LearningRate::Decay::kConstant, 3, 10};
    EXPECT_EQ(k.At(step), 2);
  }
}

TEST(LearningRate, WarmsUpAndEndsAtTheLeast) {
  const LearningRate lr = {0.8, LearningRate::Decay::kCosine, 4, 8, 0.1};
  EXPECT_DOUBLE_EQ(lr.At(0), 0.2);
  EXPECT_DOUBLE_EQ(lr.At(3), 0.8);
  EXPECT_DOUBLE_EQ(lr.At(4), 0.8);
  EXPECT_DOUBLE_EQ(lr.At(6), 0.45);
  EXPECT_DOUBLE_EQ(lr.At(8), 0.1);
  EXPECT_DOUBLE_EQ(lr.At(800), 0.1);
  EXPECT_DOUBLE_EQ((LearningRate{1, LearningRate::Decay::kLinear, 4, 4}).At(4), 0);
}

TEST(LearningRate, RefusesWhatIsNone) {
  EXPECT_THAT(Message((LearningRate{0}).Check()), HasSubstr("must be positive, got 0"));
  EXPECT_THAT(Message((LearningRate{NAN}).Check()), HasSubstr("nan"));
  EXPECT_THAT(Message((LearningRate{1, {}, 5, 4}).Check()), HasSubstr("0 to the 4 steps"));
  EXPECT_THAT(Message((LearningRate{1, {}, 0, 4, 2}).Check()), HasSubstr("from 0 to 1, got 2"));
  for (const auto decay : {LearningRate::Decay::kLinear, LearningRate::Decay::kCosine}) {
    EXPECT_THAT(Message((LearningRate{1, decay}).Check()), HasSubstr("a decay needs steps"));
  }
  EXPECT_TRUE((LearningRate{1}).Check().ok());
  EXPECT_EQ(*ParseDecay("linear"), LearningRate::Decay::kLinear);
  EXPECT_THAT(Message(ParseDecay("cosin").status()), HasSubstr("\"cosin\"; nearest: cosine"));
}

// --- what is told ---

TEST(Log, HumanFormat) {
  EXPECT_EQ(HumanFormat(1234567), "1.23M");
  EXPECT_EQ(HumanFormat(999999), "1M");
  EXPECT_EQ(HumanFormat(2e9), "2B");
  EXPECT_EQ(HumanFormat(0.12345), "0.123");
  EXPECT_EQ(HumanFormat(-1500), "-1.5K");
  EXPECT_EQ(HumanFormat(0), "0");
  EXPECT_EQ(HumanFormat(7e23), "700Z");
  EXPECT_EQ(HumanSeconds(7.4), "7 s");
  EXPECT_EQ(HumanSeconds(123), "2:03");
  EXPECT_EQ(HumanSeconds(3723), "1:02:03");
  EXPECT_EQ(ToString({{"loss", 2.5, LogItem::Format::kFixed, 2}, {"tokens", 12345}}),
            "loss 2.50  tokens 12.3K");
}

TEST(Log, JsonHoldsEveryDigitAndWhatIsNoNumber) {
  const auto line = nlohmann::json::parse(
      ToJson(7, {{"loss", 0.1 + 0.2}, {"bytes", 123456789012}, {"bad", NAN}}));
  EXPECT_EQ(line.at("step"), 7);
  EXPECT_EQ(line.at("loss").get<double>(), 0.1 + 0.2);
  EXPECT_TRUE(line.at("bytes").is_number_integer());
  EXPECT_EQ(line.at("bytes"), 123456789012);
  EXPECT_EQ(line.at("bad"), "nan");
  EXPECT_EQ(nlohmann::json::parse(ToJson(7, {{"caf\xE9", 1}})).size(), 2);
}

TEST(Log, Crc32cOfRfc3720) {
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(Crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
  EXPECT_EQ(Crc32c("123456789"), 0xE3069283u);
}

TEST(Log, OneRankPrints) {
  Temporary file("ranks");
  const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({4}, {"dp"});
    const std::string path = absl::StrCat(file.path(), RankContext::Current().rank());
    std::FILE* to = std::fopen(path.c_str(), "w");
    LogRank(to, "one", mesh, 2);
    LogRank(to, "all", mesh, -1);
    for (int i = 0; i < 3; ++i) LogRankOnce(to, "once", mesh, 1);
    std::fclose(to);
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  for (int r = 0; r < 4; ++r) {
    const std::string path = absl::StrCat(file.path(), r);
    EXPECT_EQ(*ReadFile(path),
              absl::StrCat(r == 2 ? "one\n" : "", "rank ", r, ": all\n", r == 1 ? "once\n" : ""));
    fs::remove(path);
  }
}

// A reader of TensorBoard's files that has nothing in common with the writer: fields by number out
// of bytes, checksums bit by bit.
class EventReader {
 public:
  struct Scalar {
    int64_t step;
    std::string tag;
    float value;
    bool operator==(const Scalar&) const = default;
  };
  std::vector<Scalar> scalars;
  std::string version;
  double last_time = 0;

  explicit EventReader(std::string bytes) : bytes_(std::move(bytes)) {
    for (size_t at = 0; at < bytes_.size();) {
      const auto length = static_cast<size_t>(Number(at, 8));
      EXPECT_EQ(Number(at + 8, 4), Check(at, 8));
      EXPECT_EQ(Number(at + 12 + length, 4), Check(at + 12, length));
      Event(at + 12, at + 12 + length);
      at += length + 16;
    }
  }

 private:
  uint64_t Number(size_t at, int n) const {
    uint64_t v = 0;
    for (int i = n - 1; i >= 0; --i) v = v << 8 | static_cast<unsigned char>(bytes_.at(at + i));
    return v;
  }
  uint64_t Check(size_t at, size_t n) const {
    uint32_t crc = 0xFFFFFFFF;
    for (size_t i = 0; i < 8 * n; ++i) {
      const uint32_t bit = static_cast<unsigned char>(bytes_.at(at + i / 8)) >> i % 8 & 1;
      crc = (crc ^ bit) & 1 ? crc >> 1 ^ 0x82F63B78 : crc >> 1;
    }
    return static_cast<uint32_t>(std::rotr(~crc, 15) + 0xA282EAD8u);
  }
  uint64_t Varint(size_t* at) const {
    uint64_t v = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(bytes_.at((*at)++));
      v |= uint64_t{byte & 127u} << shift;
      if (byte < 128) return v;
    }
  }
  void Event(size_t at, size_t end) {
    int64_t step = 0;
    while (at < end) {
      const uint64_t key = Varint(&at);
      if (key == (2 << 3)) step = static_cast<int64_t>(Varint(&at));
      if (key == (1 << 3 | 1)) {
        last_time = std::bit_cast<double>(Number(at, 8));
        at += 8;
      }
      if ((key & 7) != 2) continue;
      const size_t length = Varint(&at);
      if (key >> 3 == 3) version = bytes_.substr(at, length);
      for (size_t inner = at; key >> 3 == 5 && inner < at + length;) Value(&inner, step);
      at += length;
    }
  }
  void Value(size_t* at, int64_t step) {
    EXPECT_EQ(Varint(at), 1 << 3 | 2);
    const size_t length = Varint(at), end = *at + length;
    Scalar s = {step, "", 0};
    while (*at < end) {
      const uint64_t key = Varint(at);
      if (key == (1 << 3 | 2)) {
        const size_t n = Varint(at);
        s.tag = bytes_.substr(*at, n);
        *at += n;
      } else {
        EXPECT_EQ(key, 2 << 3 | 5);
        s.value = std::bit_cast<float>(static_cast<uint32_t>(Number(*at, 4)));
        *at += 4;
      }
    }
    scalars.push_back(s);
  }
  const std::string bytes_;
};

// What a full disk or a killed program left: the next run's lines are whole.
TEST(Log, ALineThatWasTornIsEnded) {
  const testing::TempFolder folder;
  for (const auto& [before, after] : std::vector<std::pair<std::string, std::string>>{
           {"", "{}\n"}, {"{\"a\": 1}\n", "{\"a\": 1}\n{}\n"}, {"{\"a\"", "{\"a\"\n{}\n"}}) {
    folder.Write("log", before);
    absl::StatusOr<LineFile> log = LineFile::Open((folder / "log").string());
    ASSERT_TRUE(log.ok()) << log.status();
    ASSERT_TRUE(log->Add("{}\n").ok());
    EXPECT_EQ(folder.Read("log"), after);
  }
}

TEST(Log, TensorBoardEventsReadBack) {
  Temporary folder("events");
  {
    absl::StatusOr<EventFile> events = EventFile::Open(folder.path() + "/a/b");
    ASSERT_TRUE(events.ok()) << events.status();
    EXPECT_TRUE(events->Add(1, {{"loss", 2.5}, {"lr", 1e-3}}).ok());
    EXPECT_TRUE(events->Add(300, {{std::string(200, 't'), -1e30}}).ok());
  }
  std::string file;
  for (const auto& entry : fs::directory_iterator(folder.path() + "/a/b")) file = entry.path();
  EXPECT_THAT(file, HasSubstr("events.out.tfevents."));
  const EventReader read(*ReadFile(file));
  EXPECT_EQ(read.version, "brain.Event:2");
  EXPECT_NEAR(read.last_time, static_cast<double>(std::time(nullptr)), 60);
  const std::vector<EventReader::Scalar> want = {
      {1, "loss", 2.5f}, {1, "lr", 1e-3f}, {300, std::string(200, 't'), -1e30f}};
  EXPECT_EQ(read.scalars, want);
  EXPECT_THAT(Message(EventFile::Open("/proc/no").status()), HasSubstr("/proc/no"));
}

// --- token files ---

TEST(TokenFile, RoundTripsBothWidths) {
  Temporary file("tokens.bin");
  for (const int width : {2, 4}) {
    const std::vector<int64_t> tokens = {5, 0, 65535, 17, width == 2 ? 3 : 4294967295};
    ASSERT_TRUE(WriteTokens(file.path(), tokens, width).ok());
    EXPECT_EQ(fs::file_size(file.path()), 32u + 5 * static_cast<size_t>(width));
    const absl::StatusOr<TokenFile> read = TokenFile::Open(file.path());
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->size(), 5);
    EXPECT_EQ(read->largest(), width == 2 ? 65535 : 4294967295);
    std::vector<int64_t> got(3);
    ASSERT_TRUE(read->Read(2, absl::MakeSpan(got)).ok());
    EXPECT_EQ(got, std::vector<int64_t>(tokens.begin() + 2, tokens.end()));
    EXPECT_THAT(Message(read->Read(3, absl::MakeSpan(got))), HasSubstr("tokens 3 to 6 of 5"));
  }
  EXPECT_THAT(Message(WriteTokens(file.path(), {1, 70000}, 2)),
              HasSubstr("token 70000 at 1 does not fit into 2 bytes"));
  EXPECT_THAT(Message(WriteTokens(file.path(), {-1}, 4)), HasSubstr("token -1 at 0"));
  EXPECT_EQ(TokenFile::Open(file.path())->size(), 5);  // still the last good one
}

TEST(TokenFile, AnyOtherFileIsBytes) {
  Temporary file("text");
  std::ofstream(file.path()) << "a\xFF\n";
  const absl::StatusOr<TokenFile> read = TokenFile::Open(file.path());
  std::vector<int64_t> got(3);
  ASSERT_TRUE(read->Read(0, absl::MakeSpan(got)).ok());
  EXPECT_EQ(got, (std::vector<int64_t>{97, 255, 10}));
  EXPECT_EQ(read->largest(), 255);
}

TEST(TokenFile, OfMemoryAndOfBytesWhateverTheName) {
  const absl::StatusOr<TokenFile> made = TokenFile::Of("here", {7, 49151, 3});
  std::vector<int64_t> got(2);
  ASSERT_TRUE(made->Read(1, absl::MakeSpan(got)).ok());
  EXPECT_EQ(got, (std::vector<int64_t>{49151, 3}));
  EXPECT_EQ(made->largest(), 49151);
  EXPECT_FALSE(made->is_bytes());
  EXPECT_THAT(Message(made->Read(2, absl::MakeSpan(got))), HasSubstr("here: tokens 2 to 4 of 3"));
  EXPECT_THAT(Message(TokenFile::Of("here", {-1}).status()), HasSubstr("token -1 at 0"));
  // 16-bit numbers without a head, as other programs write them, are not bytes.
  Temporary file("others.bin");
  std::ofstream(file.path()) << std::string("\1\0\2\0", 4);
  EXPECT_THAT(Message(TokenFile::Open(file.path()).status()),
              HasSubstr("does not begin with the head of a token file"));
  EXPECT_EQ(TokenFile::OpenBytes(file.path())->size(), 4);
  EXPECT_TRUE(TokenFile::OpenBytes(file.path())->is_bytes());
}

TEST(TokenFile, ABrokenHeadIsNamed) {
  Temporary file("broken.bin");
  ASSERT_TRUE(WriteTokens(file.path(), std::vector<int64_t>{1, 2, 3}).ok());
  const std::string good = *ReadFile(file.path());
  const auto refused = [&](const std::string& bytes, const std::string& why) {
    ASSERT_TRUE(WriteFile(file.path(), bytes).ok());
    const absl::Status status = TokenFile::Open(file.path()).status();
    EXPECT_THAT(Message(status), HasSubstr(file.path()));
    EXPECT_THAT(Message(status), HasSubstr(why));
  };
  const auto with = [&](size_t at, char value) {
    std::string bytes = good;
    bytes[at] = value;
    return bytes;
  };
  refused(good.substr(0, 20), "of 20 bytes, its head alone has 32");
  refused(with(8, 9), "version 9, this program reads 1");
  refused(with(12, 3), "says 3 bytes per token, not 2 or 4");
  refused(with(16, 4), "says 4 tokens of 2 bytes, and 6 bytes follow");
  refused(with(23, '\x80'), "says 9223372036854775811 tokens");
  refused(good + "x", "7 bytes follow");
  refused(good.substr(0, good.size() - 2), "4 bytes follow");
  refused(with(30, 1), "largest token");
  ASSERT_TRUE(WriteFile(file.path(), with(24, 2)).ok());
  std::vector<int64_t> got(3);
  EXPECT_THAT(Message(TokenFile::Open(file.path())->Read(0, absl::MakeSpan(got))),
              HasSubstr("has token 3 at 2, above the 2 of its head"));
  EXPECT_THAT(Message(TokenFile::Open("/tmp").status()), HasSubstr("/tmp cannot be read"));
  EXPECT_THAT(Message(TokenFile::Open("/no/file").status()), HasSubstr("/no/file cannot be read"));
}

// --- samplers ---

absl::StatusOr<TokenSampler> Counting(const Temporary& file, int64_t tokens,
                                      const TokenSampler::Options& options) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < tokens; ++i) all.push_back(i);
  EXPECT_TRUE(WriteTokens(file.path(), all, 4).ok());
  return TokenSampler::Create(*TokenFile::Open(file.path()), options);
}

TEST(TokenSampler, AnEpochTakesEveryWindowOnceAndTheNextInAnotherOrder) {
  Temporary file("epoch.bin");
  for (const int64_t windows : {1, 2, 3, 16, 17, 1000}) {
    const absl::StatusOr<TokenSampler> s = Counting(file, windows * 4 + 3, {.seq = 4, .seed = 9});
    ASSERT_EQ(s->windows(), windows);
    std::vector<int64_t> orders[2];
    for (int64_t i = 0; i < 2 * windows; ++i) orders[i / windows].push_back(s->WindowOf(i));
    for (const auto& order : orders) {
      EXPECT_EQ(std::set<int64_t>(order.begin(), order.end()).size(), static_cast<size_t>(windows));
      EXPECT_LT(*std::max_element(order.begin(), order.end()), windows);
    }
    if (windows < 16) continue;
    EXPECT_NE(orders[0], orders[1]);
    EXPECT_FALSE(std::is_sorted(orders[0].begin(), orders[0].end()));
    EXPECT_NE(s->WindowOf(0) * windows + s->WindowOf(1),
              Counting(file, windows * 4 + 3, {.seq = 4, .seed = 10})->WindowOf(0) * windows +
                  Counting(file, windows * 4 + 3, {.seq = 4, .seed = 10})->WindowOf(1));
  }
}

using Ids = std::vector<int64_t>;

TEST(TokenSampler, EveryMeshSeesTheSameBatches) {
  Temporary file("mesh.bin");
  const absl::StatusOr<TokenSampler> sampler = Counting(file, 100, {.seq = 5, .seed = 3});
  std::vector<Ids> want;
  TokenSampler one = *sampler;
  for (int step = 0; step < 6; ++step) {  // 5 of 19 windows each: over the end of an epoch
    const absl::StatusOr<TokenBatch> b = one.Next(5, DeviceMesh::Self(), {});
    ASSERT_TRUE(b.ok()) << b.status();
    want.push_back(b->ids.ToVector<int64_t>());
    const Ids targets = b->targets.ToVector<int64_t>();
    for (size_t i = 0; i < targets.size(); ++i) EXPECT_EQ(targets[i], want.back()[i] + 1);
    for (int row = 0; row < 5; ++row) {
      EXPECT_EQ(want.back()[row * 5] / 5, one.WindowOf(step * 5 + row));
    }
  }
  EXPECT_EQ(one.epoch(), 1);
  const std::vector<Placements> layouts = {
      {Shard(0), Replicate()}, {Shard(0), Shard(0)}, {Shard(0), Shard(1)}, {Shard(1), Replicate()}};
  for (const auto& [dp, tp] : testing::DpTpMeshes()) {
    const absl::Status status = RunSpmd(dp * tp, [&, dp = dp, tp = tp](RankContext&) {
      for (const Placements& layout : layouts) {
        TokenSampler mine = *sampler;
        for (const Ids& ids : want) {
          const absl::StatusOr<TokenBatch> b = mine.Next(5, testing::DpTp(dp, tp), layout);
          if (!b.ok()) return b.status();
          EXPECT_EQ(b->ids.ToVector<int64_t>(), ids);
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(TokenSampler, ItsStateGoesOnFromThereAndFitsOneSampler) {
  Temporary file("state.bin");
  absl::StatusOr<TokenSampler> s = Counting(file, 200, {.seq = 5, .seed = 0xFFFFFFFFFFFFFFF0});
  ASSERT_TRUE(s->Next(7, DeviceMesh::Self(), {}).ok());
  const absl::StatusOr<TokenSampler::State> state =
      TokenSampler::State::Parse(s->state().ToString());
  ASSERT_TRUE(state.ok()) << state.status();
  const Ids next = s->Next(7, DeviceMesh::Self(), {})->ids.ToVector<int64_t>();
  TokenSampler again =
      *TokenSampler::Create(*TokenFile::Open(file.path()), {.seq = 5, .seed = 0xFFFFFFFFFFFFFFF0});
  ASSERT_TRUE(again.SetState(*state).ok());
  EXPECT_EQ(again.samples(), 7);
  EXPECT_EQ(again.Next(7, DeviceMesh::Self(), {})->ids.ToVector<int64_t>(), next);
  TokenSampler other = *TokenSampler::Create(*TokenFile::Open(file.path()), {.seq = 6});
  EXPECT_THAT(Message(other.SetState(*state)), HasSubstr("length 5, here it is 6"));
  other = *TokenSampler::Create(*TokenFile::Open(file.path()), {.seq = 5, .seed = 1});
  EXPECT_THAT(Message(other.SetState(*state)), HasSubstr("here it is 1"));
  EXPECT_EQ(other.samples(), 0);
  for (const char* bad :
       {"", "{}", "[1]", "{\"samples\": -1, \"seed\": 0, \"seq\": 1, \"tokens\": 2}",
        "{\"samples\": \"1\", \"seed\": 0, \"seq\": 1, \"tokens\": 2}"}) {
    EXPECT_FALSE(TokenSampler::State::Parse(bad).ok()) << bad;
  }
  EXPECT_THAT(Message(Counting(file, 5, {.seq = 5}).status()),
              HasSubstr("has 5 tokens, needs at least 6"));
}

// A state is of one order of one file: lengths alone do not tell.
TEST(TokenSampler, AnotherOrderAndAnotherFileOfTheSameLengthAreRefused) {
  Temporary file("state.bin");
  const absl::StatusOr<TokenSampler> s = Counting(file, 100, {.seq = 5});
  TokenSampler plain =
      *TokenSampler::Create(*TokenFile::Open(file.path()), {.seq = 5, .shuffle = false});
  EXPECT_THAT(Message(plain.SetState(s->state())),
              HasSubstr("windows that are shuffled, here it is in the file's order"));
  std::vector<int64_t> tokens(100, 1);
  TokenSampler other = *TokenSampler::Create(*TokenFile::Of("other", tokens), {.seq = 5});
  EXPECT_THAT(Message(other.SetState(s->state())), HasSubstr("a file whose tokens have the hash"));
}

// A file that is cut while ranks read it: all get the reason, none hangs.
TEST(TokenSampler, AllRanksLearnThatOneCannotRead) {
  Temporary file("cut.bin");
  const absl::StatusOr<TokenSampler> s = Counting(file, 101, {.seq = 10, .shuffle = false});
  fs::resize_file(file.path(), 32 + 4 * 60);
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    TokenSampler mine = *s;
    DT_ASSIGN_OR_RETURN(const TokenBatch b, mine.Next(10, mesh, {Shard(0)}));
    sum(b.ids).Item();
    return absl::OkStatus();
  });
  EXPECT_THAT(Message(status), HasSubstr("rank 1: "));
  EXPECT_THAT(Message(status), HasSubstr("it has become shorter"));
}

// --- gradients on several meshes ---

class TwoParts : public Module {
 public:
  TwoParts() : a_(AddChild<Linear>("a", 3, 5, false)), b_(AddChild<Linear>("b", 5, 2, false)) {}
  Linear &a_, &b_;

 protected:
  Values Forward(const Values& in) override { return {b_(a_(in[0]))}; }
};

TEST(ClipGradients, OverParametersOfSeveralMeshesEachElementOnce) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const double p : {2.0, 1.0, inf, -2.0}) {
    const bool members_only = p < 0;  // others have no gradient
    const absl::Status status = RunSpmd(4, [&, p = std::abs(p)](RankContext& rank) -> absl::Status {
      // One on ranks 0 and 1, sharded; one repeated on ranks 1, 2 and 3.
      DT_ASSIGN_OR_RETURN(const DeviceMesh left, DeviceMesh::FromRanks({2}, {0, 1}, {"tp"}));
      DT_ASSIGN_OR_RETURN(const DeviceMesh right, DeviceMesh::FromRanks({3}, {1, 2, 3}, {"dp"}));
      TwoParts net, one;
      net.a_.weight().Place(left, {Shard(0)});
      net.b_.weight().Place(right, {Replicate()});
      Materialize(net);
      Materialize(one);
      for (TwoParts* n : {&net, &one}) {
        for (const NamedParameter& q : n->NamedParameters()) {
          const DTensor& t = q.parameter->tensor();
          if (members_only && !t.mesh().is_self() && !t.mesh().Contains(rank.rank())) continue;
          const DTensor g = FromVector(testing::Integers(q.parameter->numel(), 2), t.shape());
          DTensor(t).SetGrad(
              t.mesh().is_self() ? g : DistributeTensor(g.local(), t.mesh(), t.placements()));
        }
      }
      const double want = ClipGradNorm(one.NamedParameters(), 1.5, p);
      EXPECT_NEAR(ClipGradNorm(net.NamedParameters(), 1.5, p), want, 1e-12);
      for (const char* name : {"a.weight", "b.weight"}) {
        const DTensor& t = net.FindParameter(name)->tensor();
        if (!t.mesh().Contains(rank.rank())) continue;
        const std::vector<double> got = t.grad().ToVector<double>(),
                                  whole =
                                      one.FindParameter(name)->tensor().grad().ToVector<double>();
        EXPECT_EQ(got.size(), whole.size());
        for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], whole.at(i), 1e-6);
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// A norm that is no number says so, on one mesh as over two: who looks at it skips the step.
// In the mode kTensorParallel ranks draw from generators of their own.
TEST(Checkpoint, EachRankGetsItsOwnGenerator) {
  const testing::TempFolder folder;
  const auto run = [&](int64_t ranks, bool alike, bool saves) {
    std::vector<GeneratorState> states(static_cast<size_t>(ranks));
    const absl::Status status = RunSpmd(ranks, [&](RankContext& rank) -> absl::Status {
      Linear model(3, 2);
      Materialize(model);
      SGD optimizer(model.NamedParameters());
      if (saves) {
        ManualSeed(static_cast<uint64_t>(alike ? 7 : TensorParallelSeed(7, rank.rank())));
        rand({3});
        DT_RETURN_IF_ERROR(SaveCheckpoint(folder.path(), model, optimizer, {.step = 1}).status());
        EXPECT_THAT(
            SaveCheckpoint(folder.path(), model, optimizer, {.step = -1}).status().message(),
            HasSubstr("the step must be 0 or more, is -1"));
      } else {
        DT_RETURN_IF_ERROR(LoadCheckpoint(folder.path(), model, optimizer).status());
      }
      states[rank.rank()] = DefaultGenerator().State();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    return states;
  };
  const auto own = run(3, /*alike=*/false, /*saves=*/true);
  EXPECT_NE(own[0], own[1]);
  EXPECT_EQ(run(3, false, false), own);
  EXPECT_EQ(run(2, false, false), std::vector<GeneratorState>(2, own[0]));
  EXPECT_EQ(run(1, false, false)[0], own[0]);
  const auto same = run(2, /*alike=*/true, /*saves=*/true);
  EXPECT_EQ(run(3, true, false), std::vector<GeneratorState>(3, same[0]));
}

// All hear what one rank says, and the world goes on.
TEST(Checkpoint, WhatOneRankRefusesIsEverybodysError) {
  const testing::TempFolder folder;
  const absl::Status status = RunSpmd(3, [&](RankContext& rank) -> absl::Status {
    const bool second = rank.rank() == 1;
    Linear model(3, 2), other(3, second ? 4 : 2);
    Materialize(model);
    Materialize(other);
    SGD optimizer(model.NamedParameters()), its(other.NamedParameters());
    const CheckpointInfo bad = {.step = 1, .notes = {{"path", second ? "caf\xE9" : "cafe"}}};
    EXPECT_THAT(Message(SaveCheckpoint(folder.path(), model, optimizer, bad).status()),
                HasSubstr("rank 1: [checkpoint] the note \"path\" is not UTF-8"));
    DT_RETURN_IF_ERROR(SaveCheckpoint(folder.path(), model, optimizer, {.step = 1}).status());
    EXPECT_THAT(Message(LoadCheckpoint(folder.path(), other, its).status()),
                HasSubstr("does not fit, nothing was loaded: bias is float32 [2], must be"));
    const auto generator = DefaultGenerator().State();
    for (const bool throws : {false, true}) {
      const auto accepts = [&](const CheckpointInfo&) -> absl::Status {
        if (!second) return absl::OkStatus();
        if (throws) throw std::runtime_error("no such data here");
        return absl::InvalidArgumentError("no such data here");
      };
      rand({3});
      EXPECT_THAT(Message(LoadCheckpoint(folder.path(), model, optimizer, accepts).status()),
                  AllOf(HasSubstr("rank 1: "), HasSubstr("no such data here")));
    }
    EXPECT_NE(DefaultGenerator().State(), generator);
    return LoadCheckpoint(folder.path(), model, optimizer).status();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ClipGradients, NormsOfWhatIsNoNumberAreNone) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const bool two_meshes : {false, true}) {
    const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
      DT_ASSIGN_OR_RETURN(const DeviceMesh both, DeviceMesh::Create({2}, {"dp"}));
      DT_ASSIGN_OR_RETURN(const DeviceMesh last, DeviceMesh::FromRanks({1}, {1}, {"dp"}));
      for (const double p : {1.0, 2.0, inf}) {
        for (const double bad : {std::nan(""), inf, -inf}) {
          TwoParts net;
          net.a_.weight().Place(both, {Shard(0)});
          net.b_.weight().Place(two_meshes ? last : both, {Replicate()});
          Materialize(net);
          for (Parameter* q : net.Parameters()) {
            std::vector<double> g(q->numel(), 0.5);
            if (q == &net.b_.weight()) g[1] = bad;
            DTensor(q->tensor())
                .SetGrad(DistributeTensor(FromVector(g, q->shape()), q->mesh(), q->placements()));
          }
          const double norm = ClipGradNorm(net.NamedParameters(), 1.5, p);
          EXPECT_TRUE(std::isnan(bad) ? std::isnan(norm) : norm == inf) << p << " " << bad;
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(ClipGradients, RefusesSelfBesideAMesh) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    TwoParts net;
    net.a_.weight().Place(mesh, {Replicate()});
    Materialize(net);
    for (Parameter* p : net.Parameters()) {
      DTensor(p->tensor())
          .SetGrad(zeros(p->shape(), {.mesh = p->mesh(), .placements = p->placements()}));
    }
    EXPECT_THAT(testing::MessageOf([&] { ClipGradNorm(net.NamedParameters(), 1); }),
                HasSubstr("b.weight is on mesh self, others are on dp=2"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// --- what a program prints first ---

constexpr char kLlamaTree[] = R"(Llama
  model: LlamaModel
    embed_tokens: Embedding, RowwiseParallel
    layers: Sequential
      0 .. 1: LlamaBlock
        self_attn: LlamaAttention
          q_proj: Linear, ColwiseParallel
          k_proj: Linear, ColwiseParallel
          v_proj: Linear, ColwiseParallel
          o_proj: Linear, RowwiseParallel
        mlp: LlamaMLP
          gate_proj: Linear, ColwiseParallel
          up_proj: Linear, ColwiseParallel
          down_proj: Linear, RowwiseParallel
        input_layernorm: RMSNorm, NoParallel
        post_attention_layernorm: RMSNorm, NoParallel
    norm: RMSNorm, NoParallel
  lm_head: Linear, ColwiseParallel
)";
// With # for the layer.
constexpr char kLlamaLayer[] =
    R"(model.layers.#.self_attn.q_proj.weight          [16, 16]  [R, S(0)]  [8, 16]  float32
model.layers.#.self_attn.k_proj.weight          [8, 16]  [R, S(0)]  [4, 16]  float32
model.layers.#.self_attn.v_proj.weight          [8, 16]  [R, S(0)]  [4, 16]  float32
model.layers.#.self_attn.o_proj.weight          [16, 16]  [R, S(1)]  [16, 8]  float32
model.layers.#.mlp.gate_proj.weight             [24, 16]  [R, S(0)]  [12, 16]  float32
model.layers.#.mlp.up_proj.weight               [24, 16]  [R, S(0)]  [12, 16]  float32
model.layers.#.mlp.down_proj.weight             [16, 24]  [R, S(1)]  [16, 12]  float32
model.layers.#.input_layernorm.weight           [16]  [R, R]  [16]  float32
model.layers.#.post_attention_layernorm.weight  [16]  [R, R]  [16]  float32
)";

TEST(Describe, PlanTreeAndParameterTableOfALlama) {
  const LlamaConfig config = {.vocab = 32,
                              .hidden = 16,
                              .inner = 24,
                              .layers = 2,
                              .heads = 4,
                              .kv_heads = 2,
                              .head_size = 4};
  const std::string want = absl::StrCat(
      "model.embed_tokens.weight                       [32, 16]  [R, S(0)]  [16, 16]  float32\n",
      absl::StrReplaceAll(kLlamaLayer, {{"#", "0"}}),
      absl::StrReplaceAll(kLlamaLayer, {{"#", "1"}}),
      "model.norm.weight                               [16]  [R, R]  [16]  float32\n"
      "lm_head.weight                                  [32, 16]  [R, S(0)]  [16, 16]  float32\n"
      "4.94K parameters, 10KB of them on this rank\n");
  const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
    Llama model(config);
    const Plan plan = LlamaPlan(config);
    DT_RETURN_IF_ERROR(ParallelizeModule(model, testing::DpTp(2, 2), plan));
    DT_ASSIGN_OR_RETURN(const std::string tree, DescribePlan(model, plan));
    EXPECT_EQ(tree, kLlamaTree);
    EXPECT_EQ(DescribeParameters(model), want);
    Materialize(model);
    EXPECT_EQ(DescribeParameters(model), want);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  LlamaConfig tied = config;
  tied.tied = true;
  Llama model(tied);
  EXPECT_THAT(DescribeParameters(model), HasSubstr("float32  = lm_head.weight\n"));
  EXPECT_EQ(DescribePlan(model, {{"model.layer.*", RowwiseParallel()}}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(*DescribePlan(model, {{"model.layer.*", Optional(RowwiseParallel())}}),
            *DescribePlan(model, {}));
}

// --- memory that a training takes ---

TEST(FitInMemory, CountsGradientsStatesAndMastersWhereTheyAre) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    // Of a million million weights, whole on both ranks: a thousand GB for each byte.
    const auto said = [&](DType dtype, const StateLayoutFn& layout, bool trained = true) {
      Linear model(1'000'000, 1'000'000);
      SetDType(model, dtype);
      for (const NamedParameter& p : model.NamedParameters()) {
        p.parameter->Place(mesh, {Replicate()});
        p.parameter->RequiresGrad(trained);
      }
      return Message(FitInMemory(model, /*states=*/2, layout, "so be it"));
    };
    const auto masters = [](const Parameter& p) {
      StateLayout layout = LikeParameter(p);
      layout.dtype = DType::kF32;
      return layout;
    };
    const auto narrow_gradients = [&](const Parameter& p) {
      StateLayout layout = masters(p);
      layout.reduce_dtype = DType::kBF16;
      return layout;
    };
    EXPECT_THAT(said(DType::kF32, LikeParameter),
                ::testing::AllOf(HasSubstr("takes 16000.0 GB on each of 2 ranks"),
                                 ::testing::EndsWith("for each; so be it")));
    EXPECT_THAT(said(DType::kBF16, LikeParameter), HasSubstr("takes 8000.0 GB"));
    EXPECT_THAT(said(DType::kBF16, masters), HasSubstr("takes 18000.0 GB"));
    EXPECT_THAT(said(DType::kBF16, narrow_gradients), HasSubstr("takes 16000.0 GB"));
    EXPECT_THAT(said(DType::kBF16, FlatState("dp")), HasSubstr("takes 10000.0 GB"));
    EXPECT_THAT(said(DType::kBF16, masters, /*trained=*/false), HasSubstr("takes 2000.0 GB"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// --- recompute by pattern ---

TEST(RecomputeModules, SameBitsAndLessMemory) {
  const GPTConfig config = {
      .vocab = 32, .seq = 32, .layers = 4, .hidden = 32, .heads = 2, .dropout = 0.1};
  const auto run = [&](const std::vector<std::string>& patterns, int64_t* peak) {
    ManualSeed(4);
    GPT model(config);
    Materialize(model);
    EXPECT_TRUE(RecomputeModules(model, patterns).ok());
    const DTensor ids = FromVector(std::vector<int64_t>(64, 3), {2, 32});
    const auto& allocator = RankContext::Current().device_allocator();
    allocator->ResetPeak();
    const int64_t before = allocator->stats().in_use_bytes;
    const DTensor loss = sum(model(ids));
    loss.Backward();
    *peak = allocator->stats().peak_bytes - before;
    testing::NamedValues all = testing::Gather(model, true);
    all.emplace_back("loss", loss.ToVector<double>());
    return all;
  };
  int64_t all_kept = 0, recomputed = 0, half = 0;
  const testing::NamedValues want = run({}, &all_kept);
  EXPECT_EQ(run({"blocks.*"}, &recomputed), want);
  EXPECT_EQ(run({"blocks.[23]", "blocks.1.mlp"}, &half), want);
  EXPECT_LT(recomputed, half);
  EXPECT_LT(half, all_kept);
}

TEST(RecomputeModules, AWrongPatternChangesNothing) {
  TwoParts net;
  const absl::Status status = RecomputeModules(net, {"a", "c"});
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Message(status), HasSubstr("\"c\""));
}

}  // namespace
}  // namespace dtensor::train_parts_test
