// Tensor cores: mma.sync and ldmatrix. Where each element of a fragment lies is as PTX has it: lane
// l is of group l / 4 and the l % 4th in it.
#include "tests/cusim/ops.h"

namespace cusim {
namespace {

float Tf32(uint64_t slot) { return Get<float>(slot & 0xffffe000u); }

struct Shape {
  int m, n, k;
};

// An element of a lane's registers: `per` of them in each.
double Element(Type type, const Exec& e, const int* slots, int lane, int index) {
  Exec& exec = const_cast<Exec&>(e);
  const auto slot = [&](int per) { return exec.Reg(slots[index / per])[lane]; };
  switch (type) {
    case Type::kF16:
    case Type::kF16x2:
      return Real(F16{static_cast<uint16_t>(slot(2) >> (16 * (index % 2)))});
    case Type::kBF16:
      return Real(BF16{static_cast<uint16_t>(slot(2) >> (16 * (index % 2)))});
    case Type::kTF32:
      return Tf32(slot(1));
    case Type::kF32:
      return Get<float>(slot(1));
    case Type::kF64:
      return Get<double>(slot(1));
    case Type::kS8:
      return static_cast<int8_t>(slot(4) >> (8 * (index % 4)));
    case Type::kU8:
      return static_cast<uint8_t>(slot(4) >> (8 * (index % 4)));
    default:
      return static_cast<int32_t>(slot(1));
  }
}

int PerRegister(Type type) {
  return type == Type::kF16 || type == Type::kBF16 ? 2
         : type == Type::kS8 || type == Type::kU8  ? 4
                                                   : 1;
}

// d = a b + c of a whole warp. in.mode: the shape's k; the types are in.type (d), and in.from (a).
// Products are exact and summed in double, which no device promises: results are within the last
// bits of what one gives, and equal where all sums are exact.
template <int m, int n, int k>
void MmaOp(Exec& e, const Insn& in, uint32_t mask) {
  if (mask != ~0u) e.Fail(Outcome::kInvalid, "wrong mask", "mma without all lanes of the warp", 0);
  const Type ab = in.from, cd = in.type;
  const int per = PerRegister(ab);
  constexpr int a_elements = m * k / 32, b_elements = k * n / 32, c_elements = m * n / 32;
  const int* const a_slots = &in.s[0];
  const int* const b_slots = a_slots + a_elements / per;
  const int* const c_slots = b_slots + b_elements / per;
  double a[m][k], b[k][n], c[m][n];
  // Rows of a go over 8 groups; columns, `step` neighbours to a lane, in blocks of 4 * step.
  const int step = per;
  for (int l = 0; l < 32; ++l) {
    const int group = l / 4, in_group = l % 4;
    for (int i = 0; i < a_elements; ++i) {
      const int r = i / step;  // the block: rows first, then columns
      const int row = group + (m == 16 ? 8 * (r % 2) : 0);
      const int column = in_group * step + i % step + 4 * step * (m == 16 ? r / 2 : r);
      a[row][column] = Element(ab, e, a_slots, l, i);
    }
    for (int i = 0; i < b_elements; ++i) {
      b[in_group * step + i % step + 4 * step * (i / step)][group] = Element(ab, e, b_slots, l, i);
    }
    for (int i = 0; i < c_elements; ++i) {
      c[group + 8 * (i / 2)][in_group * 2 + i % 2] = Element(cd, e, c_slots, l, i);
    }
  }
  for (int row = 0; row < m; ++row) {
    for (int column = 0; column < n; ++column) {
      double sum = c[row][column];
      for (int i = 0; i < k; ++i) sum += a[row][i] * b[i][column];
      c[row][column] = sum;
    }
  }
  for (int l = 0; l < 32; ++l) {
    for (int i = 0; i < c_elements; ++i) {
      const double v = c[l / 4 + 8 * (i / 2)][l % 4 * 2 + i % 2];
      if (cd == Type::kF16) {
        uint64_t& slot = e.Reg(in.d[i / 2])[l];
        const int shift = 16 * (i % 2);
        slot = (slot & ~(0xffffull << shift)) | uint64_t{FromReal<F16>(v).bits} << shift;
      } else if (cd == Type::kF32) {
        e.Reg(in.d[i])[l] = Put(FromReal<float>(v));
      } else if (cd == Type::kF64) {
        e.Reg(in.d[i])[l] = Put(v);
      } else {
        const int64_t whole = static_cast<int64_t>(v);
        const int64_t low = std::numeric_limits<int32_t>::min();
        const int64_t high = std::numeric_limits<int32_t>::max();
        const int64_t kept = in.saturate ? std::clamp(whole, low, high) : whole;
        e.Reg(in.d[i])[l] = static_cast<uint32_t>(kept);
      }
    }
  }
}

OpFn FindMma(const Opcode& op, Insn* in) {
  std::vector<Type> types;
  for (const std::string& m : op.modifiers) {
    if (TypeNamed(m) != Type::kNone) types.push_back(TypeNamed(m));
  }
  if (types.size() != 4 || !op.Has("row") || !op.Has("col")) return nullptr;
  if (types[0] != types[3] || types[1] != types[2]) return nullptr;
  in->flow = Flow::kWarp;
  in->type = types[0];
  in->from = types[1];
  in->saturate = op.Has("satfinite");
  if (op.Has("m16n8k16") && PerRegister(in->from) >= 2) return &MmaOp<16, 8, 16>;
  if (op.Has("m16n8k8")) return &MmaOp<16, 8, 8>;
  if (op.Has("m16n8k4") && in->from == Type::kTF32) return &MmaOp<16, 8, 4>;
  if (op.Has("m16n8k32") && PerRegister(in->from) == 4) return &MmaOp<16, 8, 32>;
  if (op.Has("m8n8k4") && in->from == Type::kF64) return &MmaOp<8, 8, 4>;
  return nullptr;
}

// Lanes 0 to 7 have the rows of the first matrix, 8 to 15 of the second, and so on; lane l gets two
// neighbours of row l / 4 of each, or, transposed, of column l / 4.
void LdmatrixOp(Exec& e, const Insn& in, uint32_t mask) {
  if (mask != ~0u) e.Fail(Outcome::kInvalid, "wrong mask", "ldmatrix without all lanes", 0);
  const uint64_t* const base = e.Reg(in.s[0]);
  std::array<std::array<uint64_t, 32>, 4> values{};
  const int matrices = in.mode & 7;
  e.CountRequest(in.space, base, in.offset, matrices == 4 ? ~0u : (1u << (8 * matrices)) - 1, 16);
  for (int i = 0; i < matrices; ++i) {
    uint16_t rows[8][8];
    for (int r = 0; r < 8; ++r) {
      const int lane = 8 * i + r;
      uint64_t address = base[lane] + static_cast<uint64_t>(in.offset);
      SpaceOf(in.space, &address);
      std::memcpy(rows[r], e.At(in, Space::kShared, address, 16, lane, Access::kRead), 16);
    }
    for (int l = 0; l < 32; ++l) {
      const int r = l / 4, c = l % 4 * 2;
      const bool turned = in.mode & 8;
      const uint64_t first = turned ? rows[c][r] : rows[r][c];
      const uint64_t second = turned ? rows[c + 1][r] : rows[r][c + 1];
      values[i][l] = second << 16 | first;
    }
  }
  for (int i = 0; i < matrices; ++i) {
    std::memcpy(e.Reg(in.d[i]), values[i].data(), sizeof values[i]);
  }
}

}  // namespace

OpFn FindMatrix(const Opcode& op, Insn* in) {
  if (op.base == "mma") return FindMma(op, in);
  if (op.base != "ldmatrix" || !op.Has("m8n8") || !op.Has("b16")) return nullptr;
  in->flow = Flow::kWarp;
  in->mode = static_cast<uint8_t>((op.Has("x4") ? 4 : op.Has("x2") ? 2 : 1) | op.Has("trans") << 3);
  return &LdmatrixOp;
}

}  // namespace cusim
