// Configs of Hugging Face's folders: what they say in the older and in the newer spelling, what is
// refused, and rotary positions against transformers' numbers.
#include <gmock/gmock.h>

#include "tests/parallel/hf_support.h"

namespace dtensor::hf_config_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::HfFolder;
using testing::TextOf;

TEST(HfConfig, LegacyAndNewConfigsSayTheSame) {
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

// A field by which transformers generates something else is named, where it does something, and the
// model loads all the same.
TEST(HfConfig, WhatGenerateDoesNotDoIsNamed) {
  const testing::TempFolder folder;
  folder.Write("config.json", TextOf(HfFolder("llama-gqa") + "/config.json"));
  const auto said = [&](const std::string& field, const std::string& value) {
    folder.Write("generation_config.json", absl::StrCat("{\"", field, "\": ", value, "}"));
    return ValueOrThrow(ReadModelConfig(folder.path())).generates;
  };
  const char* const nothing[] = {"null", "false", "[]", "{}"};
  const std::pair<const char*, const char*> numbers[] = {
      {"no_repeat_ngram_size", "0"},
      {"min_new_tokens", "0"},
      {"min_length", "0"},
      {"encoder_repetition_penalty", "1.0"},
      {"num_beams", "1"},
      {"penalty_alpha", "0.0"},
      {"guidance_scale", "1"},
      {"suppress_tokens", "null"},
      {"bad_words_ids", "null"},
      {"begin_suppress_tokens", "null"},
      {"forced_bos_token_id", "null"},
      {"forced_eos_token_id", "null"},
      {"sequence_bias", "null"},
      {"stop_strings", "null"},
      {"exponential_decay_length_penalty", "null"}};
  for (const auto& [field, neutral] : numbers) {
    EXPECT_TRUE(said(field, neutral).ok()) << field;
    for (const char* none : nothing) EXPECT_TRUE(said(field, none).ok()) << field << none;
    for (const char* value : {"2", "[3]", "\"x\"", "{\"a\": 1}", "true"}) {
      const absl::Status status = said(field, value);
      EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << field << value;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("/generation_config.json: "), HasSubstr(field)));
    }
  }
  EXPECT_TRUE(said("temperature", "0.6").ok());
  folder.Write("generation_config.json", "{\"repetition_penalty\": 0}");
  EXPECT_THAT(std::string(ReadModelConfig(folder.path()).status().message()),
              HasSubstr("repetition_penalty must be positive"));
}

TEST(HfConfig, ConfigsOfModelsMadeHereAreReadAgain) {
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

TEST(HfConfig, FieldsThatWouldChangeNumbersAreRefused) {
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

// A number that would take gigabytes before anything is refused.
TEST(HfConfig, HeadsOfAnyWidthAreNotBelieved) {
  nlohmann::json config = nlohmann::json::parse(TextOf(HfFolder("llama-gqa") + "/config.json"));
  config["head_dim"] = 2'000'000'000;
  EXPECT_THAT(
      std::string(ParseModelConfig(config.dump(), "c.json").status().message()),
      HasSubstr("c.json: head_dim makes heads of 2000000000, which may be of at most 65536"));
}

// Where the config names no dtype the files do.
TEST(HfConfig, TheFilesSayTheDTypeWhereTheConfigDoesNot) {
  for (const auto& [model, dtype] :
       {std::pair("llama-bf16", DType::kBF16), std::pair("llama-gqa", DType::kF32)}) {
    const testing::TempFolder folder;
    const std::string from = HfFolder(model);
    nlohmann::json config = nlohmann::json::parse(TextOf(from + "/config.json"));
    config.erase("dtype");
    config.erase("torch_dtype");
    folder.Write("config.json", config.dump());
    EXPECT_EQ(ValueOrThrow(ReadModelConfig(folder.path())).dtype, DType::kF32) << "no files";
    folder.Write("model.safetensors", TextOf(from + "/model.safetensors"));
    EXPECT_EQ(ValueOrThrow(ReadModelConfig(folder.path())).dtype, dtype) << model;
  }
}

// By which every token sees all others, or a layer is another one than the rest.
TEST(HfConfig, AttentionBothWaysAndLayersOfTheirOwnAreRefused) {
  for (const std::string name : {"llama-gqa", "gpt2"}) {
    const std::string text = TextOf(HfFolder(name) + "/config.json");
    const auto with = [&](const std::string& key, const nlohmann::json& value) {
      nlohmann::json config = nlohmann::json::parse(text);
      config[key] = value;
      return ParseModelConfig(config.dump(), "c.json").status();
    };
    EXPECT_TRUE(with("is_causal", true).ok());
    // transformers takes null for false, too.
    for (const nlohmann::json& value : {nlohmann::json(false), nlohmann::json(nullptr)}) {
      const absl::Status status = with("is_causal", value);
      EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
      EXPECT_THAT(std::string(status.message()), HasSubstr("is_causal is "));
    }
    EXPECT_TRUE(with("per_layer_config", nullptr).ok());
    const absl::Status layers = with("per_layer_config", {{"0", {{"rms_norm_eps", 0.5}}}});
    EXPECT_EQ(layers.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(layers.message()), HasSubstr("per_layer_config changes numbers"));
  }
}

// As transformers' attribute_map; it takes either silently where both are there.
TEST(HfConfig, FieldsOfGpt2MayHaveTheNamesOfOtherModels) {
  const std::pair<const char*, const char*> names[] = {{"n_embd", "hidden_size"},
                                                       {"n_head", "num_attention_heads"},
                                                       {"n_layer", "num_hidden_layers"},
                                                       {"n_positions", "max_position_embeddings"}};
  const nlohmann::json config = nlohmann::json::parse(TextOf(HfFolder("gpt2") + "/config.json"));
  const std::string want = ModelConfigJson(ValueOrThrow(ParseModelConfig(config.dump(), "c.json")));
  nlohmann::json all = config;
  for (const auto& [own, other] : names) {
    nlohmann::json both = config;
    both[other] = config[own];
    EXPECT_EQ(ModelConfigJson(ValueOrThrow(ParseModelConfig(both.dump(), "c.json"))), want);
    both[other] = config[own].get<int64_t>() + 1;
    const absl::Status status = ParseModelConfig(both.dump(), "c.json").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat(other, " is another name of ", own)));
    all[other] = config[own];
    all.erase(own);
  }
  EXPECT_EQ(ModelConfigJson(ValueOrThrow(ParseModelConfig(all.dump(), "c.json"))), want);
}

