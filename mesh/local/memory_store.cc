#include "dtensor/mesh/local/memory_store.h"

#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/store/text.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
using store::KeyNames;

void SharedMemory::Fail(const absl::Status& why) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_.ok()) failed_ = why;
  }
  changes_.fetch_add(1);
  spot_.WakeAll();
}

void SharedMemory::Remove(Store::Key key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  values_.erase(key);
}

void MemoryStore::Changed() {
  shared_->changes_.fetch_add(1);
  shared_->spot_.WakeAll();
}

absl::Status MemoryStore::Set(Key key, absl::string_view value) {
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex_);
    shared_->values_[key] = std::string(value);
  }
  Changed();
  return absl::OkStatus();
}

absl::Status MemoryStore::Await(absl::FunctionRef<bool()> there,
                                absl::FunctionRef<std::string()> what, absl::Time deadline) {
  const absl::Time start = absl::Now();
  while (true) {
    // Before the look: a change after it ends the wait below.
    const uint64_t seen = shared_->changes_.load();
    {
      const std::lock_guard<std::mutex> lock(shared_->mutex_);
      if (there()) return absl::OkStatus();
      if (!shared_->failed_.ok()) {
        return Prefixed(absl::StrCat("store: ", who_, " waited for ", what()), shared_->failed_);
      }
      if (absl::Now() >= deadline) {
        return store::Late(who_, what(), start, deadline);
      }
    }
    (void)shared_->spot_.Wait([&] { return shared_->changes_.load() != seen; },
                              deadline - absl::Now(), /*spin=*/false);
  }
}

absl::StatusOr<std::string> MemoryStore::Get(Key key, absl::Time deadline) {
  std::string value;
  const auto there = [&] {
    const auto it = shared_->values_.find(key);
    if (it == shared_->values_.end()) return false;
    value = it->second;
    return true;
  };
  DT_RETURN_IF_ERROR(Await(there, [&] { return KeyNames({std::string(key)}); }, deadline));
  return value;
}

absl::Status MemoryStore::Wait(absl::Span<const std::string> keys, absl::Time deadline) {
  std::vector<std::string> missing;
  const auto there = [&] {
    missing.clear();
    for (const std::string& key : keys) {
      if (!shared_->values_.contains(key)) missing.push_back(key);
    }
    return missing.empty();
  };
  return Await(there, [&] { return KeyNames(missing); }, deadline);
}

absl::StatusOr<int64_t> MemoryStore::Add(Key key, int64_t n) {
  int64_t sum = 0;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex_);
    const auto it = shared_->values_.find(key);
    if (it != shared_->values_.end() && !absl::SimpleAtoi(it->second, &sum)) {
      return absl::InvalidArgumentError(store::NoNumber(who_, key, it->second));
    }
    if (__builtin_add_overflow(sum, n, &sum)) {
      return absl::OutOfRangeError(store::TooLarge(who_, key, n));
    }
    shared_->values_[key] = absl::StrCat(sum);
  }
  Changed();
  return sum;
}

absl::StatusOr<std::string> MemoryStore::CompareExchange(Key key, absl::string_view expected,
                                                         absl::string_view desired) {
  std::string before;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex_);
    const auto it = shared_->values_.find(key);
    if (it != shared_->values_.end()) before = it->second;
    if (before != expected) return before;
    shared_->values_[key] = std::string(desired);
  }
  Changed();
  return before;
}

}  // namespace dtensor
