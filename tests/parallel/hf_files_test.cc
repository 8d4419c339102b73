// safetensors files and configs: broken ones are refused by name, odd ones load, and what is
// written back are the same bytes.
#include <gmock/gmock.h>

#include <ctime>
#include <filesystem>
#include <map>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "dtensor/tensor/file.h"
#include "tests/parallel/hf_support.h"

namespace dtensor::hf_files_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::HfFolder;
using testing::MessageOf;
using testing::TempFolder;
using testing::TextOf;

absl::Status LoadSingle(const std::string& path) {
  DT_ASSIGN_OR_RETURN(const TensorFolder folder, TensorFolder::Open(path));
  return ReadTensors(folder).status();
}

// A model by `config`, filled from `folder`; after an error it is as it was.
absl::Status LoadModel(const ModelConfig& config, const std::string& folder) {
  const std::unique_ptr<CausalLM> model = MakeModel(config);
  const absl::Status status = LoadPretrained(*model, folder);
  for (const NamedParameter& p : model->NamedParameters()) {
    EXPECT_EQ(p.parameter->materialized(), status.ok()) << p.fqn;
  }
  return status;
}

absl::Status LoadEntry(const std::string& file) {
  const std::string bad = HfFolder("bad");
  const std::string path = bad + "/" + file;
  if (absl::EndsWith(file, ".safetensors")) return LoadSingle(path);
  if (absl::StartsWith(file, "index_")) {
    DT_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(path));
    return LoadModel(config, path);
  }
  DT_ASSIGN_OR_RETURN(const ModelConfig config, ParseModelConfig(TextOf(path), path));
  return LoadModel(config, bad + "/config");
}

// The bytes that the manifest says.
void ExpectContents(const std::string& path, const nlohmann::json& expect) {
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->tensors().size(), expect.size());
  for (const auto& [name, want] : expect.items()) {
    ASSERT_TRUE((*file)->tensors().contains(name)) << name;
    const SafetensorsEntry& e = (*file)->tensors().at(name);
    EXPECT_EQ(e.dtype, want["dtype"]);
    EXPECT_EQ(std::vector<int64_t>(e.shape.begin(), e.shape.end()), want["shape"]);
    std::string data(e.end - e.begin, '\0');
    ASSERT_TRUE((*file)->Read(e.begin, e.end - e.begin, data.data()).ok());
    EXPECT_EQ(absl::BytesToHexString(data), want["hex"]) << name;
    const auto mapped = SafetensorsFile::Open(path, {.map = true});
    std::string again(data.size(), '\0');
    ASSERT_TRUE((*mapped)->Read(e.begin, e.end - e.begin, again.data()).ok());
    EXPECT_EQ(again, data);
  }
}

// Without the folder of this checkout.
std::string Short(absl::string_view message) {
  return absl::StrReplaceAll(message, {{HfFolder("bad") + "/", ""}, {"\n", " "}});
}

// What is said of which file, all of which was read: file, tensor or field, and the reason.
std::map<std::string, std::string> Lines(const std::string& path) {
  std::map<std::string, std::string> lines;
  for (const absl::string_view line : absl::StrSplit(TextOf(path), '\n', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(line, absl::MaxSplits(": ", 1));
    lines.emplace(parts.first, parts.second);
  }
  return lines;
}

TEST(HfFiles, BrokenOnesAreRefusedByNameAndOddOnesLoad) {
  const auto manifest = nlohmann::json::parse(TextOf(HfFolder("bad") + "/manifest.json"));
  int refused = 0, loaded = 0;
  const std::map<std::string, std::string> lines = Lines(HfFolder("bad_messages.txt"));
  for (const auto& entry : manifest["entries"]) {
    const std::string file = entry["file"], kind = entry["kind"];
    SCOPED_TRACE(file + ": " + entry["what"].get<std::string>());
    const absl::Status status = LoadEntry(file);
    if (kind == "bad" || kind == "suspicious") {
      const auto line = lines.find(file);
      EXPECT_TRUE(line != lines.end() && line->second == Short(status.message()))
          << file << ": " << Short(status.message());
      EXPECT_FALSE(status.ok());
      // What is wrong with the values of a config may only be seen beside the weights.
      const bool names_file = absl::StrContains(status.message(), file) ||
                              (absl::StartsWith(file, "config/") &&
                               absl::StrContains(status.message(), "hf/bad/config"));
      EXPECT_TRUE(names_file) << status;
      EXPECT_GT(status.message().size(), file.size() + 10) << status;
      if (entry["what"].get<std::string>().find("model.norm.weight") != std::string::npos) {
        EXPECT_THAT(std::string(status.message()), HasSubstr("\"model.norm.weight\""));
      }
      ++refused;
    } else if (kind == "ok" || kind == "target") {
      if (status.code() == absl::StatusCode::kUnimplemented) {  // dtypes of files, not of tensors
        EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(file), HasSubstr("dtype")));
      } else {
        EXPECT_TRUE(status.ok()) << status;
      }
      if (entry.contains("expect")) ExpectContents(HfFolder("bad") + "/" + file, entry["expect"]);
      ++loaded;
    }
  }
  EXPECT_EQ(static_cast<size_t>(refused), lines.size());
  EXPECT_EQ(refused, 124);
  EXPECT_EQ(loaded, 27);
}

