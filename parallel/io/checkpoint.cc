#include "dtensor/parallel/io/checkpoint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/impl.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/parallel/io/checkpoint_parts.h"
#include "dtensor/parallel/module/agree.h"
#include "dtensor/parallel/text/utf8.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

namespace fs = std::filesystem;
using internal::AddUp;
using internal::AgreeAll;
using internal::FileLayout;
using internal::FileTensor;
using internal::Guarded;
using internal::kManifest;
using internal::kPartial;
using internal::OnFirst;
using internal::StepName;

absl::Status Unwritable(const fs::path& path, int error) {
  return absl::UnavailableError(
      absl::StrCat(path.string(), " cannot be written: ", std::strerror(error)));
}

absl::Status SyncFolder(const fs::path& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool ok = fd >= 0 && fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  return ok ? absl::OkStatus() : Unwritable(path, error);
}

// A file with the tensors that this rank has of it, both in the layout's order.
struct Content {
  FileLayout layout;
  std::vector<DTensor> values;
};

absl::StatusOr<Content> ContentOf(const char* file, const StateDict& state) {
  std::vector<FileTensor> tensors;
  absl::flat_hash_map<std::string, DTensor> by_name;
  for (const auto& [name, value] : state) {
    const absl::Status named = CheckTensorName(name);
    if (!named.ok()) return Prefixed("[checkpoint]", named);
    const absl::Status ours = internal::Entered(value).status();
    if (!ours.ok()) return Prefixed(absl::StrCat("[checkpoint] ", name), ours);
    if (value.spec().has_partial()) {
      return absl::InvalidArgumentError(
          absl::StrCat("[checkpoint] ", name, " is a pending sum: ", value.spec().ToString()));
    }
    if (value.mesh().device() == DeviceType::kMeta) {
      return absl::FailedPreconditionError(
          absl::StrCat("[checkpoint] ", name, " is on meta and has no values"));
    }
    tensors.push_back({name, value.dtype(), value.shape()});
    by_name[name] = value;
  }
  Content content;
  DT_ASSIGN_OR_RETURN(content.layout, internal::LayOut(file, std::move(tensors)));
  for (const FileTensor& t : content.layout.tensors) content.values.push_back(by_name[t.name]);
  return content;
}

// One saving: where its folder is made and where it ends up.
class Saving {
 public:
  Saving(const std::string& dir, int64_t step)
      : step_(step),
        dir_(dir),
        place_(dir_ / StepName(step)),
        partial_(place_.string() + kPartial) {}
  ~Saving() {
    if (folder_ >= 0) close(folder_);
  }
  Saving(const Saving&) = delete;
  Saving& operator=(const Saving&) = delete;

  const fs::path& place() const { return place_; }
  std::string Path(const FileLayout& layout) const { return (partial_ / layout.file).string(); }

  absl::Status Prepare(const std::vector<Content>& contents) {
    std::error_code error;
    fs::create_directories(dir_, error);
    if (error) return Unwritable(dir_, error.value());
    for (const std::string& left :
         internal::ListCheckpoints(dir_).others) {  // of jobs that were ended
      if (absl::EndsWith(left, kPartial)) fs::remove_all(dir_ / left, error);
    }
    fs::create_directory(partial_, error);
    if (error) return Unwritable(partial_, error.value());
    folder_ = open(partial_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_ < 0) return Unwritable(partial_, errno);
    for (const Content& c : contents) {
      DT_RETURN_IF_ERROR(internal::CreateFile(Path(c.layout), c.layout));
    }
    return absl::OkStatus();
  }

  // `status`, or what explains it: rank 0 saves to another place, or another program takes this
  // one's unfinished folder for one that was left.
  absl::Status Explained(const absl::Status& status, const std::string& place_of_first) const {
    std::error_code error;
    if (status.ok() || fs::exists(partial_, error)) return status;
    const std::string why =
        place_of_first == place_.string()
            ? Another()
            : absl::StrCat("; this rank saves to ", place_.string(), ", rank 0 to ", place_of_first,
                           ": all ranks give one folder and one step");
    return absl::Status(status.code(), absl::StrCat(status.message(), why));
  }

