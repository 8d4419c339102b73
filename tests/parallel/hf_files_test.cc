// safetensors files and configs: broken ones are refused by name, odd ones load, and what is
// written back are the same bytes.
#include <gmock/gmock.h>

#include <filesystem>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
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

TEST(HfFiles, BrokenOnesAreRefusedByNameAndOddOnesLoad) {
  const auto manifest = nlohmann::json::parse(TextOf(HfFolder("bad") + "/manifest.json"));
  int refused = 0, loaded = 0;
  for (const auto& entry : manifest["entries"]) {
    const std::string file = entry["file"], kind = entry["kind"];
    SCOPED_TRACE(file + ": " + entry["what"].get<std::string>());
    const absl::Status status = LoadEntry(file);
    if (kind == "bad" || kind == "suspicious") {
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
        return SavePretrained(*model, scratch.path(),
                              {.most_bytes = name == "llama-uneven" ? 100'000 : 1'000'000'000});
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

// Weights in another dtype, and a folder that held more files before.
TEST(HfFiles, SavingSaysItsDTypeAndLeavesNoOldFile) {
  const testing::TempFolder scratch;
  const std::string source = HfFolder("llama-uneven");
  const ModelConfig config = ValueOrThrow(ReadModelConfig(source));
  const auto model = MakeModel(config);
  ASSERT_TRUE(LoadPretrained(*model, source).ok());
  ASSERT_TRUE(SavePretrained(*model, scratch.path(), {.most_bytes = 100'000}).ok());
  EXPECT_TRUE(fs::exists(scratch / "model-00004-of-00004.safetensors"));
  const auto half = MakeModel(config);
  SetDType(*half, DType::kBF16);
  ASSERT_TRUE(LoadPretrained(*half, source).ok());
  ASSERT_TRUE(SavePretrained(*half, scratch.path()).ok());
  EXPECT_FALSE(fs::exists(scratch / "model-00004-of-00004.safetensors"));
  EXPECT_FALSE(fs::exists(scratch / "model.safetensors.index.json"));
  EXPECT_EQ(ValueOrThrow(ReadModelConfig(scratch.path())).dtype, DType::kBF16);
  const auto again = MakeModel(ValueOrThrow(ReadModelConfig(scratch.path())));
  ASSERT_TRUE(LoadPretrained(*again, scratch.path()).ok());
  EXPECT_EQ(testing::Gather(*again), testing::Gather(*half));
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
              AllOf(HasSubstr("\"transformer.h.1.ln_1.bias\" is missing"), HasSubstr("nearest")));
  // As on the hub: without the prefix, and with the masks of older files.
  EXPECT_TRUE(load([](StateDict* s) {
                for (auto& [name, t] : *s) {
                  if (absl::StartsWith(name, "transformer.")) name = name.substr(12);
                }
                s->emplace_back("h.0.attn.bias", ones({1, 1, 4, 4}, {.dtype = DType::kU8}));
              }).ok());
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

TEST(HfFiles, LegacyAndNewConfigsSayTheSame) {
  for (const std::string name : {"llama-gqa", "llama-uneven", "llama-bf16"}) {
    const std::string path = HfFolder(name) + "/config_legacy.json";
    const ModelConfig a = ValueOrThrow(ReadModelConfig(HfFolder(name)));
    const ModelConfig b = ValueOrThrow(ParseModelConfig(TextOf(path), path));
    const auto& x = std::get<LlamaConfig>(a.model);
    const auto& y = std::get<LlamaConfig>(b.model);
    EXPECT_EQ(a.dtype, b.dtype);
    EXPECT_EQ(x.tied, y.tied);
    EXPECT_EQ(x.rope.type, y.rope.type);
    const auto inverse = [](const LlamaConfig& c) {
      return ValueOrThrow(MakeRopeFrequencies(c.rope, c.head_size, c.max_positions, 0)).inverse;
    };
    EXPECT_EQ(inverse(x), inverse(y));
    const testing::Golden golden(name);
    EXPECT_LE(testing::Off(inverse(x), golden["rope.inv_freq"]), 1e-14);
  }
}

TEST(HfFiles, ConfigsOfModelsMadeHereAreReadAgain) {
  ModelConfig config;
  config.dtype = DType::kBF16;
  config.eos = {2, 5};
  config.pad = 7;
  const RopeConfig rope = {.type = "yarn",
                           .theta = 5e5,
                           .factor = 4,
                           .original_positions = 32,
                           .beta_fast = 16,
                           .attention_factor = 1.25,
                           .truncate = false};
  config.model =
      LlamaConfig{.heads = 6, .kv_heads = 3, .head_size = 10, .rope = rope, .attention_bias = true};
  const std::string text = ModelConfigJson(config);
  const ModelConfig back = ValueOrThrow(ParseModelConfig(text, "c.json"));
  EXPECT_EQ(ModelConfigJson(back), text);
  EXPECT_EQ(back.eos, config.eos);
  EXPECT_EQ(std::get<LlamaConfig>(back.model).rope.attention_factor, 1.25);
  config.model = GPT2Config{
      .heads = 6, .activation = "relu", .scale_by_layer = true, .residual_dropout = 0.25};
  const std::string gpt2 = ModelConfigJson(config);
  EXPECT_EQ(ModelConfigJson(ValueOrThrow(ParseModelConfig(gpt2, "c.json"))), gpt2);
  EXPECT_THAT(gpt2, AllOf(HasSubstr("\"resid_pdrop\": 0.25"), HasSubstr("GPT2LMHeadModel")));
}

TEST(HfFiles, FieldsThatWouldChangeNumbersAreRefused) {
  const std::string text = TextOf(HfFolder("gpt2") + "/config.json");
  const auto with = [&](const std::string& key, const nlohmann::json& value) {
    nlohmann::json config = nlohmann::json::parse(text);
    config[key] = value;
    return std::string(ParseModelConfig(config.dump(), "c.json").status().message());
  };
  EXPECT_THAT(with("add_cross_attention", true), HasSubstr("add_cross_attention"));
  EXPECT_THAT(with("activation_function", "gelu_fst"),
              AllOf(HasSubstr("gelu_fst"), HasSubstr("gelu_new")));
  EXPECT_THAT(with("model_type", "gtp2"), AllOf(HasSubstr("gtp2"), HasSubstr("nearest is gpt2")));
  EXPECT_THAT(with("architectures", {"GPT2ForTokenClassification"}),
              AllOf(HasSubstr("GPT2ForTokenClassification"), HasSubstr("GPT2LMHeadModel")));
  EXPECT_THAT(with("quantization_config", {{"bits", 4}}), HasSubstr("quantization_config"));
  EXPECT_THAT(with("n_head", 5), AllOf(HasSubstr("c.json"), HasSubstr("n_head")));
}

// Numbers of transformers' formulas, for heads of size 8 and theta 10,000.
TEST(HfFiles, RotaryScalings) {
  const auto made = [](const RopeConfig& config, int64_t positions, int64_t tokens) {
    return ValueOrThrow(MakeRopeFrequencies(config, 8, positions, tokens));
  };
  const auto near = [](const std::vector<double>& a, const std::vector<double>& b) {
    EXPECT_LE(testing::Off(a, b), 1e-15);
  };
  near(made({.type = "linear", .factor = 4}, 64, 0).inverse, {0.25, 0.025, 0.0025, 0.00025});
  const RopeConfig dynamic = {.type = "dynamic", .factor = 2};
  near(made(dynamic, 64, 64).inverse, {1, 0.1, 0.01, 0.001});
  near(made(dynamic, 64, 200).inverse,
       {1, 0.0575369582664788, 0.0033105015665585236, 0.00019047619047619048});
  const RopeFrequencies yarn =
      made({.type = "yarn", .factor = 4, .original_positions = 1024}, 4096, 0);
  near(yarn.inverse, {1, 0.075, 0.005, 0.00025});
  near({yarn.attention_factor}, {1.138629436111989});
  EXPECT_THAT(std::string(MakeRopeFrequencies({.type = "yarm"}, 8, 64, 0).status().message()),
              AllOf(HasSubstr("yarm"), HasSubstr("yarn")));
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