TEST(HfFiles, ExportIsByteIdentical) {
  for (const std::string name : {"llama-gqa", "llama-uneven", "llama-bf16", "gpt2"}) {
    for (const auto& [dp, tp] : {std::pair<int64_t, int64_t>{1, 1}, {1, 3}, {2, 2}}) {
      SCOPED_TRACE(::testing::Message() << name << ", dp " << dp << ", tp " << tp);
      const testing::TempFolder scratch;
      const absl::Status status = RunSpmd(dp * tp, [&](RankContext&) -> absl::Status {
        DT_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(HfFolder(name)));
        DT_ASSIGN_OR_RETURN(const auto model,
                            testing::LoadOn(testing::DpTp(dp, tp), HfFolder(name), config.dtype));
        return SavePretrained(*model, scratch.path());
      });
      ASSERT_TRUE(status.ok()) << status;
      int files = 0;
      for (const fs::directory_entry& there : fs::directory_iterator(HfFolder(name))) {
        const std::string file = there.path().filename().string();
        if (absl::StartsWith(file, "golden") || file == "config_legacy.json") continue;
        EXPECT_TRUE(TextOf(there.path()) == TextOf(scratch / file)) << file;
        ++files;
      }
      EXPECT_EQ(std::distance(fs::directory_iterator(scratch.path()), fs::directory_iterator()),
                files);
    }
  }
}

