// Runs every vector of a file of known random numbers (the format of tests/data/rng-vectors.json),
// prints each failure with what was expected and what came, and "N passed, N failed".
//
//   rng_check [--whole=N] [--ranks=N] [--hardware-math] FILE [FILE...]
//                                   exit code 0 if none failed; a file without vectors is an error,
//                                   and a vector that checks nothing a failure
//
// --hardware-math: draws with Profile::hardware_math and says how many of the numbers that have a
// tolerance came out bit for bit: all, it is hoped, on a GPU of the kind that drew the vectors.
// What the library draws on devices is drawn on the one that DTENSOR_DEVICE names: not
// permutations, the numbers of samples, and the words by themselves. Of tensors of more than N
// elements (10^7) those with a known answer alone are drawn, each as a shard of its own.
// --ranks=N: tensors that are made whole are drawn by N ranks, each its rows.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/program.h"
#include "dtensor/rng/dropout.h"
#include "dtensor/rng/fill.h"
#include "dtensor/rng/philox.h"
#include "dtensor/rng/sampling.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"
#include "nlohmann/json.hpp"

namespace dtensor {
namespace {

using nlohmann::json;

int64_t passed = 0, failed = 0;
int64_t largest_whole = 10000000, ranks = 1;
bool hardware_math = false;
int64_t with_tolerance = 0, bit_for_bit = 0;  // numbers

void Note(const std::string& id, const std::string& problem) {
  if (problem.empty()) {
    ++passed;
    return;
  }
  ++failed;
  std::printf("FAILED %s: %s\n", id.c_str(), problem.c_str());
}

uint64_t Bits(const Tensor& t, int64_t index) {
  uint64_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(t.data()) + index * SizeOf(t.dtype()),
              static_cast<size_t>(SizeOf(t.dtype())));
  return bits;
}

// abs_tol is a number, or "X relative", "X of 1 + |value|" or "X of 1 + value^2".
bool Close(double got, double want, const json& vector) {
  if (got == want || (std::isnan(got) && std::isnan(want))) return true;
  const json& tolerance = vector.at("abs_tol");
  double allowed = 0;
  if (tolerance.is_number()) {
    allowed = tolerance.get<double>();
  } else {
    const std::string text = tolerance.get<std::string>();
    if (!absl::SimpleAtod(text.substr(0, text.find(' ')), &allowed)) return false;
    if (absl::StrContains(text, "relative")) allowed *= std::fabs(want);
    if (absl::StrContains(text, "1 + |value|")) allowed *= 1 + std::fabs(want);
    if (absl::StrContains(text, "1 + value^2")) allowed *= 1 + want * want;
  }
  return std::fabs(got - want) <= allowed;
}

// Masks and draws of dtype bool may be written as true and false.
template <class T>
T Number(const json& value) {
  return value.is_boolean() ? static_cast<T>(value.get<bool>()) : value.get<T>();
}

// "" or the first difference. `first`: the index in the whole tensor of the first element of t.
std::string Compare(const json& v, const Tensor& t, int64_t first) {
  const std::vector<double> values = t.ToVector<double>();
  const bool whole_numbers = !IsFloating(t.dtype());
  const bool exact = v.at("exact").get<bool>();
  const json &indices = v.at("indices"), &wanted = v.at("values");
  if (indices.size() != wanted.size() || (indices.empty() && !values.empty())) {
    return absl::StrCat(indices.size(), " indices and ", wanted.size(),
                        " values: needs as many of both, and some");
  }
  for (size_t i = 0; i < indices.size(); ++i) {
    const int64_t index = indices[i].get<int64_t>() - first;
    const json& want = wanted[i];
    if (index < 0 || index >= t.numel()) {
      return absl::StrCat("index ", index + first, " is outside of the tensor");
    }
    const auto says = [&](const std::string& wanted, const std::string& got) {
      return absl::StrCat("element ", index + first, ": expected ", wanted, ", got ", got);
    };
    if (exact && v.contains("bits")) {
      const uint64_t bits = std::stoull(v["bits"].at(i).get<std::string>(), nullptr, 16);
      if (Bits(t, index) != bits) {
        return says(absl::StrCat(absl::Hex(bits)), absl::StrCat(absl::Hex(Bits(t, index))));
      }
    } else if (whole_numbers) {
      const int64_t got = t.ToVector<int64_t>()[index];
      if (got != Number<int64_t>(want)) return says(want.dump(), absl::StrCat(got));
    } else {
      const bool same = values[index] == Number<double>(want);
      with_tolerance += !exact;
      bit_for_bit += !exact && same;
      if (!same && (exact || !Close(values[index], Number<double>(want), v))) {
        return says(want.dump(), absl::StrFormat("%.17g", values[index]));
      }
    }
  }
  return "";
}

absl::StatusOr<RandomOp> OpOf(const json& v) {
  const std::string op = v.at("op");
  const json& p = v.value("params", json::object());
  if (op == "uniform_") return UniformOp(p.at("from"), p.at("to"));
  if (op == "normal_") return NormalOp(p.at("mean"), p.at("std"));
  if (op == "random_from_to") return RandomRangeOp(p.at("from"), p.at("to"));
  if (op == "random_") return RandomFullOp();
  if (op == "bernoulli_scalar") return BernoulliOp(p.at("p"));
  if (op == "exponential_") return ExponentialOp(p.at("lambda"));
  if (op == "cauchy_") return CauchyOp(p.at("median"), p.at("sigma"));
  if (op == "log_normal_") return LogNormalOp(p.at("mean"), p.at("std"));
  if (op == "geometric_") return GeometricOp(p.at("p"));
  return absl::UnimplementedError(absl::StrCat("no op \"", op, "\""));
}

// Before 2.7 dropout took vectors of 4 for every dtype; `vec` says what this vector's PyTorch took.
absl::Status ChooseDropoutVec(const json& v, DType dtype, int vec, Profile* profile) {
  const auto shape = v.at("shape").get<std::vector<int64_t>>();
  for (const bool old : {false, true}) {
    profile->old_dropout_vec = old;
    DT_ASSIGN_OR_RETURN(const DropoutPlan plan, PlanDropout(shape, dtype, *profile, 0));
    if (plan.vec == vec) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("vec ", vec, ": no PyTorch takes that for this dtype and size"));
}

absl::StatusOr<Generator> GeneratorOf(const json& v, DType dtype) {
  Profile profile;
  if (v.contains("profile")) {
    DT_ASSIGN_OR_RETURN(profile, FindProfile(v["profile"].get<std::string>()));
  }
  profile.hardware_math = hardware_math;
  // The vectors say which words and vector widths their PyTorch took.
  const json& p = v.value("params", json::object());
  const std::string word = p.value("word", p.value("key_word", ""));
  profile.old_wide_range = word == "u32";
  if (v.at("op") == "native_dropout_mask" && p.contains("vec")) {
    DT_RETURN_IF_ERROR(ChooseDropoutVec(v, dtype, p["vec"].get<int>(), &profile));
  }
  Generator g(v.at("seed").get<uint64_t>(), profile);
  DT_RETURN_IF_ERROR(g.SetOffset(v.at("offset").get<uint64_t>()));
  return g;
}

absl::StatusOr<SpecRef> WholeSpec(const json& v, DType dtype) {
  return RankContext::Current().specs().Intern(DeviceMesh::Self(), {},
                                               v.at("shape").get<std::vector<int64_t>>(), dtype);
}

DeviceType Device() { return RankContext::Current().device(); }

// What a vector draws element by element, of the shard that `spec` says.
absl::StatusOr<Tensor> DrawShard(const json& v, const SpecRef& spec, Generator* g) {
  const bool mask = v.at("op") == "native_dropout_mask";
  DT_ASSIGN_OR_RETURN(
      Tensor t, Tensor::Empty(spec->local_shape(), mask ? DType::kBool : spec->dtype(), Device()));
  if (mask) {
    DT_RETURN_IF_ERROR(FillDropoutMask(t, *spec, v.at("params").at("p").get<double>(), g));
  } else {
    DT_ASSIGN_OR_RETURN(const RandomOp random, OpOf(v));
    DT_RETURN_IF_ERROR(FillRandom(t, *spec, random, g));
  }
  return t.To(DeviceType::kCpu);
}

// Rows of the tensor of a vector, of which `first` elements come before them.
absl::StatusOr<Tensor> DrawRows(const json& v, const SpecRef& spec, int64_t first, Generator* g) {
  if (v.at("op") != "bernoulli_tensor") return DrawShard(v, spec, g);
  const auto all = v.at("params").at("p").get<std::vector<double>>();
  const std::vector<double> chances(all.begin() + first,
                                    all.begin() + first + Numel(spec->local_shape()));
  DT_ASSIGN_OR_RETURN(Tensor p, Tensor::FromVector(chances, spec->local_shape(), DType::kF32));
  DT_ASSIGN_OR_RETURN(p, p.To(Device()));
  DT_ASSIGN_OR_RETURN(Tensor t, Tensor::Empty(spec->local_shape(), spec->dtype(), Device()));
  DT_RETURN_IF_ERROR(FillBernoulli(t, p, *spec, g));
  return t.To(DeviceType::kCpu);
}

// The tensor of a vector that is small enough to be made whole.
absl::StatusOr<Tensor> Draw(const json& v, DType dtype, Generator* g) {
  const std::string op = v.at("op");
  DT_ASSIGN_OR_RETURN(const SpecRef spec, WholeSpec(v, dtype));
  if (op == "randperm") return RandomPermutation(spec->numel(), g);
  if (op == "multinomial_with_replacement_uniforms") {
    return MultinomialUniforms(spec->shape()[0], spec->shape()[1], g);
  }
  return DrawRows(v, spec, 0, g);
}

// The same tensor, each rank's rows in turn.
absl::StatusOr<Tensor> DrawByRanks(const json& v, DType dtype, Generator* g) {
  const Generator before = *g;
  std::string bytes;
  int64_t first = 0;
  Tensor whole;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    DT_RETURN_IF_ERROR(
        RunFake({.world = ranks, .rank = rank}, [&](RankContext& context) -> absl::Status {
          DT_ASSIGN_OR_RETURN(const SpecRef whole_spec, WholeSpec(v, dtype));
          const Shape& shape = whole_spec->shape();
          DT_ASSIGN_OR_RETURN(
              const SpecRef spec,
              context.specs().Intern(DeviceMesh({ranks}), {shape.empty() ? Replicate() : Shard(0)},
                                     shape, dtype));
          *g = before;
          DT_ASSIGN_OR_RETURN(const Tensor rows, DrawRows(v, spec, first, g));
          if (rank == 0) {
            DT_ASSIGN_OR_RETURN(whole, Tensor::Empty(shape, rows.dtype()));
          }
          if (!shape.empty()) first += rows.numel();
          const auto* const at = static_cast<const char*>(rows.data());
          if (!shape.empty() || rank == 0) bytes.append(at, at + rows.nbytes());
          return absl::OkStatus();
        }));
  }
  if (static_cast<int64_t>(bytes.size()) != whole.nbytes()) {
    return absl::InternalError(
        absl::StrCat("the ranks' rows have ", bytes.size(), " bytes, the tensor ", whole.nbytes()));
  }
  if (!bytes.empty()) std::memcpy(whole.data(), bytes.data(), bytes.size());
  return whole;
}