// Of generation_config.json, whatever it says of them, and of config.json where there is none: as
// transformers, for which a text goes on that the former names no end of.
TEST(HfConfig, IdsOfTokensAreThoseOfOneFile) {
  const testing::TempFolder folder;
  nlohmann::json config = nlohmann::json::parse(TextOf(HfFolder("llama-gqa") + "/config.json"));
  config.update({{"eos_token_id", 5}, {"bos_token_id", 6}, {"pad_token_id", 7}});
  folder.Write("config.json", config.dump());
  const ModelConfig alone = ValueOrThrow(ReadModelConfig(folder.path()));
  EXPECT_EQ(alone.eos, std::vector<int64_t>{5});
  EXPECT_EQ(alone.bos, 6);
  for (const char* none : {"{}", "{\"eos_token_id\": null}"}) {
    folder.Write("generation_config.json", none);
    const ModelConfig both = ValueOrThrow(ReadModelConfig(folder.path()));
    EXPECT_TRUE(both.eos.empty()) << none;
    EXPECT_FALSE(both.bos || both.pad) << none;
    EXPECT_EQ(std::get<LlamaConfig>(both.model).padding, 7);  // the table's, which is the model's
  }
  folder.Write("generation_config.json", "{\"eos_token_id\": [8, 9]}");
  EXPECT_EQ(ValueOrThrow(ReadModelConfig(folder.path())).eos, (std::vector<int64_t>{8, 9}));
}

// Numbers of transformers' formulas, for heads of size 8 and theta 10,000.
TEST(HfConfig, RotaryScalings) {
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
  RopeConfig longrope = {.type = "longrope",
                         .factor = 4,
                         .original_positions = 64,
                         .short_factor = {1, 1.25, 1.5, 1.75},
                         .long_factor = {2, 3, 4, 5}};
  near(made(longrope, 256, 64).inverse, {1, 0.08, 0.01 / 1.5, 0.001 / 1.75});
  near(made(longrope, 256, 65).inverse, {0.5, 0.1 / 3, 0.0025, 0.0002});
  near({made(longrope, 256, 65).attention_factor}, {1.1547005383792515});
  longrope.attention_factor = 1.5;
  EXPECT_EQ(made(longrope, 256, 65).attention_factor, 1.5);
  longrope.long_factor.pop_back();
  EXPECT_THAT(std::string(MakeRopeFrequencies(longrope, 8, 256, 0).status().message()),
              HasSubstr("long_factor must have 4 positive numbers for heads of 8, has 3"));
  EXPECT_THAT(std::string(MakeRopeFrequencies({.type = "yarm"}, 8, 64, 0).status().message()),
              AllOf(HasSubstr("yarm"), HasSubstr("yarn")));
}