  absl::Status Commit(const std::string& manifest) const {
    if (!Ours(partial_)) {
      return absl::UnavailableError(absl::StrCat(place_.string(),
                                                 " cannot be written: ", partial_.string(),
                                                 " is not the folder that was made", Another()));
    }
    DT_RETURN_IF_ERROR(WriteFile((partial_ / kManifest).string(), manifest));
    DT_RETURN_IF_ERROR(SyncFolder(partial_));
    DT_RETURN_IF_ERROR(internal::PutFolder(partial_.string(), place_.string()));
    return SyncFolder(dir_);
  }

  void DropPartial() const {
    std::error_code error;
    // Where it has got its name, what is left is the checkpoint that it replaced.
    if (Ours(partial_) || Ours(place_)) fs::remove_all(partial_, error);
  }
  void DropOld(int keep) const {
    std::error_code error;
    std::vector<fs::path> below;
    for (const auto& [step, path] : internal::ListCheckpoints(dir_).steps) {
      if (step < step_) below.push_back(path);
    }
    for (int left = static_cast<int>(below.size()); left > std::max(keep, 1) - 1; --left) {
      const fs::path& old = below[below.size() - static_cast<size_t>(left)];
      // A link goes, and what it leads to stays. Of a folder this goes first: what is half removed
      // is no checkpoint.
      if (!fs::is_symlink(old, error)) fs::remove(old / kManifest, error);
      fs::remove_all(old, error);
    }
  }

 private:
  // Whether it is the folder that this rank made: while that is open no other one can have its
  // number.
  bool Ours(const fs::path& path) const {
    struct stat made, there;
    return folder_ >= 0 && fstat(folder_, &made) == 0 && stat(path.c_str(), &there) == 0 &&
           made.st_ino == there.st_ino && made.st_dev == there.st_dev;
  }
  std::string Another() const {
    return absl::StrCat("; another program saves to ", dir_.string(),
                        " at the same time: each needs a folder of its own");
  }

  const int64_t step_;
  const fs::path dir_, place_, partial_;
  int folder_ = -1;  // of the rank that makes it
};

absl::StatusOr<std::vector<uint64_t>> WriteAll(const Saving& saving,
                                               const std::vector<Content>& contents) {
  std::vector<uint64_t> sums;
  for (const Content& c : contents) {
    DT_ASSIGN_OR_RETURN(const std::vector<uint64_t> part,
                        internal::WriteParts(saving.Path(c.layout), c.layout, c.values));
    sums.insert(sums.end(), part.begin(), part.end());
  }
  return sums;
}

// Those of all ranks one after the other, or one where they are the same.
std::string Generators(const std::vector<std::string>& states) {
  const bool alike = std::all_of(states.begin(), states.end(),
                                 [&](const std::string& state) { return state == states[0]; });
  return alike ? states[0] : absl::StrJoin(states, "");
}

// `ready`: how it went on this rank so far.
absl::Status Save(Saving& saving, const absl::Status& ready, std::vector<Content>* contents,
                  const CheckpointInfo& info) {
  const absl::Status prepared =
      ready.ok() ? OnFirst([&] { return saving.Prepare(*contents); }) : ready;
  const auto mine = DefaultGenerator().State();
  // A tensor has one place in a file: all ranks have the same ones, in one order.
  std::vector<std::string> names;
  for (const Content& c : *contents) {
    for (const FileTensor& t : c.layout.tensors) {
      names.push_back(
          absl::StrCat(t.name, " (", std::string(Name(t.dtype)), ToString(t.shape), ")"));
    }
  }
  DT_ASSIGN_OR_RETURN(
      const std::vector<std::string> generators,
      AgreeAll("checkpoint_prepare", prepared, std::string(mine.begin(), mine.end())));
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> places,
                      internal::ExchangeListed("checkpoint", names, saving.place().string()));
  DT_ASSIGN_OR_RETURN(
      const std::vector<uint64_t> sums,
      AddUp("checkpoint_write", Guarded([&]() -> absl::StatusOr<std::vector<uint64_t>> {
              absl::StatusOr<std::vector<uint64_t>> sums = WriteAll(saving, *contents);
              if (sums.ok()) return sums;
              return saving.Explained(sums.status(), places[0]);
            })));
  const absl::Status committed = OnFirst([&] {
    size_t next = 0;
    internal::Manifest manifest = {.info = info, .generator = Generators(generators)};
    for (Content& c : *contents) {
      for (FileTensor& t : c.layout.tensors) t.sum = sums[next++];
      manifest.files.push_back(c.layout);
    }
    return saving.Commit(internal::ToText(manifest));
  });
  return AgreeAll("checkpoint_commit", committed).status();
}