// A tensor too large to make: each index alone, as a flat shard of length 1.
absl::StatusOr<std::string> OneByOne(const json& v, DType dtype, const Generator& before,
                                     uint64_t* after) {
  const int64_t n = v.at("numel").get<int64_t>();
  if (v.at("indices").empty()) return std::string("no indices: it checks nothing");
  std::string problem;
  DT_RETURN_IF_ERROR(RunFake({.world = 3, .rank = 1}, [&](RankContext& context) -> absl::Status {
    for (size_t i = 0; i < v.at("indices").size() && problem.empty(); ++i) {
      const int64_t index = v["indices"][i].get<int64_t>();
      DT_ASSIGN_OR_RETURN(const SpecRef spec,
                          context.specs().Intern(
                              DeviceMesh({3}), {FlatShard({index, 1, n - index - 1})}, {n}, dtype));
      Generator g = before;
      DT_ASSIGN_OR_RETURN(const Tensor t, DrawShard(v, spec, &g));
      *after = g.offset();
      json one = v;
      one["indices"] = {index};
      one["values"] = {v.at("values").at(i)};
      if (v.contains("bits")) one["bits"] = {v["bits"].at(i)};
      problem = Compare(one, t, index);
    }
    return absl::OkStatus();
  }));
  return problem;
}

