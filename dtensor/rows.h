// RowBuilder: the legal rows of one factor map, mesh dim by mesh dim, from what they share.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "dtensor/forms.h"
#include "dtensor/sharding.h"

namespace dtensor::internal {

class RowBuilder {
 public:
  // `like`: see DeriveRows.
  RowBuilder(const OpCall& call, const FactorMap& map, const Spec* like);

  // All rows of a mesh dim, as DeriveRows gives them.
  std::vector<ShardingRow> Build(int mesh_dim);
  // Those among them that the inputs match as they are (and perhaps some that they do not), found
  // without deriving the others.
  std::vector<ShardingRow> BuildMatching(int mesh_dim);

 private:
  // The op's forms with conditions evaluated and names resolved for this call.
  void FindForms();
  const LinearSum* ParseFor(const std::string& form);

  void Begin(int mesh_dim);
  bool Shardable(int f) const;
  bool IsCut(int f) const;
  bool Holds(int input, int f) const { return f >= 0 && map_.CutDim(input, f) >= 0; }
  bool IsPending(int i) const { return call_.in(i).placement(mesh_dim_) == Partial(); }
  bool MayBePadded(int i) const;
  bool MayWait(int i);
  std::vector<uint64_t> PartialSets();

  // Rows that say how a factor is cut, and no more; added to `cuts` unless they are there.
  using Rows = std::vector<ShardingRow>;
  void AddCuts(int f, Rows* cuts) const;
  void AddBlockCuts(int f, Rows* cuts) const;
  void AddJoinedCuts(int f, Rows* cuts) const;
  bool IsMajor(const FactorOperand& operand, int f) const;

  void Try(const ShardingRow& cut, uint64_t partial);
  Placement ShardOf(size_t operand, const FactorOperand& factors, ShardingRow* row) const;
  void PlaceWhole(ShardingRow* row) const;
  void FlatRows();
  void TryFlat(const Placement& flat, const FactorDim& factors);
  template <class Holding>
  std::optional<Placement> Output(int o, uint64_t holding, const Holding& holds, bool in_output,
                                  uint64_t partial) const;
  void MonotoneRows();
  std::vector<int> Pending(const OpDef::MonotoneForm& form, ReduceOp kind) const;
  void MonotoneRow(const OpDef::MonotoneForm& form, ReduceOp kind, absl::Span<const int> pending);
  bool IsReduced(int input) const;
  void CutMonotoneRows(absl::Span<const int> pending);

  const OpCall& call_;
  const FactorMap& map_;
  const Spec* const like_;
  std::vector<const LinearSum*> forms_;          // per output; null: not linear
  std::vector<std::unique_ptr<LinearSum>> own_;  // those that are kept nowhere else
  std::vector<uint64_t> affecting_;              // per output: inputs that it depends on
  uint64_t linear_ = 0;                          // inputs that some form is linear in
  std::vector<uint64_t> holding_;                // per factor: inputs that are cut if it is
  std::vector<std::optional<bool>> may_pad_;     // per input, once known
  std::vector<SizeSet> whole_;                   // sizes of factors where nothing is cut
  int mesh_dim_ = 0;
  Rows rows_;
};

}  // namespace dtensor::internal