// Where a config says it in two places, as transformers 5 takes it.
TEST(HfConfig, RotaryFieldsInTwoPlaces) {
  const std::string text = TextOf(HfFolder("llama-gqa") + "/config.json");
  const auto read = [&](const char* patch) {
    nlohmann::json config = nlohmann::json::parse(text);
    config.merge_patch(nlohmann::json::parse(patch));
    return ParseModelConfig(config.dump(), "c.json");
  };
  const auto rope = [&](const char* patch) {
    return std::get<LlamaConfig>(ValueOrThrow(read(patch)).model).rope;
  };
  // rope_scaling goes before rope_parameters, with its theta or none, unless it is empty.
  const RopeConfig both = rope(R"({"rope_scaling":{"rope_type":"linear","factor":4.0},
                                   "rope_parameters":{"rope_theta":5000.0}})");
  EXPECT_EQ(both.type, "linear");
  EXPECT_EQ(both.factor, 4);
  EXPECT_EQ(both.theta, 10000);
  EXPECT_EQ(rope(R"({"rope_scaling":{},"rope_parameters":{"rope_theta":5000.0}})").theta, 5000);
  // The positions of the whole config go before those of the scaling, and are the model's where
  // nothing says them.
  const RopeConfig yarn = rope(R"({"original_max_position_embeddings":32,"rope_parameters":
      {"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":64}})");
  EXPECT_EQ(yarn.original_positions, 32);
  const auto inverse = [](const RopeConfig& c) {
    return ValueOrThrow(MakeRopeFrequencies(c, 8, 128, 0)).inverse;
  };
  const RopeConfig llama3 = rope(R"({"rope_parameters":{"rope_type":"llama3","factor":4.0,
      "low_freq_factor":1.0,"high_freq_factor":4.0}})");
  EXPECT_LE(testing::Off(inverse(llama3), {1, 0.050929583609104156, 0.0025, 0.00025}), 1e-7);
  const RopeConfig linear = rope(R"({"original_max_position_embeddings":32,
      "rope_parameters":{"rope_type":"linear","factor":4.0}})");
  EXPECT_EQ(linear.original_positions, 0);
  const RopeConfig longrope = rope(R"({"max_position_embeddings":256,
      "original_max_position_embeddings":64,"rope_parameters":{"rope_type":"longrope",
      "short_factor":[1,1.25,1.5,1.75],"long_factor":[2,3,4,5]}})");
  EXPECT_EQ(longrope.factor, 4);
  ModelConfig config;
  config.model = LlamaConfig{.rope = longrope};
  const std::string made = ModelConfigJson(config);
  EXPECT_EQ(ModelConfigJson(ValueOrThrow(ParseModelConfig(made, "c.json"))), made);
  const auto refusal = [&](const char* patch) {
    return std::string(read(patch).status().message());
  };
  EXPECT_THAT(refusal(R"({"rope_parameters":{"rope_type":"longrope","short_factor":[1,1,1,1]}})"),
              HasSubstr("rope_parameters.long_factor is missing"));
  EXPECT_THAT(refusal(R"({"rope_parameters":{"rope_type":"longrope","short_factor":[1,-1,1,1],
                          "long_factor":[1,1,1,1]}})"),
              HasSubstr("short_factor must have positive numbers, has the number -1"));
  EXPECT_THAT(refusal(R"({"rope_parameters":{"rope_type":"longrope","short_factor":[1,1],
                          "long_factor":[1,1,1,1]}})"),
              AllOf(HasSubstr("c.json"), HasSubstr("short_factor must have 4")));
}

// Logits of the last token as transformers computes them (float64), at the original number of
// positions and one above; and the same from a cache.
TEST(HfConfig, LongropeTurnsByTheNumberOfTokens) {
  ModelConfig config = ValueOrThrow(ReadModelConfig(HfFolder("llama-gqa")));
  std::get<LlamaConfig>(config.model).rope = {.type = "longrope",
                                              .factor = 4,
                                              .original_positions = 8,
                                              .short_factor = {1, 1.25, 1.5, 1.75},
                                              .long_factor = {2, 3, 4, 5}};
  const auto model = MakeModel(config);
  ThrowIfError(LoadPretrained(*model, HfFolder("llama-gqa")));
  const std::map<int64_t, std::vector<double>> known = {
      {8, {1.195127670190456, 1.797352150127311, -0.5991959499898627, -0.03557063819288034}},
      {9, {0.1879090391818249, -0.21261873804809017, -0.5848272151142353, 1.7090113749239613}}};
  for (const auto& [tokens, want] : known) {
    std::vector<int64_t> ids;
    for (int64_t i = 1; i <= tokens; ++i) ids.push_back(3 * i % model->vocab());
    const DTensor in = FromVector(ids, {1, tokens});
    KVCache cache(tokens);
    for (const DTensor& logits : {(*model)(in), model->Decode(in, cache)}) {
      const DTensor last = flatten(slice(logits, 1, tokens - 1, tokens));
      EXPECT_LE(testing::Off(slice(last, 0, 0, 4).ToVector<double>(), want), 1e-5) << tokens;
    }
  }
}

}  // namespace
}  // namespace dtensor::hf_config_test