absl::StatusOr<std::string> CheckVector(const json& v) {
  DType dtype;
  if (!ParseDType(v.at("dtype").get<std::string>(), &dtype)) {
    return absl::InvalidArgumentError("unknown dtype " + v["dtype"].dump());
  }
  DT_ASSIGN_OR_RETURN(Generator g, GeneratorOf(v, dtype));
  uint64_t after = g.offset();
  std::string problem;
  const auto shape = v.at("shape").get<std::vector<int64_t>>();
  DT_ASSIGN_OR_RETURN(const int64_t numel, CheckedNumel(shape));
  if (numel != v.at("numel").get<int64_t>()) return std::string("numel is not that of shape");
  const std::string op = v.at("op");
  const bool by_rows = op != "randperm" && op != "multinomial_with_replacement_uniforms";
  const bool by_shards = by_rows && op != "bernoulli_tensor";
  if (ranks > 1 && by_rows && (numel <= largest_whole || !by_shards)) {
    DT_ASSIGN_OR_RETURN(const Tensor t, DrawByRanks(v, dtype, &g));
    problem = Compare(v, t, 0);
    after = g.offset();
  } else if (numel <= largest_whole || !by_shards) {
    DT_RETURN_IF_ERROR(RunFake({}, [&](RankContext&) -> absl::Status {
      DT_ASSIGN_OR_RETURN(const Tensor t, Draw(v, dtype, &g));
      problem = Compare(v, t, 0);
      return absl::OkStatus();
    }));
    after = g.offset();
  } else {
    DT_ASSIGN_OR_RETURN(problem, OneByOne(v, dtype, g, &after));
  }
  if (problem.empty() && after != v.at("offset_after").get<uint64_t>()) {
    problem =
        absl::StrCat("offset afterwards: expected ", v["offset_after"].dump(), ", got ", after);
  }
  return problem;
}

