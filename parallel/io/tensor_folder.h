// Folders of tensors in safetensors files, as Hugging Face lays them out: model.safetensors alone,
// or model-00001-of-00004.safetensors and so on with model.safetensors.index.json. Every rank reads
// and writes its own parts.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dtensor/parallel/io/pieces.h"
#include "dtensor/parallel/io/safetensors.h"
#include "dtensor/parallel/module/module.h"

namespace dtensor {

// The files that tensors came from: what is written like them has the same bytes.
struct FolderForm {
  struct File {
    std::string name;    // "model-00001-of-00004.safetensors"
    std::string header;  // with its length before; "": to be made
    std::map<std::string, SafetensorsEntry> entries;
    std::map<std::string, std::string> metadata;
  };
  std::vector<File> files = {};
  std::string index = {};  // the text of model.safetensors.index.json; "": there is none
};

// The tensors of a folder: headers are read and checked, data not yet.
class TensorFolder {
 public:
  struct Place {
    std::shared_ptr<const SafetensorsFile> file;
    const SafetensorsEntry* entry = nullptr;
  };
  // `path`: a folder, or one file of any name.
  //   Errors: SafetensorsFile::Open's. NotFound for a folder without such files. InvalidArgument
  //   naming index, file and tensor: an index that is not of its form, a file name that leaves the
  //   folder (a link may lead beside it into the "blobs" of Hugging Face's cache), a tensor that is
  //   in no file, in two, in another than the index says or not in the index.
  static absl::StatusOr<TensorFolder> Open(const std::string& path,
                                           const SafetensorsOptions& options = {});
  const std::string& path() const { return path_; }
  const std::map<std::string, Place>& tensors() const { return tensors_; }
  // Whether the index says how many bytes the tensors have. Apart, since what is wrong with one
  // tensor says more: InvalidArgument with both numbers.
  const absl::Status& total() const { return total_; }
  // One file of any name counts as model.safetensors; of an index whose files are not all called
  // .safetensors there is none. Errors: SafetensorsFile::Read's.
  absl::StatusOr<FolderForm> Form() const;

 private:
  absl::Status OpenIndex(const std::string& index, const SafetensorsOptions& options);
  std::string path_, index_;                                             // the text of the index
  std::map<std::string, std::shared_ptr<const SafetensorsFile>> files_;  // by the folder's names
  std::map<std::string, Place> tensors_;
  absl::Status total_;
};

// The path of a file of a folder that a stranger made, by a name that he may have given: one
// without slashes, and where it is a link, what it leads to, in the folder or in the "blobs" of
// Hugging Face's cache beside it. It is none itself, and is to be opened as none: a link that is
// put there meanwhile must not be followed.
//   Errors: InvalidArgument for other names, and links that lead elsewhere.
absl::StatusOr<std::string> PathInside(const std::string& folder, const std::string& name);

// Some elements of a tensor into a contiguous one of so many elements; of another floating dtype
// they are converted on the way. Takes memory for a few MB besides.
//   Errors: SafetensorsFile::Read's; Unimplemented for a dtype of the file that is not here;
//   InvalidArgument for a bool that is neither 0 nor 1.
absl::Status ReadStretches(const TensorFolder::Place& place, absl::Span<const Stretch> stretches,
                           const Tensor& out);

// Whole tensors on Self, for small files. Errors: those above.
absl::StatusOr<std::map<std::string, Tensor>> ReadTensors(const TensorFolder& folder);

struct WriteOptions {
  // A file ends before the tensor that would make it larger; one tensor is never cut. Without it
  // files are those of `like`, or have at most 50 GB.
  std::optional<int64_t> most_bytes = {};
  std::string stem = "model";
  std::map<std::string, std::string> metadata = {{"format", "pt"}};  // not of files of `like`
  std::map<std::string, std::string> texts = {};  // other files of the folder, by name
  // Files with these tensors, and the same headers and index unless a dtype or shape is another.
  FolderForm like = {};
};
// Writes a folder's tensors, of any placements without pending sums: every rank the parts that it
// holds first, so nothing is gathered. All ranks of their mesh must call it, with the same names in
// the same order; the path must be the same folder for all. Where all tensors are on Self, one rank
// or several may call it; each writes the whole then, and puts file after file over what is there.
// Unchanged tensors of a folder that was read give the same bytes.
//   All files are written under other names first. Then the old ones (also those of a writing into
// more or fewer files) get the end ".before", the new ones their names, and the old ones go. Who is
// killed while names change leaves a folder that is not loaded: files that say what the others are
// come last.
//   Comm:   a few host bytes per rank, three times.
//   Errors: Unavailable with path and reason, on all ranks; what was there before is as it was.
//           InvalidArgument for other tensors than those of `like`, null ones and pending sums, and
//           for names and metadata that no header can hold (CheckTensorName).
absl::Status WriteTensors(const StateDict& tensors, const std::string& folder,
                          const WriteOptions& options = {});

// What all ranks of the mesh found: OK where all are, else this rank's own error, or the first that
// another one has. All ranks of the mesh must call it; others get their own back.
absl::Status Agree(const DeviceMesh& mesh, absl::string_view what_for, const absl::Status& mine);

}  // namespace dtensor
