#include "dtensor/mesh/mesh.h"

#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dtensor::mesh_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Names = std::vector<std::string>;

TEST(DeviceMesh, RowMajorCoordinates) {
  DeviceMesh mesh({2, 3}, {"dp", "tp"});
  EXPECT_EQ(mesh.ToString(), "dp=2 tp=3");
  EXPECT_EQ(DeviceMesh({2, 3}).ToString(), "2x3");
  Dims c;
  for (int64_t r = 0; r < 6; ++r) {
    ASSERT_TRUE(mesh.Coordinate(r, &c));
    EXPECT_THAT(c, ElementsAre(r / 3, r % 3));
    EXPECT_EQ(mesh.RankAt(c), r);
  }
  EXPECT_FALSE(mesh.Contains(6));
  EXPECT_FALSE(mesh.Contains(-1));
  EXPECT_EQ(mesh.MaxRank(), 5);
  EXPECT_EQ(*mesh.DimIndex("tp"), 1);
}

TEST(DeviceMesh, SubMeshesFollowTheRank) {
  DeviceMesh mesh({2, 2, 3}, {"pp", "dp", "tp"});
  EXPECT_THAT(mesh.SubMesh(Names{"dp"}, 7)->Ranks(), ElementsAre(7, 10));
  EXPECT_THAT(mesh.SubMesh(Names{"pp", "tp"}, 4)->Ranks(), ElementsAre(3, 4, 5, 9, 10, 11));
  EXPECT_THAT(mesh.SubMesh(Names{"tp", "pp"}, 4)->Ranks(), ElementsAre(3, 9, 4, 10, 5, 11));
  auto all = *mesh.AllSubMeshes(Names{"pp"});
  ASSERT_EQ(all.size(), 6u);
  EXPECT_THAT(all[4].Ranks(), ElementsAre(4, 10));
  EXPECT_EQ(*mesh.SubMesh(Names{"pp", "dp", "tp"}, 3), mesh);
  EXPECT_TRUE(mesh.SubMeshByDims({}, 3)->is_self());
}