void CheckPhilox(const json& file) {
  int number = 0;
  for (const json& k : file.value("philox_kat", json::array())) {
    const auto words = [&](const char* name) {
      std::vector<uint32_t> all;
      for (const json& w : k.at(name)) {
        all.push_back(static_cast<uint32_t>(
            w.is_string() ? std::stoul(w.get<std::string>(), nullptr, 16) : w.get<uint64_t>()));
      }
      return all;
    };
    const auto c = words("counter"), key = words("key"), want = words("out");
    const PhiloxWords got = Philox4x32(MakePhiloxKeys(key[0] | static_cast<uint64_t>(key[1]) << 32),
                                       {c[0], c[1], c[2], c[3]});
    const bool same = got.x == want[0] && got.y == want[1] && got.z == want[2] && got.w == want[3];
    Note(absl::StrCat("philox_kat ", number++), same ? "" : "expected " + k.at("out").dump());
  }
}

// Words of curand_init(seed, subsequence, offset) and the calls that follow, one word at a time.
void CheckCurandInit(const json& file) {
  int number = 0;
  for (const json& k : file.value("curand_init_words", json::array())) {
    const PhiloxKeys keys = MakePhiloxKeys(k.at("seed").get<uint64_t>());
    const auto offset = k.at("offset").get<uint64_t>();
    std::string problem;
    for (size_t i = 0; i < k.at("words").size() && problem.empty(); ++i) {
      const uint64_t at = offset % 4 + i;
      const PhiloxWords block =
          CurandBlock(keys, offset / 4 + at / 4, k.at("subsequence").get<uint64_t>());
      const uint32_t words[] = {block.x, block.y, block.z, block.w};
      const auto want =
          static_cast<uint32_t>(std::stoul(k["words"][i].get<std::string>(), nullptr, 16));
      if (words[at % 4] != want) {
        problem = absl::StrCat("word ", i, ": expected ", absl::Hex(want), ", got ",
                               absl::Hex(words[at % 4]));
      }
    }
    Note(absl::StrCat("curand_init_words ", number++), problem);
  }
}

