// Search: the cheapest strategy of a call among the products, over mesh dims, of its legal rows.
// docs/reference/rules.md, "Search", says how.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "dtensor/rows.h"
#include "dtensor/sharding.h"
#include "dtensor/strategy_cost.h"

namespace dtensor::internal {

class Search {
 public:
  // Rows of some factor maps at once: a strategy is one of a single map, of equals that of the
  // first.
  Search(const OpCall& call, absl::Span<const FactorMap> maps, const Spec* like,
         MeshGroups* groups);
  // `rows`, given by hand, are legal on every mesh dim, whatever the others do; but segments and
  // flat pieces are of one size, which the others have to leave. `out_shapes`: of the call.
  Search(const OpCall& call, RowList rows, const std::vector<Shape>& out_shapes, const Spec* like,
         MeshGroups* groups);

  // Cheapest legal strategy, of equals the first; false if there is none that costs less than
  // `below`. Also where several maps have to be searched one by one: a later one has what the
  // inputs match, and one before may be as cheap; they have too little in common; or only a beam
  // would do.
  bool Run(Strategy* best, const Cost& below = Cost::Infinite());
  // The same by pricing every legal strategy, without the shortcuts.
  bool RunExhaustively(Strategy* best, const Cost& below = Cost::Infinite());

  // Of what was found, and of a layout of output 0 that has to be changed to `like` afterwards.
  const Cost& cost() const { return best_cost_; }
  // Keeps every legal strategy that is priced from now on.
  void Collect(std::vector<Strategy>* all, size_t most) {
    all_ = all;
    most_ = most;
  }
  // Also strategies that an in-place op may not take.
  void LetSelfMove() { keep_self_ = false; }
  int64_t candidates() const { return candidates_; }
  bool beam() const { return beam_; }

 private:
  using PerPriced = absl::InlinedVector<int, 8>;
  // A row that is not everywhere what it is where nothing is cut: what it is here.
  struct PlacedRow {
    RowPlacements inputs, outputs;
  };
  // A row of one mesh dim, after those chosen for the mesh dims before.
  struct Choice {
    const ShardingRow* row = nullptr;
    int index = 0;                      // of the row
    std::shared_ptr<PlacedRow> placed;  // null: the row is as it is where nothing is cut
    PerPriced asked;                    // of each, as InputPrices numbers it
    PerPriced nodes;      // what the choices up to this one are to InputPrices; none: all stay
    int map = kEveryMap;  // the only one that has the rows up to this one
    uint64_t cut = 0;     // factors that they cut
    Cost own;             // what they say they cost
    // Of all strategies that begin so, at least. `priced`: the row was placed, and priced by what
    // it asks for there: of a whole strategy that is what it costs.
    Cost least;
    bool priced = false;
  };
  using Choices = std::vector<Choice>;

  void Begin(const Cost& below);
  bool Take(Strategy* best) const;
  const std::vector<SizeSet>& SizesLeft(const ShardingRow& row);

  // --- rows ---
  static int First(int map) { return map == kEveryMap ? 0 : map; }
  const FactorMap& MapOf(const ShardingRow& row) const { return maps_[First(row.map)]; }
  // Rows of every mesh dim; dims on which all inputs are placed alike have the same. False if they
  // are not to be had of all maps at once.
  bool Derive();
  // Those of one map that the inputs may match; false once a mesh dim has none.
  bool DeriveMatching(int map);
  int TwinOf(int m) const;
  std::shared_ptr<const RowList> KeepingSelf(int m, std::shared_ptr<const RowList> rows) const;
  bool PlacedAlike(int a, int b) const;
  bool MayMatch(int m, const ShardingRow& row) const;
  bool KeepsSelf(int m, const ShardingRow& row) const;
  int PricedAs(int input) const;
  void AddPriced(int input);
  InputPrices& PricesAt(size_t priced) { return prices_[priced_[priced].prices]; }
  const InputPrices& PricesAt(size_t priced) const { return prices_[priced_[priced].prices]; }
  void PreparePrices();
  void AskAll(int m);
  const int* OptionsOf(int m, int row) const { return &rows_ask_[m].options[row * priced_.size()]; }

