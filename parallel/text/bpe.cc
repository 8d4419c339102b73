#include "dtensor/parallel/text/bpe.h"

#include <algorithm>
#include <queue>
#include <tuple>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "dtensor/parallel/text/utf8.h"
#include "dtensor/tensor/status.h"

namespace dtensor::text {
namespace {

constexpr int64_t kMostId = (1 << 24) - 1;

// Both spellings of a merge: "a b" and ["a", "b"].
absl::StatusOr<std::pair<std::string, std::string>> ReadPair(const Json& merge,
                                                             const std::string& path) {
  if (merge.is_string()) {
    const std::string& both = merge.get_ref<const std::string&>();
    const size_t space = both.find(' ');
    if (space != std::string::npos && both.find(' ', space + 1) == std::string::npos) {
      return std::pair(both.substr(0, space), both.substr(space + 1));
    }
  } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
             merge[1].is_string()) {
    return std::pair(merge[0].get<std::string>(), merge[1].get<std::string>());
  }
  return absl::InvalidArgumentError(
      absl::StrCat(path, " must be two tokens, \"a b\" or [\"a\", \"b\"], is ",
                   merge.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 80)));
}

}  // namespace

absl::StatusOr<Bpe> Bpe::Read(const JsonFields& model) {
  // Files of old have no type.
  DT_ASSIGN_OR_RETURN(const std::string type, model.String("type", "BPE"));
  if (type != "BPE") {
    return absl::UnimplementedError(
        absl::StrCat(model.PathOf("type"), " is \"", type, "\"; this library has BPE"));
  }
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    DT_ASSIGN_OR_RETURN(const std::string affix, model.String(name, ""));
    if (!affix.empty()) {
      return absl::UnimplementedError(
          absl::StrCat(model.PathOf(name), " is \"", affix, "\"; only none is served"));
    }
  }
  const Json* dropout = model.Find("dropout");
  if (dropout != nullptr && *dropout != 0.0) {
    return absl::UnimplementedError(
        absl::StrCat(model.PathOf("dropout"), " is ", dropout->dump(), "; only none is served"));
  }
  DT_ASSIGN_OR_RETURN(const bool byte_fallback, model.Bool("byte_fallback", false));
  if (byte_fallback) {
    return absl::UnimplementedError(absl::StrCat(
        model.PathOf("byte_fallback"), " is true; only byte-level tokenizers are served"));
  }
  Bpe bpe;
  DT_RETURN_IF_ERROR(bpe.ReadVocab(model));
  DT_RETURN_IF_ERROR(bpe.ReadMerges(model));
  DT_ASSIGN_OR_RETURN(bpe.fuse_unknown_, model.Bool("fuse_unk", false));
  DT_ASSIGN_OR_RETURN(bpe.ignore_merges_, model.Bool("ignore_merges", false));
  DT_ASSIGN_OR_RETURN(const std::string unknown, model.String("unk_token", ""));
  if (!unknown.empty()) {
    const auto it = bpe.vocab_.find(unknown);
    if (it == bpe.vocab_.end()) {
      return model.Bad("unk_token", absl::StrCat("\"", unknown, "\" is not in the vocabulary"));
    }
    bpe.unknown_ = it->second;
  }
  return bpe;
}

absl::Status Bpe::ReadVocab(const JsonFields& model) {
  DT_ASSIGN_OR_RETURN(const JsonFields vocab, model.Object("vocab"));
  absl::flat_hash_set<int64_t> seen;
  for (const auto& [token, value] : model.Find("vocab")->items()) {
    const std::string path = absl::StrCat(vocab.path(), "[\"", token, "\"]");
    DT_ASSIGN_OR_RETURN(const int64_t id, JsonIndex(value, kMostId, path));
    if (!seen.insert(id).second) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": another token has the id ", id));
    }
    vocab_.emplace(token, static_cast<int32_t>(id));
  }
  if (vocab_.empty()) return model.Bad("vocab", "is empty");
  return absl::OkStatus();
}

absl::Status Bpe::ReadMerges(const JsonFields& model) {
  DT_ASSIGN_OR_RETURN(const Json* merges, model.Array("merges"));
  for (size_t i = 0; i < merges->size(); ++i) {
    const std::string path = absl::StrCat(model.PathOf("merges"), "[", i, "]");
    DT_ASSIGN_OR_RETURN(const auto pair, ReadPair((*merges)[i], path));
    int32_t ids[3];
    const std::string tokens[] = {pair.first, pair.second, pair.first + pair.second};
    for (int k = 0; k < 3; ++k) {
      const auto it = vocab_.find(tokens[k]);
      if (it == vocab_.end()) {
        return absl::InvalidArgumentError(
            absl::StrCat(path, ": \"", tokens[k], "\" is not in the vocabulary"));
      }
      ids[k] = it->second;
    }
    merges_[Pair(ids[0], ids[1])] = {static_cast<int32_t>(i), ids[2]};
  }
  return absl::OkStatus();
}

std::vector<int32_t> Bpe::Characters(absl::string_view word) const {
  std::vector<int32_t> ids;
  bool was_unknown = false;
  while (!word.empty()) {
    const size_t length = static_cast<size_t>(std::max(1, Utf8Length(word)));
    const auto it = vocab_.find(word.substr(0, length));
    word.remove_prefix(length);
    if (it != vocab_.end()) {
      ids.push_back(it->second);
    } else if (unknown_ >= 0 && !(fuse_unknown_ && was_unknown)) {
      ids.push_back(unknown_);
    }
    was_unknown = it == vocab_.end();
  }
  return ids;
}

void Bpe::Encode(absl::string_view word, std::vector<int64_t>* ids) const {
  if (ignore_merges_) {
    const auto it = vocab_.find(word);
    if (it != vocab_.end()) {
      ids->push_back(it->second);
      return;
    }
  }
  // A linked list of tokens; a merge writes the left one and takes out the right one.
  std::vector<int32_t> tokens = Characters(word);
  const int32_t n = static_cast<int32_t>(tokens.size());
  std::vector<int32_t> next(tokens.size()), previous(tokens.size());
  // Rank, position of the left token, and the pair that was there: it may be gone by then.
  using Candidate = std::tuple<int32_t, int32_t, uint64_t>;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto consider = [&](int32_t at) {
    if (at < 0 || next[at] >= n) return;
    const uint64_t pair = Pair(tokens[at], tokens[next[at]]);
    const auto it = merges_.find(pair);
    if (it != merges_.end()) queue.emplace(it->second.rank, at, pair);
  };
  for (int32_t i = 0; i < n; ++i) {
    next[i] = i + 1;
    previous[i] = i - 1;
  }
  for (int32_t i = 0; i < n; ++i) consider(i);
  while (!queue.empty()) {
    const auto [rank, at, pair] = queue.top();
    queue.pop();
    const int32_t right = next[at];
    if (tokens[at] < 0 || right >= n || Pair(tokens[at], tokens[right]) != pair) continue;
    tokens[at] = merges_.at(pair).id;
    tokens[right] = -1;
    next[at] = next[right];
    if (next[at] < n) previous[next[at]] = at;
    consider(previous[at]);
    consider(at);
  }
  for (const int32_t token : tokens) {
    if (token >= 0) ids->push_back(token);
  }
}

}  // namespace dtensor::text
