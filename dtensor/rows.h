// RowBuilder: the legal rows of factor maps, mesh dim by mesh dim, from what they share.
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
  RowBuilder(const OpCall& call, absl::Span<const FactorMap> maps, const Spec* like);

  // To be called before Build. False if the rows of these maps have no order that is that of every
  // map, or some do not follow from factors.
  bool OrderFactors();
  // All rows of a mesh dim, as DeriveRows gives them, once where all maps have them. Mesh dims on
  // which they come out alike share them.
  std::shared_ptr<const RowList> Build(int mesh_dim);
  // False if no row of the map is what the inputs match as they are: seen without deriving any.
  bool MayMatch(int mesh_dim, int map);
  // Those of one map that the inputs match as they are (and perhaps some that they do not), found
  // without deriving the others.
  RowList BuildMatching(int mesh_dim, int map);

 private:
  using CutList = std::vector<FactorCut>;
  // A product of a linear form by sets of inputs: those that it is linear in, those among them that
  // it has more than once, and its parameters.
  struct Product {
    explicit Product(const LinearProduct& product);
    uint64_t linear = 0, twice = 0, params = 0;
    int late = -1;  // the one input of a variadic op's, if it may share its bit
  };
  using Form = std::vector<Product>;
  struct FormCache;

  // The op's forms with conditions evaluated and names resolved for this call.
  void FindForms();
  const Form* FormOf(const std::string& text);

  // What the rows of a mesh dim follow from, where no input is flat or a pending extreme.
  struct Built {
    CutList cuts;
    std::vector<uint64_t> sets;
    int64_t ranks;
    std::shared_ptr<const RowList> rows;
    int64_t settled;  // how many of the rows, the first, have no pending input
  };

  // kEveryMap: of all maps, as the first numbers it.
  struct MapFactor {
    int map, factor;
  };
  // Looks at this map from now on.
  void Use(int map) { map_ = &maps_[map == kEveryMap ? 0 : map]; }
  const FactorMap& map() const { return *map_; }
  const std::vector<SizeSet>& Whole();
  void Begin(int mesh_dim);
  bool IsPlain() const;
  bool HasCuts(const Built& other, const CutList& cuts) const;
  void AddSettledRows(const CutList& cuts);
  void AddPendingRows(const CutList& cuts, const std::vector<uint64_t>& sets);
  bool Shardable(int f) const;
  bool IsCut(int f) const;
  bool Holds(int input, int f) const { return f >= 0 && map()->CutDim(input, f) >= 0; }
  bool IsPending(int i) const { return call_.in(i).placement(mesh_dim_) == Partial(); }
  bool MayBePadded(int i) const;
  bool MayWait(int i);
  bool MayPass(uint64_t partial) const;
  std::vector<uint64_t> PartialSets();

  // The inputs are cut where they hold the factor, and nowhere else.
  bool AreCutBy(int f) const;

  // Rows that say how a factor is cut, and no more; added to `cuts` unless they are there.
  void AddCuts(int f, CutList* cuts) const;
  void AddBlockCuts(int f, CutList* cuts) const;
  void AddJoinedCuts(int f, CutList* cuts) const;
  bool IsMajor(const FactorOperand& operand, int f) const;

  void Try(const FactorCut& cut, uint64_t partial);
  Placement ShardOf(size_t operand, const FactorOperand& factors, ShardingRow* row) const;
  void PlaceWhole(ShardingRow* row);
  void FlatRows();
  void TryFlat(const Placement& flat, const FactorDim& factors);
  // What an output becomes: kNever if the row is not legal.
  enum class Becomes : uint8_t { kNever, kWhole, kCut, kPending };
  template <class Holding>
  Becomes Output(int o, uint64_t holding, const Holding& holds, bool in_output,
                 uint64_t partial) const;
  template <class Holding>
  static bool Passes(const Product& p, uint64_t holding, const Holding& holds, bool vanishing,
                     uint64_t partial);
  Placement PendingOutput(int o) const;
  void MonotoneRows();
  std::vector<int> Pending(const OpDef::MonotoneForm& form, ReduceOp kind) const;
  void MonotoneRow(const OpDef::MonotoneForm& form, ReduceOp kind, absl::Span<const int> pending);
  bool IsReduced(int input) const;
  void CutMonotoneRows(absl::Span<const int> pending);

  const OpCall& call_;
  const absl::Span<const FactorMap> maps_;
  const Spec* const like_;
  const FactorMap* map_;                                // that is looked at
  absl::InlinedVector<std::vector<SizeSet>, 2> whole_;  // per map: see Whole
  absl::InlinedVector<MapFactor, 8> factors_;           // in order
  std::vector<const Form*> forms_;                      // per output; null: not linear
  std::vector<std::unique_ptr<Form>> own_;              // those that are kept nowhere else
  std::vector<uint64_t> affecting_;                     // per output: inputs that it depends on
  uint64_t linear_ = 0;                                 // inputs that some form is linear in
  uint64_t floating_ = 0;                               // inputs that may be infinite or NaN
  std::vector<std::optional<bool>> may_pad_;            // per input, once known
  std::vector<Built> built_;
  int mesh_dim_ = 0;
  RowList rows_;
};

}  // namespace dtensor::internal
