// The types of the tensors of a LocalMap region, and what ops make of them. Internal to
// parallel/local/.
#pragma once

#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "dtensor/autograd.h"
#include "dtensor/dispatch.h"
#include "dtensor/parallel/local/local_map.h"

namespace dtensor::internal {

inline constexpr LocalType kV = LocalType::kVarying, kP = LocalType::kPartial,
                           kR = LocalType::kReplicate, kI = LocalType::kInvariant;

// Of one tensor: a type per mesh dim, and the call that made it.
struct TypedLocal {
  absl::InlinedVector<LocalType, 3> types;
  std::string made_by;
};

// Types by memory: a view, and what Detach gives, have those of their base. What was freed is
// forgotten.
class LocalTypes {
 public:
  explicit LocalTypes(const DeviceMesh& mesh) : mesh_(mesh) {}
  const DeviceMesh& mesh() const { return mesh_; }
  // Null for what the region did not make from typed tensors: constants.
  const TypedLocal* Find(const DTensor& x) const;
  void Set(const DTensor& x, TypedLocal typed);
  // `result` has elements that the values of `of` say: V where that is. Throws where its own type
  // does not allow it.
  void Made(const DTensor& result, const DTensor& of);
  // Whether something that is no op, a draw, has written what is V.
  bool WritesBesideOps() const;
  // The types of the results of a call, as one tensor's. Errors: InvalidArgument for tensors that
  // do not meet.
  absl::StatusOr<TypedLocal> Check(const OpDef& op, const Values& inputs,
                                   absl::Span<const Attr> attrs) const;

 private:
  struct Operand {
    std::string name;
    const TypedLocal* typed;
    const DTensor* value;
    LocalType type(int m) const { return typed ? typed->types[m] : LocalType::kReplicate; }
    // By the handle: what Detach gives takes none, and has the memory of what does.
    bool grad() const { return typed != nullptr && GradEnabled() && value->requires_grad(); }
  };
  using Operands = absl::InlinedVector<Operand, 4>;
  std::string Describe(const Operand& operand, int m) const;
  absl::StatusOr<LocalType> CheckDim(const OpDef& op, const Operands& operands,
                                     absl::Span<const Attr> attrs, int m) const;
  absl::Status CheckLinear(const OpDef& op, const Operands& operands, absl::Span<const Attr> attrs,
                           int m) const;

  const DeviceMesh mesh_;
  struct Held {
    Buffer buffer;
    TypedLocal typed;
    uint64_t version;  // of the buffer, when the types were said
  };
  absl::flat_hash_map<const void*, Held> held_;  // by Buffer::identity
};

}  // namespace dtensor::internal