// Of notes JSON can hold no other than text, and a file's name may have any bytes.
absl::Status CheckInfo(const CheckpointInfo& info) {
  if (info.step < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("[checkpoint] the step must be 0 or more, is ", info.step));
  }
  for (const auto& [name, note] : info.notes) {
    if (FirstBadUtf8(name) == std::string::npos && FirstBadUtf8(note) == std::string::npos) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("[checkpoint] the note \"", absl::CHexEscape(name),
                     "\" is not UTF-8: ", absl::CHexEscape(note.substr(0, 200))));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> SaveCheckpoint(const std::string& dir, const Module& model,
                                           const Optimizer& optimizer, const CheckpointInfo& info,
                                           const SaveOptions& options) {
  Saving saving(dir, info.step);
  absl::Status status = Guarded([&]() -> absl::Status {
    const NoGrad no_grad;
    std::vector<Content> contents(2);
    // All ranks meet in it, and have its errors alike; what it throws is one rank's.
    absl::StatusOr<StateDict> states = StateDict();
    const absl::Status asked = Guarded([&] {
      states = optimizer.GetStateDictOfAll();
      return absl::OkStatus();
    });
    DT_RETURN_IF_ERROR(states.status());
    const absl::Status ready = Guarded([&]() -> absl::Status {
      DT_RETURN_IF_ERROR(asked);
      DT_RETURN_IF_ERROR(CheckInfo(info));
      DT_ASSIGN_OR_RETURN(contents[0], ContentOf(internal::kModelFile, internal::TensorsOf(model)));
      DT_ASSIGN_OR_RETURN(contents[1], ContentOf(internal::kOptimizerFile, *states));
      return absl::OkStatus();
    });
    return Save(saving, ready, &contents, info);
  });
  if (RankContext::Current().rank() == 0) {
    saving.DropPartial();
    if (status.ok()) saving.DropOld(options.keep);
  }
  if (!status.ok()) return status;
  return saving.place().string();
}

absl::StatusOr<int64_t> CheckSaveFolder(const std::string& dir, int64_t step,
                                        const std::string& resumed_from) {
  int64_t last = -1;
  const absl::Status fits = OnFirst([&]() -> absl::Status {
    const auto steps = internal::ListCheckpoints(dir).steps;
    if (steps.empty()) return absl::OkStatus();
    last = steps.back().first;
    std::error_code error;
    // "DIR/step-N/" and "DIR/step-N" are the same.
    const auto place = [&](const fs::path& path) {
      const fs::path whole = fs::weakly_canonical(fs::absolute(path, error), error);
      return whole.has_filename() ? whole : whole.parent_path();
    };
    const std::string what = absl::StrCat(dir, " has ", steps.back().second.filename().string());
    if (resumed_from.empty() || place(resumed_from).parent_path() != place(dir)) {
      return absl::FailedPreconditionError(absl::StrCat(
          what, ", a checkpoint of another training; go on from it, or save in another folder"));
    }
    if (last <= step) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(what, ", beyond step ", step,
                     " from which this training goes on; save in another folder, or remove what "
                     "is not wanted any more"));
  });
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                      AgreeAll("checkpoint_folder", fits, absl::StrCat(last)));
  DT_CHECK(absl::SimpleAtoi(all[0], &last));
  return last;
}

}  // namespace dtensor