  // --- one row, given what the mesh dims before left ---
  // All of them come after those of chosen_.
  const Choice* LastChosen() const { return chosen_.empty() ? nullptr : &chosen_.back(); }
  bool IsAsWhole(const ShardingRow& row) const;
  bool Resolve(int m, Choice* out);
  bool Choose(int m, int r, Choice* out) const;
  void Append(Choice* out) const;
  bool PlaceMatching(int m, int r, Choice* out);
  bool Place(int m, Choice* out);
  // Of all of priced_; null: the root of each.
  const int* NodesBefore() const { return chosen_.empty() ? nullptr : chosen_.back().nodes.data(); }
  int NodeBefore(size_t priced) const {
    return chosen_.empty() ? InputPrices::kRoot : chosen_.back().nodes[priced];
  }
  void LookAhead(int m);
  double Ahead(int m, int r) const;
  bool Bound(int m, double bytes, Choice* out);
  void Price(int m, Choice* out);
  bool MayStay(int input, int m, const Placement& want) const;
  bool Stays(int input, int m, const Placement& want, const ShardingRow& row);
  bool CutsAlike(const FactorDim& dim, const Placement& a, const Placement& b,
                 const std::vector<SizeSet>& sizes, int64_t n) const;

  // --- all rows ---
  void Push(Choice choice);
  void Pop();
  void DescendMatching();
  void Descend();
  static bool IsMorePromising(const Choice& a, const Choice& b);
  bool MayBeBest(const Choice& last) const;
  bool ComesFirst(const Choices& chosen, const Choice* last) const;
  static int FirstMap(const Choices& chosen, const Choice* last);
  void BeamSearch();
  Cost CostIfTheRestStays(int m, const Choice& last);

  // --- whole strategies ---
  const Placement& InputOf(int i, const Choices& chosen, int m) const;
  static const Placement& OutputOf(int o, const Choices& chosen, int m);
  Placements InputPlacements(int i, const Choices& chosen) const;
  static Placements OutputPlacements(int o, const Choices& chosen);
  template <class PlacementOf>
  bool Mixes(const PlacementOf& of) const;
  bool MixesPartials(const Choices& chosen) const;
  bool FlatFits(const Choices& chosen) const;
  bool SizesFit(const Choices& chosen) const;
  void Consider(const Choices& chosen);
  Strategy StrategyOf(const Choices& chosen, const Cost& cost) const;
  Placements LikeTarget(const Placements& out) const;

  const OpCall& call_;
  const absl::Span<const FactorMap> maps_;      // none: rows given by hand
  const std::shared_ptr<const RowList> given_;  // those,
  const std::vector<Shape> given_outs_;         // and what they give
  const Spec* const like_;
  std::optional<RowBuilder> builder_;  // those of maps
  const DeviceMesh& mesh_;
  MeshGroups* const groups_;
  std::vector<std::shared_ptr<const RowList>> rows_;  // per mesh dim
  std::vector<InputPrices> prices_;                   // of each spec that inputs have
  // Inputs that are placed alike by the call and by all rows, and so priced once: where in prices_,
  // the first of them and how many they are.
  struct Priced {
    int prices;
    int input;
    int before;  // the last one before it with the same prices; -1: none
    double times = 1;
    const double* least_here = nullptr;  // by option: see LookAhead
  };
  std::vector<Priced> priced_;
  absl::InlinedVector<int, 8> priced_as_;  // per input: which of these
  // What the rows of a mesh dim ask for: of each the options of all of priced_, as InputPrices
  // numbers them, and which of these (BitOf) may turn out to stay as they are instead, once the row
  // is placed.
  struct Asked {
    std::vector<int> options;
    std::vector<uint64_t> unsure;
  };
  std::vector<Asked> rows_ask_;  // per mesh dim
  std::vector<Cost> least_own_;  // of the rows of this mesh dim and later ones
  Choices chosen_, best_;        // best_: empty before any is found
  int64_t version_ = 0;          // of chosen_
  // See SizesLeft: by map, and for which version.
  struct Left {
    std::vector<SizeSet> sizes = {};
    int64_t after = -1;
  };
  absl::InlinedVector<Left, 2> left_;
  std::vector<Choices> open_;  // per mesh dim: what may follow those chosen
  Cost best_cost_, best_own_;  // best_own_: without what `like` adds
  bool found_ = false, exhaustive_ = false, beam_ = false, keep_self_ = true;
  bool flat_ = false;  // some input is
  int64_t candidates_ = 0, left_to_visit_ = 0;
  std::vector<Strategy>* all_ = nullptr;
  size_t most_ = 0;
};

}  // namespace dtensor::internal