// Files as other writers make them: what is loaded from them goes back as the same bytes.
TEST(HfFiles, ExportKeepsTheFormOfItsSource) {
  const std::string source = HfFolder("gpt2");
  const ModelConfig config = ValueOrThrow(ReadModelConfig(source));
  const auto model = MakeModel(config);
  ASSERT_TRUE(LoadPretrained(*model, source).ok());
  const StateDict state = model->GetStateDict();  // both names of the table
  const testing::TempFolder scratch;
  const auto goes_back = [&](const std::string& from) {
    SCOPED_TRACE(from);
    const std::string out = from + "-out";
    const absl::Status status = RunSpmd(3, [&](RankContext&) -> absl::Status {
      const auto loaded = MakeModel(config);
      DT_RETURN_IF_ERROR(
          ParallelizeModule(*loaded, testing::DpTp(1, 3), PlanFor(config), {.warn = false}));
      DT_RETURN_IF_ERROR(LoadPretrained(*loaded, from));
      return SavePretrained(*loaded, out);
    });
    ASSERT_TRUE(status.ok()) << status;
    for (const fs::directory_entry& there : fs::directory_iterator(from)) {
      const std::string file = there.path().filename().string();
      EXPECT_TRUE(TextOf(there.path()) == TextOf(fs::path(out) / file)) << file;
    }
  };
  const auto written = [&](const std::string& name, const WriteOptions& options,
                           const std::function<std::string(const std::string&)>& renamed) {
    StateDict changed;
    for (const auto& [fqn, t] : state) {
      const std::string to = renamed(fqn);
      if (!to.empty()) changed.emplace_back(to, t);
    }
    ThrowIfError(WriteTensors(changed, (scratch / name).string(), options));
    return (scratch / name).string();
  };
  goes_back(written("both", {}, [](const std::string& n) { return n; }));
  goes_back(written("head", {},
                    [](const std::string& n) { return n == "transformer.wte.weight" ? "" : n; }));
  const auto bare = [](const std::string& n) {
    return n == "lm_head.weight" ? "" : n.substr(std::string("transformer.").size());
  };
  goes_back(written("bare", {.most_bytes = 20'000}, bare));
  goes_back(written("noted", {.metadata = {{"format", "pt"}, {"note", "x"}}}, bare));

  // Another order, other white space, an index that says more, and names of files of its own.
  const std::string odd = written("odd", {.most_bytes = 20'000}, bare);
  const std::string index = odd + "/model.safetensors.index.json";
  auto said = nlohmann::ordered_json::parse(TextOf(index));
  said["metadata"]["by"] = "hand";
  for (auto& [tensor, file] : said["weight_map"].items()) {
    const std::string old = file, name = absl::StrCat("part ", old);
    file = name;
    if (!fs::exists(odd + "/" + old)) continue;
    const std::string bytes = TextOf(odd + "/" + old);
    uint64_t length;
    std::memcpy(&length, bytes.data(), 8);
    auto header = nlohmann::json::parse(bytes.substr(8, length)).dump(1);
    const uint64_t now = header.size();
    std::ofstream(odd + "/" + name, std::ios::binary)
        << std::string(reinterpret_cast<const char*>(&now), 8) << header
        << bytes.substr(8 + length);
    fs::remove(odd + "/" + old);
  }
  std::ofstream(index) << said.dump();
  goes_back(odd);

  // What the model ignores is left out; the rest stays as it is called.
  StateDict masked;
  for (const auto& [fqn, t] : state) {
    if (!bare(fqn).empty()) masked.emplace_back(bare(fqn), t);
  }
  const std::string plain = written("plain", {}, bare);
  masked.emplace_back("h.0.attn.bias", ones({1, 1, 4, 4}, {.dtype = DType::kU8}));
  ThrowIfError(WriteTensors(masked, (scratch / "masked").string()));
  const auto loaded = MakeModel(config);
  ThrowIfError(LoadPretrained(*loaded, (scratch / "masked").string()));
  ThrowIfError(SavePretrained(*loaded, (scratch / "masked-out").string()));
  EXPECT_TRUE(TextOf(scratch / "masked-out/model.safetensors") ==
              TextOf(plain + "/model.safetensors"));

  // Other files than tensors: said before anything is written.
  WriteOptions other = {.like = loaded->form};
  const absl::Status status = WriteTensors(state, (scratch / "other").string(), other);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is in none of the files"));
  EXPECT_FALSE(fs::exists(scratch / "other"));
}

// Weights in another dtype, and a folder that held more files before.
TEST(HfFiles, SavingSaysItsDTypeAndLeavesNoOldFile) {
  const testing::TempFolder scratch;
  const std::string source = HfFolder("llama-uneven");
  const ModelConfig config = ValueOrThrow(ReadModelConfig(source));
  const auto model = MakeModel(config);
  ASSERT_TRUE(LoadPretrained(*model, source).ok());
  ASSERT_TRUE(SavePretrained(*model, scratch.path()).ok());
  EXPECT_TRUE(fs::exists(scratch / "model-00004-of-00004.safetensors"));
  const auto half = MakeModel(config);
  SetDType(*half, DType::kBF16);
  ASSERT_TRUE(LoadPretrained(*half, source).ok());
  const testing::TempFolder like;  // in files as before
  ASSERT_TRUE(SavePretrained(*half, like.path()).ok());
  EXPECT_LT(fs::file_size(like / "model-00001-of-00004.safetensors"),
            fs::file_size(scratch / "model-00001-of-00004.safetensors"));
  const auto parts = MakeModel(ValueOrThrow(ReadModelConfig(like.path())));
  ASSERT_TRUE(LoadPretrained(*parts, like.path()).ok());
  EXPECT_EQ(testing::Gather(*parts), testing::Gather(*half));
  ASSERT_TRUE(SavePretrained(*half, scratch.path(), {.most_bytes = 1'000'000'000}).ok());
  EXPECT_FALSE(fs::exists(scratch / "model-00004-of-00004.safetensors"));
  EXPECT_FALSE(fs::exists(scratch / "model.safetensors.index.json"));
  EXPECT_EQ(ValueOrThrow(ReadModelConfig(scratch.path())).dtype, DType::kBF16);
  const auto again = MakeModel(ValueOrThrow(ReadModelConfig(scratch.path())));
  ASSERT_TRUE(LoadPretrained(*again, scratch.path()).ok());
  EXPECT_EQ(testing::Gather(*again), testing::Gather(*half));
}

// What another model's folder has besides would be taken for this one's.
TEST(HfFiles, NoOtherModelsTokenizerStaysBesideASavedModel) {
  const testing::TempFolder scratch;
  const std::string source = HfFolder("gpt2");
  ModelConfig config = ValueOrThrow(ReadModelConfig(source));
  const auto model = MakeModel(config);
  ASSERT_TRUE(LoadPretrained(*model, source).ok());
  scratch.Write("chat_template.jinja", "mine");
  const absl::Status status = SavePretrained(*model, scratch.path());
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("[save_pretrained]"), HasSubstr("has a chat_template.jinja")));
  EXPECT_FALSE(fs::exists(scratch / "model.safetensors"));
  EXPECT_EQ(scratch.Read("chat_template.jinja"), "mine");
  model->companions.emplace_back("chat_template.jinja", "its own");
  ASSERT_TRUE(SavePretrained(*model, scratch.path()).ok());
  EXPECT_EQ(scratch.Read("chat_template.jinja"), "its own");
}

// Its weights have the name of a model's.
TEST(HfFiles, NoCheckpointIsWrittenOver) {
  const testing::TempFolder scratch;
  const auto model = MakeModel(ValueOrThrow(ReadModelConfig(HfFolder("gpt2"))));
  ASSERT_TRUE(LoadPretrained(*model, HfFolder("gpt2")).ok());
  scratch.Write("checkpoint.json", "{}");
  scratch.Write("model.safetensors", "values");
  const absl::Status status = SavePretrained(*model, scratch.path());
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is a checkpoint of a training"));
  EXPECT_EQ(scratch.Read("model.safetensors"), "values");
}

TEST(HfFiles, TiedTensorsUnderOneNameOrBoth) {
  const std::string source = HfFolder("gpt2");
  const ModelConfig config = ValueOrThrow(ReadModelConfig(source));
  const auto model = MakeModel(config);
  ASSERT_TRUE(LoadPretrained(*model, source).ok());
  const testing::NamedValues values = testing::Gather(*model);
  const StateDict state = model->GetStateDict();  // both names of the table
  const auto load = [&](const std::function<void(StateDict*)>& change) {
    const testing::TempFolder scratch;
    StateDict changed = state;
    change(&changed);
    ThrowIfError(WriteTensors(changed, scratch.path()));
    const auto loaded = MakeModel(config);
    const absl::Status status = LoadPretrained(*loaded, scratch.path());
    if (status.ok()) {
      EXPECT_EQ(testing::Gather(*loaded), values);
    }
    return status;
  };
  const auto drop = [](const std::string& name) {
    return [name](StateDict* s) {
      s->erase(std::remove_if(s->begin(), s->end(), [&](const auto& e) { return e.first == name; }),
               s->end());
    };
  };
  EXPECT_TRUE(load([](StateDict*) {}).ok());
  EXPECT_TRUE(load(drop("lm_head.weight")).ok());
  EXPECT_TRUE(load(drop("transformer.wte.weight")).ok());
  const absl::Status differ = load([](StateDict* s) {
    for (auto& [name, t] : *s) {
      if (name == "lm_head.weight") t = t + 1;
    }
  });
  EXPECT_THAT(
      std::string(differ.message()),
      AllOf(HasSubstr("lm_head.weight"), HasSubstr("transformer.wte.weight"), HasSubstr("differ")));
  const absl::Status lacks = load(drop("transformer.h.1.ln_1.bias"));
  EXPECT_THAT(std::string(lacks.message()),
              AllOf(HasSubstr("\"transformer.h.1.ln_1.bias\" is missing"),
                    ::testing::Not(HasSubstr("nearest"))));
  const absl::Status renamed = load([](StateDict* s) {
    for (auto& [name, t] : *s) {
      if (name == "transformer.h.1.ln_1.bias") name = "transformer.h.1.ln1.bias";
    }
  });
  EXPECT_THAT(std::string(renamed.message()),
              AllOf(HasSubstr("\"transformer.h.1.ln_1.bias\" is missing (nearest: "
                              "transformer.h.1.ln1.bias)"),
                    HasSubstr("is none of the model's (nearest: transformer.h.1.ln_1.bias)")));
  // As on the hub: without the prefix, and with the masks of older files.
  EXPECT_TRUE(load([](StateDict* s) {
                for (auto& [name, t] : *s) {
                  if (absl::StartsWith(name, "transformer.")) name = name.substr(12);
                }
                s->emplace_back("h.0.attn.bias", ones({1, 1, 4, 4}, {.dtype = DType::kU8}));
              }).ok());
}

// Processor time of this thread, in seconds.
double TimeOf(absl::FunctionRef<void()> work) {
  const auto now = [] {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  };
  const double start = now();
  work();
  return now() - start;
}

// Twenty are told with what they may have been meant to be, the others counted: to say what is
// wrong with many tensors takes little more than to read the names.
TEST(HfFiles, ManyNamesThatFitNoneTakeLittleTime) {
  constexpr int kSurplus = 20'000;
  const testing::TempFolder scratch;
  std::string header;
  for (int i = 0; i < kSurplus; ++i) {
    absl::StrAppend(&header, i == 0 ? "{" : ",", "\"model.layers.", i,
                    ".mlp.surplus.weight\":{\"dtype\":\"F32\",\"shape\":[0],"
                    "\"data_offsets\":[0,0]}");
  }
  header += "}";
  const uint64_t length = header.size();
  scratch.Write("model.safetensors",
                std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header);
  const auto model = MakeModel(ValueOrThrow(ReadModelConfig(HfFolder("llama-gqa"))));
  absl::Status status;
  const double reading = TimeOf([&] { status = TensorFolder::Open(scratch.path()).status(); });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_LT(TimeOf([&] { status = LoadPretrained(*model, scratch.path()); }), 10 * reading);
  const std::string message(status.message());
  EXPECT_THAT(message, HasSubstr(absl::StrCat(
                           "; and ", kSurplus + model->NamedParameters().size() - 20, " more")));
  int told = 0;
  for (size_t at = 0; (at = message.find(" (nearest: model.layers.", at)) != std::string::npos;
       ++at)
    ++told;
  EXPECT_EQ(told, 20);
}

// Both names of a table are compared once, by all ranks together, and all hear of a difference.
TEST(HfFiles, RanksShareTheWorkOfComparingTiedNames) {
  const testing::TempFolder scratch;
  ModelConfig config;
  config.model = LlamaConfig{.vocab = 8192,
                             .hidden = 256,
                             .inner = 64,
                             .layers = 1,
                             .heads = 8,
                             .kv_heads = 4,
                             .head_size = 8,
                             .tied = true};
  StateDict state;
  {
    const auto model = MakeModel(config);
    Materialize(*model);
    state = model->GetStateDict();
  }
  const auto load = [&](int64_t* read) {
    const auto so_far = [] {
      std::ifstream io("/proc/self/io");
      std::string name;
      int64_t bytes = 0;
      io >> name >> bytes;  // rchar
      return bytes;
    };
    const int64_t before = so_far();
    const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
      const auto model = MakeModel(config);
      DT_RETURN_IF_ERROR(
          ParallelizeModule(*model, testing::DpTp(1, 4), PlanFor(config), {.warn = false}));
      const absl::Status loaded = LoadPretrained(*model, scratch.path());
      EXPECT_EQ(loaded.ok(), model->Parameters()[0]->materialized());
      return loaded;
    });
    *read = so_far() - before;
    return status;
  };
  ThrowIfError(WriteTensors(state, scratch.path()));
  const int64_t size = static_cast<int64_t>(fs::file_size(scratch / "model.safetensors"));
  int64_t read = 0;
  const absl::Status same = load(&read);
  EXPECT_TRUE(same.ok()) << same;
  EXPECT_GE(read, size);  // it is counted
  EXPECT_LT(read, 2 * size);
  // One value, in each rank's share in turn: a piece has 1,024 rows of 1 KiB.
  for (const int64_t row : {0, 1024, 2048, 3072, 8191}) {
    StateDict changed = state;
    for (auto& [name, t] : changed) {
      if (name == "lm_head.weight") t = index_fill(t, 0, FromVector<int64_t>({row}, {1}), 7.0);
    }
    ThrowIfError(WriteTensors(changed, scratch.path()));
    const absl::Status status = load(&read);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("lm_head.weight"), HasSubstr("values differ")))
        << row;
  }
}

TEST(HfFiles, BoolsAreZeroOrOneInAModelToo) {
  struct Masked : Module {
    Masked() { AddBuffer("mask", ones({4}, {.dtype = DType::kBool})); }
    Values Forward(const Values& in) override { return in; }
  };
  const testing::TempFolder scratch;
  Masked source;
  Materialize(source);
  ThrowIfError(WriteTensors(source.GetStateDict(), scratch.path()));
  const std::string path = (scratch / "model.safetensors").string();
  std::string bytes = TextOf(path);
  EXPECT_TRUE(LoadPretrained(source, scratch.path()).ok());
  bytes[bytes.size() - 2] = '\xFF';
  std::ofstream(path, std::ios::binary) << bytes;
  const absl::Status status = LoadPretrained(source, scratch.path());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(path), HasSubstr("tensor \"mask\""),
                                                   HasSubstr("the byte 255, not 0 or 1")));
}

