// One file of a checkpoint: a safetensors file whose parts ranks write and read by themselves.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dtensor/distributed_tensor.h"
#include "dtensor/mesh/spec.h"

namespace dtensor::internal {

struct FileTensor {
  std::string name = {};
  DType dtype = DType::kF32;
  Shape shape = {};
  int64_t offset = 0;  // from the file's start
  uint64_t sum = 0;    // ElementSum over all elements
  int64_t bytes() const { return Numel(shape) * SizeOf(dtype); }
};

// Where everything lies: follows from names, dtypes and shapes.
struct FileLayout {
  std::string file;                      // its name in the folder
  std::vector<FileTensor> tensors = {};  // in the file's order
  std::string head = {};                 // the bytes before the first tensor
  int64_t bytes = 0;                     // of the whole
};
// Errors: InvalidArgument for sizes that overflow.
absl::StatusOr<FileLayout> LayOut(std::string file, std::vector<FileTensor> tensors);

// Whether this rank is the one that writes its part: the first of those that hold the same.
bool Writes(const Spec& spec);

// A checksum that adds up: over the elements, wherever they are held, of a number that follows from
// an element's place in the whole tensor and its bytes.
uint64_t ElementSum(const void* elements, int64_t first, int64_t count, int64_t element_bytes);

// Makes the file with its head, of its full size. Errors: Unavailable, rank-local.
absl::Status CreateFile(const std::string& path, const FileLayout& layout);
// This rank's parts of `values`, in the order of the layout's tensors, brought to the disk; their
// sums, 0 for what others write.
absl::StatusOr<std::vector<uint64_t>> WriteParts(const std::string& path, const FileLayout& layout,
                                                 const std::vector<DTensor>& values);
// This rank's parts of tensors with these specs, as tensors on Self's CPU in memory, and sums as
// above. Errors: DataLoss naming the file for another size or head; Unavailable; rank-local.
struct PartsRead {
  std::vector<Tensor> parts;  // null outside of the mesh
  std::vector<uint64_t> sums;
};
absl::StatusOr<PartsRead> ReadParts(const std::string& path, const FileLayout& layout,
                                    const std::vector<SpecRef>& specs);

// Gives the folder `from` the name `to`. What has that name changes places with it, so that there
// always is one. Where the file system cannot do that (NFS, or `may_exchange` false) the old one is
// first renamed to "<to>.old.partial" and removed in the end. Errors: Unavailable, rank-local; `to`
// is as it was.
absl::Status PutFolder(const std::string& from, const std::string& to, bool may_exchange = true);

}  // namespace dtensor::internal
