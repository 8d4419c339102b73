// A model that generates: the small Llama of tests/data with a tokenizer of bytes.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "dtensor/parallel/text/pre_tokenizer.h"
#include "nlohmann/json.hpp"
#include "tests/common/temp_folder.h"

namespace dtensor::testing {

// A folder with the model's files, the tokenizer and a chat template.
inline std::unique_ptr<TempFolder> MakeByteModel(const std::string& test_data) {
  namespace fs = std::filesystem;
  using Json = nlohmann::json;
  auto folder = std::make_unique<TempFolder>();
  for (const char* file : {"config.json", "generation_config.json", "model.safetensors"}) {
    fs::copy_file(test_data + "/hf/llama-gqa/" + file, *folder / file,
                  fs::copy_options::overwrite_existing);
    fs::permissions(*folder / file, fs::perms::owner_write, fs::perm_options::add);
  }
  Json vocab = Json::object();
  for (int b = 0; b < 256; ++b) {
    vocab[text::BytesToCharacters(std::string(1, static_cast<char>(b)))] = b;
  }
  const Json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
  const Json tokenizer = {{"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}}},
                          {"pre_tokenizer", byte_level},
                          {"decoder", byte_level},
                          {"added_tokens", Json::array()}};
  folder->Write("tokenizer.json", tokenizer.dump());
  const Json config = {
      {"chat_template", "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"}};
  folder->Write("tokenizer_config.json", config.dump());
  return folder;
}

}  // namespace dtensor::testing