TEST(HfFiles, LinksMayLeadIntoTheCacheAndNowhereElse) {
  const testing::TempFolder scratch;
  const fs::path snapshot = scratch / "snapshots/abc";
  fs::create_directories(snapshot);
  fs::create_directories(scratch / "blobs");
  for (const std::string place : {"blobs", "elsewhere"}) {
    fs::create_directories(scratch / place);
    for (const char* name :
         {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}) {
      fs::remove(snapshot / name);
      fs::copy_file(HfFolder("bad") + "/index_ok/" + name, scratch / (place + "/" + name));
      fs::create_symlink(fs::path("../..") / place / name, snapshot / name);
    }
    fs::copy_file(HfFolder("bad") + "/index_ok/model.safetensors.index.json",
                  snapshot / "model.safetensors.index.json", fs::copy_options::overwrite_existing);
    const auto folder = TensorFolder::Open(snapshot.string());
    if (place == "blobs") {
      EXPECT_TRUE(folder.ok()) << folder.status();
    } else {
      EXPECT_THAT(std::string(folder.status().message()), HasSubstr("leads out of the folder"));
    }
  }
}

// What goes along with a copy of a model is the folder's own: else a stranger's link would carry
// somebody's file away.
TEST(HfFiles, CompanionsAreNoLinksOutOfTheFolder) {
  const testing::TempFolder scratch;
  fs::create_directory(scratch / "m");
  fs::copy(HfFolder("gpt2") + "/config.json", scratch / "m/config.json");
  std::ofstream(scratch / "secret") << "mine";
  std::ofstream(scratch / "m/vocab.json") << "{}";
  fs::create_symlink("vocab.json", scratch / "m/tokenizer.json");
  ASSERT_EQ(ReadModelConfig((scratch / "m").string())->files.size(), 3u);
  fs::create_symlink(scratch / "secret", scratch / "m/chat_template.jinja");
  const absl::Status status = ReadModelConfig((scratch / "m").string()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("\"chat_template.jinja\" is a link that leads out of the folder"));
}

