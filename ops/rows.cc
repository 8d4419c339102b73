#include "dtensor/ops/rows.h"

#include <algorithm>
#include <utility>

#include "dtensor/errors.h"
#include "dtensor/impl.h"
#include "dtensor/mesh/comm.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// Rows that one rank has and one wants, where they lie with either.
struct Shared {
  Interval rows;
  int64_t at_from, at_to;
};

std::vector<Shared> Common(const std::vector<Rows>& have, const std::vector<Rows>& want) {
  std::vector<Shared> all;
  for (const Rows& h : have) {
    for (const Rows& w : want) {
      const Interval rows = {std::max(h.begin, w.begin), std::min(h.end, w.end)};
      if (rows.length() <= 0) continue;
      all.push_back({rows, rows.start - h.origin, rows.start - w.origin});
    }
  }
  return all;
}

int64_t Count(const std::vector<Shared>& parts) {
  int64_t rows = 0;
  for (const Shared& s : parts) rows += s.rows.length();
  return rows;
}

Tensor EmptyRows(const Tensor& like, int dim, int64_t rows) {
  Shape shape = like.shape();
  shape[dim] = rows;
  return ValueOrThrow(Tensor::Empty(shape, like.dtype(), like.device()));
}

// What goes to one peer, as one tensor.
Tensor Packed(const Tensor& from, int dim, const std::vector<Shared>& parts, bool strided) {
  if (parts.size() == 1) {
    const Tensor rows = from.Slice(dim, parts[0].at_from, parts[0].rows.length());
    return strided ? rows : ValueOrThrow(rows.Contiguous());
  }
  const Tensor packed = EmptyRows(from, dim, Count(parts));
  int64_t at = 0;
  for (const Shared& s : parts) {
    const int64_t n = s.rows.length();
    Copy(from.Slice(dim, s.at_from, n), packed.Slice(dim, at, n));
    at += n;
  }
  return packed;
}

void Put(const Tensor& rows, const Tensor& place, bool add) {
  add ? AddInPlace(place, rows) : Copy(rows, place);
}

struct Arrival {
  Tensor packed;
  std::vector<Shared> parts;
};

struct Turn {
  const MeshDims& mesh_dims;
  int dim;
  const RowsOfRanks &have, &want;
  bool exchanges, add;
};

void RunTurn(const Turn& c, const DeviceMesh& mesh, const Tensor& from, const Tensor& to) {
  Comm& comm = *ValueOrThrow(RankContext::Current().CommFor(mesh, c.mesh_dims));
  const int me = comm.index();
  const bool strided = comm.caps().strided;
  std::vector<Piece> sends, recvs;
  std::vector<Arrival> arrived;  // what came apart, and where it belongs
  for (int peer = 0; peer < comm.size(); ++peer) {
    const std::vector<Shared> out = Common(c.have[me], c.want[peer]);
    if (peer == me) {
      for (const Shared& s : out) {
        const int64_t n = s.rows.length();
        Put(from.Slice(c.dim, s.at_from, n), to.Slice(c.dim, s.at_to, n), c.add);
      }
      continue;
    }
    if (!out.empty()) sends.push_back({peer, Packed(from, c.dim, out, strided)});
    std::vector<Shared> in = Common(c.have[peer], c.want[me]);
    if (in.empty()) continue;
    if (in.size() == 1 && strided && !c.add) {
      recvs.push_back({peer, to.Slice(c.dim, in[0].at_to, in[0].rows.length())});
    } else {
      arrived.push_back({EmptyRows(to, c.dim, Count(in)), std::move(in)});
      recvs.push_back({peer, arrived.back().packed});
    }
  }
  if (c.exchanges) {
    ThrowIfError(TellPeers(mesh, comm.Exchange(std::move(sends), std::move(recvs)).Wait()));
  }
  for (const Arrival& a : arrived) {
    int64_t at = 0;
    for (const Shared& s : a.parts) {
      const int64_t n = s.rows.length();
      Put(a.packed.Slice(c.dim, at, n), to.Slice(c.dim, s.at_to, n), c.add);
      at += n;
    }
  }
}

}  // namespace

MeshDims CutsOf(const Spec& x, int dim) {
  MeshDims found;
  for (int m = 0; m < x.mesh().ndim(); ++m) {
    const Placement& p = x.placements()[m];
    if (p.is_flat()) return {};
    if (!p.cuts_dim() || p.dim() != dim) continue;
    if (!p.is_shard()) return {};
    found.push_back(m);
  }
  return found;
}

int OnlyCut(const DTensor& x, int dim) {
  const MeshDims cuts = CutsOf(x.spec(), dim);
  return cuts.size() == 1 ? cuts[0] : -1;
}

RowsOfRanks BlocksOf(const Spec& x, int dim, const MeshDims& mesh_dims) {
  RowsOfRanks blocks = {{{0, 0, x.shape()[dim]}}};
  for (const int m : mesh_dims) {
    RowsOfRanks cut;
    for (const std::vector<Rows>& block : blocks) {
      const int64_t start = block[0].begin, length = block[0].end - start;
      for (int64_t r = 0; r < x.mesh().size(m); ++r) {
        const Interval own = ShardInterval(length, x.placement(m).unit(), x.mesh().size(m), r);
        cut.push_back({{start + own.start, start + own.start, start + own.end}});
      }
    }
    blocks = std::move(cut);
  }
  return blocks;
}

int64_t RowMove::Fetched() const {
  int64_t rows = 0;
  for (size_t r = 0; r < want.size(); ++r) {
    for (const Rows& w : want[r]) rows += w.end - w.begin;
    rows -= Count(Common(have[r], want[r]));
  }
  return rows;
}

void MoveRows(const RowMove& move, const DeviceMesh& mesh, const Tensor& from, const Tensor& to) {
  RunTurn({move.mesh_dims, move.dim, move.have, move.want, move.Fetched() > 0, false}, mesh, from,
          to);
}

void AddRowsBack(const RowMove& move, const DeviceMesh& mesh, const Tensor& from,
                 const Tensor& to) {
  RunTurn({move.mesh_dims, move.dim, move.want, move.have, move.Fetched() > 0, true}, mesh, from,
          to);
}

DTensor Owned(DTensor y) {
  y.impl()->is_view = false;
  return y;
}

DTensor OfParts(const Spec& spec, absl::FunctionRef<Tensor()> part) {
  if (!spec.in_mesh()) return DTensor::Absent(spec);
  FromLocalOptions options;
  options.shape = spec.shape();
  return Owned(FromLocal(OnSelf(part()), spec.mesh(), spec.placements(), options));
}

}  // namespace dtensor