TEST(DeviceMesh, BracketsUseTheCallingRank) {
  DeviceMesh mesh({2, 2}, {"dp", "tp"});
  absl::Status status = RunSpmd(4, [&](RankContext& context) {
    int64_t r = context.rank();
    EXPECT_THAT(mesh["tp"].Ranks(), ElementsAre(r / 2 * 2, r / 2 * 2 + 1));
    EXPECT_EQ((mesh[{"dp", "tp"}]), mesh);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THROW(mesh["cp"], Error);
}

TEST(DeviceMesh, EqualRanksAreEqualMeshesHoweverMade) {
  DeviceMesh mesh({2, 3}, {"dp", "tp"});
  DeviceMesh listed = *DeviceMesh::FromRanks({2, 3}, {0, 1, 2, 3, 4, 5}, {"dp", "tp"});
  EXPECT_EQ(mesh, listed);
  EXPECT_EQ(mesh.hash(), listed.hash());
  DeviceMesh column = *DeviceMesh::FromRanks({2}, {1, 4}, {"dp"});
  EXPECT_EQ(*mesh.SubMesh(Names{"dp"}, 1), column);
  EXPECT_FALSE(mesh == DeviceMesh({2, 3}));
  EXPECT_FALSE(mesh == *DeviceMesh::Create({2, 3}, {"dp", "tp"}, DeviceType::kMeta));
  EXPECT_FALSE(mesh == DeviceMesh());
  EXPECT_EQ(*DeviceMesh::Parse("dp=2, tp=3"), mesh);
}

TEST(DeviceMesh, RankListsWithoutPattern) {
  DeviceMesh mesh = *DeviceMesh::FromRanks({2, 2}, {7, 1, 0, 5}, {"dp", "tp"});
  EXPECT_THAT(mesh.Ranks(), ElementsAre(7, 1, 0, 5));
  Dims c;
  ASSERT_TRUE(mesh.Coordinate(0, &c));
  EXPECT_THAT(c, ElementsAre(1, 0));
  EXPECT_FALSE(mesh.Contains(2));
  EXPECT_EQ(mesh.MaxRank(), 7);
  EXPECT_THAT(mesh.SubMesh(Names{"dp"}, 5)->Ranks(), ElementsAre(1, 5));
  EXPECT_THAT(mesh.Flatten("all").Ranks(), ElementsAre(7, 1, 0, 5));
  EXPECT_THAT(DeviceMesh::FromRanks({3}, {2, 1, 0})->Ranks(), ElementsAre(2, 1, 0));
}

TEST(DeviceMesh, FlattenAndReshape) {
  DeviceMesh mesh({2, 2, 2}, {"a", "b", "c"});
  EXPECT_EQ(mesh.Flatten("all"), DeviceMesh({8}, {"all"}));
  EXPECT_EQ(*mesh.Reshape({2, 4}, {"x", "y"}), DeviceMesh({2, 4}, {"x", "y"}));
  DeviceMesh gap = *mesh.SubMesh(Names{"a", "c"}, 3);  // ranks without one stride
  EXPECT_THAT(gap.Flatten("f").Ranks(), ElementsAre(2, 3, 6, 7));
  EXPECT_THAT(mesh.Reshape({3, 3}).status().message(),
              HasSubstr("cannot reshape mesh a=2 b=2 c=2 of 8 ranks to [3, 3] of 9"));
}

TEST(DeviceMesh, SelfHoldsEveryRank) {
  const DeviceMesh& self = DeviceMesh::Self();
  EXPECT_TRUE(self.is_self());
  EXPECT_EQ(self.size(), 1);
  EXPECT_EQ(self.ToString(), "self");
  EXPECT_TRUE(self.Contains(12345));
  EXPECT_EQ(self, *DeviceMesh::Create({}));
}

TEST(DeviceMesh, HugeMeshesCostNoMemory) {
  DeviceMesh mesh = *DeviceMesh::Create({64, 16, 16}, {"dp", "pp", "tp"}, DeviceType::kMeta);
  Dims c;
  ASSERT_TRUE(mesh.Coordinate(16383, &c));
  EXPECT_THAT(c, ElementsAre(63, 15, 15));
  EXPECT_EQ(mesh.SubMesh(Names{"dp"}, 16383)->RankAt({0}), 255);
  EXPECT_EQ(mesh.Flatten("w").size(), 16384);
}

std::string Message(const absl::StatusOr<DeviceMesh>& mesh) {
  EXPECT_FALSE(mesh.ok());
  return std::string(mesh.status().message());
}

TEST(DeviceMesh, ErrorsSayWhatIsWrong) {
  EXPECT_THAT(Message(DeviceMesh::Create({2, 0})), HasSubstr("size 0 of dim 1 is less than 1"));
  EXPECT_THAT(Message(DeviceMesh::Create({int64_t{1} << 40, int64_t{1} << 40})),
              HasSubstr("overflows"));
  EXPECT_THAT(Message(DeviceMesh::Create({2, 2}, {"a"})), HasSubstr("mesh of 2 dims got 1 names"));
  EXPECT_THAT(Message(DeviceMesh::Create({2, 2}, {"a", "a"})),
              HasSubstr("mesh dim name \"a\" is used twice"));
  EXPECT_THAT(Message(DeviceMesh::Create({2, 2}, {"a", ""})),
              HasSubstr("the name of mesh dim 1 is empty"));
  EXPECT_THAT(Message(DeviceMesh::FromRanks({3}, {0, 4, 4})),
              HasSubstr("rank 4 appears twice in the mesh"));
  EXPECT_THAT(Message(DeviceMesh::FromRanks({2}, {0, -1})), HasSubstr("mesh rank -1 is negative"));
  EXPECT_THAT(Message(DeviceMesh::FromRanks({2}, {0, 1, 2})),
              HasSubstr("mesh shape [2] needs 2 ranks, got 3"));
  for (const char* text : {"", "dp", "dp=", "dp=x", "=2", "dp=2,,tp=2"}) {
    EXPECT_THAT(Message(DeviceMesh::Parse(text)), HasSubstr("write it as dp=2,tp=4")) << text;
  }
  DeviceMesh mesh({2, 2}, {"dp", "tp"});
  absl::Status unknown = mesh.DimIndex("cp").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(unknown.message(), "mesh dp=2 tp=2 has no dim \"cp\"; its dims are [dp, tp]");
  EXPECT_THAT(Message(mesh.SubMesh(Names{"dp", "dp"}, 0)), HasSubstr("mesh dim dp is named twice"));
  EXPECT_THAT(Message(mesh.SubMesh(Names{"dp"}, 9)), HasSubstr("rank 9 is not in mesh dp=2 tp=2"));
  EXPECT_THAT(Message(mesh.SubMeshByDims({5}, 0)), HasSubstr("has no dim 5"));
  const DeviceMesh null;
  EXPECT_THAT(Message(null.SubMesh(Names{"dp"}, 0)), HasSubstr("of a null mesh"));
  EXPECT_THAT(Message(null.SubMeshByDims({0}, 0)), HasSubstr("of a null mesh"));
  EXPECT_THAT(Message(null.Reshape({1})), HasSubstr("of a null mesh"));
  EXPECT_FALSE(null.DimIndex("dp").ok());
  EXPECT_FALSE(null.AllSubMeshes(Names{"dp"}).ok());
  EXPECT_FALSE(RankContext::Current().CommForUnion(mesh, null).ok());
}

TEST(DeviceMesh, SameRanksInAnyOrder) {
  const DeviceMesh row({8}), grid({2, 4}), cube({2, 2, 2});
  EXPECT_TRUE(row.SameRanks(grid));
  EXPECT_TRUE(grid.SameRanks(cube));
  EXPECT_TRUE(row.SameRanks(*DeviceMesh::FromRanks({2, 4}, {7, 6, 5, 4, 3, 2, 1, 0})));
  EXPECT_FALSE(row.SameRanks(DeviceMesh({4})));
  // Of whichever rank it is.
  EXPECT_FALSE(DeviceMesh::Self().SameRanks(*DeviceMesh::FromRanks({1}, {0})));
  const DeviceMesh even = *DeviceMesh::FromRanks({4}, {0, 2, 4, 6});
  EXPECT_TRUE(even.SameRanks(*cube.SubMeshByDims(std::vector<int>{1, 0}, 2)));
  EXPECT_FALSE(even.SameRanks(*DeviceMesh::FromRanks({4}, {0, 1, 2, 3})));
  EXPECT_FALSE(even.SameRanks(*DeviceMesh::FromRanks({4}, {1, 3, 5, 7})));
  const DeviceMesh list = *DeviceMesh::FromRanks({3}, {5, 1, 2});
  EXPECT_TRUE(list.SameRanks(*DeviceMesh::FromRanks({3}, {1, 2, 5})));
  EXPECT_FALSE(list.SameRanks(*DeviceMesh::FromRanks({3}, {1, 2, 4})));
  EXPECT_EQ(list.MinRank(), 1);
  EXPECT_EQ(list.MaxRank(), 5);
  EXPECT_EQ(cube.SubMeshByDims(std::vector<int>{1, 0}, 3)->MinRank(), 1);
  // A million ranks are compared by their strides.
  EXPECT_TRUE(DeviceMesh({1000, 1000}).SameRanks(DeviceMesh({1000000})));
}

}  // namespace
}  // namespace dtensor::mesh_test