// Each rank reads its part into its part.
TEST(HfFiles, LoadingHoldsNoMoreThanThePart) {
  const testing::TempFolder scratch;
  ModelConfig config;
  config.model = LlamaConfig{.vocab = 8192,
                             .hidden = 128,
                             .inner = 384,
                             .layers = 2,
                             .heads = 8,
                             .kv_heads = 4,
                             .head_size = 16};
  int64_t whole = 0;
  {
    const auto model = MakeModel(config);
    Materialize(*model);
    whole = model->NumElements() * 4;
    ASSERT_TRUE(SavePretrained(*model, scratch.path()).ok());
  }
  const absl::Status status = RunSpmd(4, [&](RankContext& context) -> absl::Status {
    const auto model = MakeModel(config);
    DT_RETURN_IF_ERROR(ParallelizeModule(*model, testing::DpTp(1, 4), PlanFor(config)));
    Allocator& memory = *context.device_allocator();
    memory.ResetPeak();
    const int64_t before = memory.stats().in_use_bytes;
    DT_RETURN_IF_ERROR(LoadPretrained(*model, scratch.path()));
    EXPECT_LE(memory.stats().peak_bytes - before, whole * 3 / 10);
    EXPECT_GE(memory.stats().peak_bytes - before, whole / 5);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(HfFiles, SavingIntoNoFolderIsToldToAllRanks) {
  const testing::TempFolder scratch;
  std::ofstream(scratch / "file") << "here";
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    DT_ASSIGN_OR_RETURN(const auto model,
                        testing::LoadOn(testing::DpTp(1, 2), HfFolder("gpt2"), DType::kF32));
    const absl::Status save = SavePretrained(*model, (scratch / "file").string());
    EXPECT_EQ(save.code(), absl::StatusCode::kUnavailable) << save;
    EXPECT_THAT(std::string(save.message()), HasSubstr("/file"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(TextOf(scratch / "file"), "here");
}

// A name that cannot be given, at each place in turn: the folder is as it was, byte for byte.
TEST(HfFiles, AWritingThatFailsLeavesTheFolderAsItWas) {
  const auto texts = [](const fs::path& folder) {
    std::map<std::string, std::string> all;
    for (const fs::directory_entry& e : fs::directory_iterator(folder)) {
      all[e.path().filename()] = e.is_directory() ? "a folder" : TextOf(e.path());
    }
    return all;
  };
  const StateDict old = {{"a", ones({4})}, {"b", ones({4})}},
                  made = {{"a", zeros({4})}, {"b", zeros({4})}};
  const WriteOptions one = {.texts = {{"config.json", "old"}}};
  const WriteOptions two = {.most_bytes = 16, .texts = {{"config.json", "new"}}};
  for (const char* blocked : {"config.json", "model-00001-of-00002.safetensors",
                              "model-00002-of-00002.safetensors", "model.safetensors.index.json"}) {
    const testing::TempFolder scratch;
    const fs::path folder = scratch / "f";
    ASSERT_TRUE(WriteTensors(old, folder.string(), one).ok());
    fs::remove(folder / blocked);
    fs::create_directory(folder / blocked);
    const auto before = texts(folder);
    const absl::Status status = WriteTensors(made, folder.string(), two);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(blocked));
    EXPECT_EQ(texts(folder), before) << blocked;
    fs::remove(folder / blocked);
    ASSERT_TRUE(WriteTensors(made, folder.string(), two).ok());
    EXPECT_EQ(texts(folder).size(), 4u);
    EXPECT_EQ(texts(folder)["config.json"], "new");
  }
}

// A model that no plan has spread is saved by every rank that asks for it: none spoils the other's.
TEST(HfFiles, StemsThatBeginAlikeKeepTheirFiles) {
  const testing::TempFolder scratch;
  const StateDict state = {{"a", ones({4})}, {"b", ones({4})}};
  ThrowIfError(WriteTensors(state, scratch.path(), {.most_bytes = 16, .stem = "model-ema"}));
  ThrowIfError(WriteTensors(state, scratch.path(), {.most_bytes = 16}));
  ThrowIfError(WriteTensors(state, scratch.path()));  // in one file: those of two go
  std::vector<std::string> names;
  for (const fs::directory_entry& e : fs::directory_iterator(scratch.path())) {
    names.push_back(e.path().filename());
  }
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("model-ema-00001-of-00002.safetensors",
                                                     "model-ema-00002-of-00002.safetensors",
                                                     "model-ema.safetensors.index.json",
                                                     "model.safetensors"));
}

TEST(HfFiles, WhatNoHeaderCanHoldIsRefused) {
  const testing::TempFolder scratch;
  const auto why = [&](const std::string& name, const DTensor& value, WriteOptions options = {}) {
    const absl::Status status = WriteTensors({{name, value}}, scratch.path(), options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(why("caf\xE9", ones({2})), HasSubstr("\"caf\\xe9\", which is not UTF-8"));
  EXPECT_THAT(why("__metadata__", ones({2})), HasSubstr("that of its metadata"));
  EXPECT_THAT(why("w", DTensor()), HasSubstr("\"w\" is null"));
  EXPECT_THAT(why("w", ones({2}), {.metadata = {{"from", "\xFF"}}}),
              HasSubstr("metadata \"from\""));
}

TEST(HfFiles, RanksSaveTheSameModelOnSelf) {
  const testing::TempFolder scratch;
  for (int round = 0; round < 10; ++round) {
    const absl::Status status = RunSpmd(3, [&](RankContext&) -> absl::Status {
      DT_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(HfFolder("gpt2")));
      const auto model = MakeModel(config);
      DT_RETURN_IF_ERROR(LoadPretrained(*model, HfFolder("gpt2")));
      DT_RETURN_IF_ERROR(SavePretrained(*model, (scratch / "self").string()));
      const auto again = MakeModel(config);
      return LoadPretrained(*again, (scratch / "self").string());
    });
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_TRUE(TextOf(scratch / "self/model.safetensors") ==
              TextOf(HfFolder("gpt2") + "/model.safetensors"));
  for (const fs::directory_entry& e : fs::directory_iterator(scratch / "self")) {
    EXPECT_EQ(e.path().string().find(".unfinished"), std::string::npos) << e.path();
    EXPECT_EQ(e.path().string().find(".before"), std::string::npos) << e.path();
  }
}

TEST(HfFiles, AParameterTakesOnlyWhatItIs) {
  Linear layer(3, 2);
  EXPECT_THAT(MessageOf([&] { layer.weight().Take(ones({3, 2})); }),
              AllOf(HasSubstr("parameter weight"), HasSubstr("[2, 3]"), HasSubstr("[3, 2]")));
  const DTensor values = ones({2, 3});
  layer.weight().Take(values);
  EXPECT_TRUE(layer.weight().tensor().requires_grad());
  EXPECT_EQ(layer.weight().tensor().local().data(), values.local().data());
}

// What a folder lacks is refused, unless it may be missing: then it is as the model makes it, or as
// it was, the same on every mesh, and the names are said once.
TEST(HfFiles, MissingTensorsMayBeAllowed) {
  const ModelConfig config = ValueOrThrow(ReadModelConfig(HfFolder("llama-gqa")));
  const testing::TempFolder scratch;
  {
    const auto source = MakeModel(config);
    ASSERT_TRUE(LoadPretrained(*source, HfFolder("llama-gqa")).ok());
    StateDict some;
    for (const auto& [name, t] : source->GetStateDict()) {
      if (name != "model.norm.weight" && name != "lm_head.weight") some.emplace_back(name, t);
    }
    ThrowIfError(WriteTensors(some, scratch.path()));
  }
  const auto values = [&](int64_t tp) {
    testing::NamedValues gathered;
    const absl::Status status = RunSpmd(tp, [&](RankContext& rank) -> absl::Status {
      ManualSeed(3);
      const auto model = MakeModel(config);
      DT_RETURN_IF_ERROR(ParallelizeModule(*model, testing::DpTp(1, tp), PlanFor(config)));
      const std::string refused(LoadPretrained(*model, scratch.path()).message());
      EXPECT_THAT(refused, AllOf(HasSubstr("tensor \"model.norm.weight\" is missing"),
                                 HasSubstr("tensor \"lm_head.weight\" is missing")));
      for (Parameter* p : model->Parameters()) EXPECT_FALSE(p->materialized());
      DT_RETURN_IF_ERROR(LoadPretrained(*model, scratch.path(), {.allow_missing = true}));
      testing::NamedValues all = testing::Gather(*model);
      {
        const NoGrad no_grad;
        for (Parameter* p : model->Parameters()) fill_(p->tensor(), 5.0);
      }
      DT_RETURN_IF_ERROR(LoadPretrained(*model, scratch.path(), {.allow_missing = true}));
      for (const auto& [name, now] : testing::Gather(*model)) {
        const bool kept = name == "model.norm.weight" || name == "lm_head.weight";
        EXPECT_EQ(now == std::vector<double>(now.size(), 5.0), kept) << name;
      }
      if (rank.rank() == 0) gathered = std::move(all);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    return gathered;
  };
  ::testing::internal::CaptureStderr();
  const testing::NamedValues one = values(1);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("lacks 2 of the model's tensors, which are as they were made: "
                              "model.norm.weight, lm_head.weight"));
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(values(2), one);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), said);
  const auto whole = MakeModel(config);
  ASSERT_TRUE(LoadPretrained(*whole, HfFolder("llama-gqa")).ok());
  const testing::NamedValues expected = testing::Gather(*whole);
  ASSERT_EQ(one.size(), expected.size());
  for (size_t i = 0; i < one.size(); ++i) {
    const auto& [name, got] = one[i];
    if (name == "model.norm.weight") {
      EXPECT_EQ(got, std::vector<double>(got.size(), 1.0));
    } else {
      EXPECT_EQ(one[i] == expected[i], name != "lm_head.weight") << name;
    }
  }
}

// One rank's file is gone: all say so, and no model has changed.
TEST(HfFiles, OneRankThatCannotReadIsTold) {
  const absl::Status status = RunSpmd(2, [&](RankContext& context) -> absl::Status {
    DT_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(HfFolder("gpt2")));
    const auto model = MakeModel(config);
    DT_RETURN_IF_ERROR(ParallelizeModule(*model, testing::DpTp(1, 2), PlanFor(config)));
    const absl::Status load =
        LoadPretrained(*model, context.rank() == 1 ? "/nowhere" : HfFolder("gpt2"));
    EXPECT_THAT(std::string(load.message()), HasSubstr("/nowhere"));
    for (Parameter* p : model->Parameters()) EXPECT_FALSE(p->materialized());
    return LoadPretrained(*model, HfFolder("gpt2"));
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::hf_files_test