// The shards of a whole tensor, rank by rank.
absl::StatusOr<std::string> CheckShards(const json& v) {
  DType dtype;
  if (!ParseDType(v.at("dtype").get<std::string>(), &dtype)) {
    return absl::InvalidArgumentError("unknown dtype");
  }
  const auto mesh_shape = v.at("mesh").get<std::vector<int64_t>>();
  std::string problem;
  for (const json& r : v.at("ranks")) {
    DT_RETURN_IF_ERROR(RunFake(
        {.world = Numel(mesh_shape), .rank = r.at("rank").get<int64_t>()},
        [&](RankContext& context) -> absl::Status {
          DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create(mesh_shape));
          Placements placements;
          for (const json& p : v.at("placements")) {
            const std::string text = p.get<std::string>();
            const size_t open = text.find('(');
            placements.push_back(
                open == std::string::npos ? Replicate() : Shard(std::stoi(text.substr(open + 1))));
          }
          DT_ASSIGN_OR_RETURN(
              const SpecRef spec,
              context.specs().Intern(mesh, placements,
                                     v.at("global_shape").get<std::vector<int64_t>>(), dtype));
          DT_ASSIGN_OR_RETURN(Tensor t, Tensor::Empty(spec->local_shape(), dtype, Device()));
          Generator g(v.at("seed").get<uint64_t>());
          DT_RETURN_IF_ERROR(g.SetOffset(v.at("offset").get<uint64_t>()));
          DT_RETURN_IF_ERROR(FillRandom(t, *spec, UniformOp(), &g));
          DT_ASSIGN_OR_RETURN(t, t.To(DeviceType::kCpu));
          const std::vector<double> got = t.ToVector<double>();
          size_t i = 0;
          for (const json& row : r.at("values")) {
            for (const json& want : row) {
              if (i >= got.size() || std::fabs(got[i] - want.get<double>()) > 1e-6) {
                problem = absl::StrCat("rank ", r["rank"].dump(), " element ", i, ": expected ",
                                       want.dump(), ", got ",
                                       i < got.size() ? absl::StrCat(got[i]) : "nothing");
              }
              ++i;
            }
          }
          if (i < got.size()) problem = absl::StrCat("rank ", r["rank"].dump(), ": too few values");
          return absl::OkStatus();
        }));
  }
  return problem;
}

template <class Check>
void CheckAll(const json& list, const Check& check) {
  for (const json& v : list) {
    std::string id = "without id";
    try {
      id = v.value("id", id);
      const absl::StatusOr<std::string> problem = check(v);
      Note(id, problem.ok() ? *problem : std::string(problem.status().message()));
    } catch (const std::exception& e) {
      Note(id, e.what());
    }
  }
}

absl::Status CheckFile(const std::string& path) {
  DT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  const json file = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto bad = [&](const char* why) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is no file of vectors: ", why));
  };
  if (!file.is_object()) return bad("it is no JSON object");
  if (!file.contains("vectors") || !file["vectors"].is_array() || file["vectors"].empty()) {
    return bad("its \"vectors\" are missing or empty");
  }
  try {
    CheckPhilox(file);
    CheckCurandInit(file);
    CheckAll(file["vectors"], CheckVector);
    CheckAll(file.value("sharded", json::array()), CheckShards);
  } catch (const std::exception& e) {
    return bad(e.what());
  }
  return absl::OkStatus();
}

absl::Status Main(int argc, char** argv) {
  int first = 1;
  for (; first < argc && absl::StartsWith(argv[first], "--"); ++first) {
    absl::string_view option = argv[first];
    if (option == "--hardware-math") {
      hardware_math = true;
    } else if (absl::ConsumePrefix(&option, "--ranks=")) {
      if (!absl::SimpleAtoi(option, &ranks) || ranks < 1 || ranks > 64) {
        return absl::InvalidArgumentError("--ranks= needs a number from 1 to 64");
      }
    } else if (!absl::ConsumePrefix(&option, "--whole=")) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", option, "\": known are --whole=N, --ranks=N and --hardware-math"));
    } else if (!absl::SimpleAtoi(option, &largest_whole) || largest_whole < 0) {
      return absl::InvalidArgumentError("--whole= needs a number of elements");
    }
  }
  if (argc <= first) {
    return absl::InvalidArgumentError(
        "usage: rng_check [--whole=N] [--ranks=N] [--hardware-math] FILE [FILE...]");
  }
  for (int i = first; i < argc; ++i) DT_RETURN_IF_ERROR(CheckFile(argv[i]));
  std::printf("%lld passed, %lld failed\n", static_cast<long long>(passed),
              static_cast<long long>(failed));
  if (hardware_math) {
    std::printf("%lld of %lld numbers with a tolerance are those of the file, bit for bit\n",
                static_cast<long long>(bit_for_bit), static_cast<long long>(with_tolerance));
  }
  if (failed == 0) return absl::OkStatus();
  return absl::FailedPreconditionError("not every vector passed");
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  return dtensor::RunProgram([&] { return dtensor::Main(argc, argv); });
}
