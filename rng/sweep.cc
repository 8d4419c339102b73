#include "rng/sweep.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "tensor/status.h"

namespace dtensor {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

template <class T>
void Scatter(const char* from, char* to, int64_t stride, int n) {
  const T* source = reinterpret_cast<const T*>(from);
  T* target = reinterpret_cast<T*>(to);
  for (int i = 0; i < n; ++i) target[i * stride] = source[i];
}

void Scatter(const char* from, char* to, int64_t stride, int n, int64_t item_bytes) {
  if (stride == 1) {
    std::memcpy(to, from, n * item_bytes);
  } else if (item_bytes == 4) {
    Scatter<uint32_t>(from, to, stride, n);
  } else if (item_bytes == 2) {
    Scatter<uint16_t>(from, to, stride, n);
  } else if (item_bytes == 1) {
    Scatter<uint8_t>(from, to, stride, n);
  } else {
    Scatter<uint64_t>(from, to, stride, n);
  }
}

}  // namespace

Sweeper::Sweeper(DrawFn draw, const DrawCall& call, void* data, DType dtype)
    : draw_(draw), call_(call), data_(static_cast<char*>(data)), item_bytes_(SizeOf(dtype)) {}

void Sweeper::Window::Load() {
  begin = end = kNever;
  if (cursor.done() || cursor.begin() >= last) return;
  begin = std::max(cursor.begin(), first) - first;
  end = std::min(cursor.end(), last) - first;
}

void Sweeper::Fill(const Region& region, const RandomPlan& plan) {
  const int64_t low = region.first_g, high = region.last_g();
  for (const RandomSegment& s : plan.segments) {
    const int64_t begin = std::max(low, s.first) - s.first;
    const int64_t last = std::min(high, s.first + s.count - 1) - s.first;
    if (begin > last) continue;
    const int64_t sweep = s.threads * plan.unroll;
    for (int64_t k = begin / sweep; k <= last / sweep; ++k) Call(region, s, plan.unroll, k);
  }
}

void Sweeper::Call(const Region& region, const RandomSegment& segment, int unroll, int64_t number) {
  call_.block = segment.offset / 4 + static_cast<uint64_t>(number);
  const int64_t segment_end = segment.first + segment.count;
  absl::InlinedVector<Window, kMaxUnroll> windows;
  int64_t thread = kNever;
  for (int c = 0; c < unroll; ++c) {
    const int64_t first = segment.first + (number * unroll + c) * segment.threads;
    Window w{RunCursor(region), first, std::min(first + segment.threads, segment_end), 0, 0};
    w.cursor.Seek(first);
    w.Load();
    thread = std::min(thread, w.begin);
    windows.push_back(std::move(w));
  }
  const int64_t stride = region.run().local_stride;
  while (thread != kNever) {
    unsigned mask = 0;
    int64_t next = kNever;  // where the set of results to keep changes
    for (int c = 0; c < unroll; ++c) {
      const bool inside = windows[c].begin <= thread;
      mask |= static_cast<unsigned>(inside) << c;
      next = std::min(next, inside ? windows[c].end : windows[c].begin);
    }
    Emit(thread, next - thread, mask, windows.data(), stride);
    int64_t nearest = kNever;
    for (Window& w : windows) {
      if (w.end == next) {
        w.cursor.Next();
        w.Load();
      }
      nearest = std::min(nearest, w.begin);
    }
    thread = std::max(next, nearest);
  }
  Flush(stride);
}

void Sweeper::Emit(int64_t thread, int64_t n, unsigned mask, const Window* windows,
                   int64_t stride) {
  int64_t local[kMaxUnroll] = {};
  for (int c = 0; c < kMaxUnroll; ++c) {
    if (mask >> c & 1) local[c] = windows[c].cursor.Local(windows[c].first + thread);
  }
  if (n < kLongPiece || stride != 1) {
    AddToBatch(thread, n, mask, local, stride);
    return;
  }
  call_.threads = nullptr;
  call_.first_thread = static_cast<uint32_t>(thread);
  call_.n = n;
  for (int c = 0; c < kMaxUnroll; ++c) {
    call_.out[c] = mask >> c & 1 ? data_ + local[c] * item_bytes_ : nullptr;
  }
  draw_(call_);
}

void Sweeper::AddToBatch(int64_t thread, int64_t n, unsigned mask, const int64_t* local,
                         int64_t stride) {
  for (int64_t done = 0; done < n;) {
    if (lanes_ == kLanes) Flush(stride);
    const int count = static_cast<int>(std::min<int64_t>(n - done, kLanes - lanes_));
    Piece piece{lanes_, count, mask, {}};
    for (int c = 0; c < kMaxUnroll; ++c) piece.local[c] = local[c] + done * stride;
    for (int i = 0; i < count; ++i) {
      threads_[lanes_ + i] = static_cast<uint32_t>(thread + done + i);
    }
    pieces_.push_back(piece);
    lanes_ += count;
    done += count;
  }
}

void Sweeper::Flush(int64_t stride) {
  if (lanes_ == 0) return;
  unsigned used = 0;
  for (const Piece& p : pieces_) used |= p.mask;
  call_.threads = threads_;
  call_.n = lanes_;
  for (int c = 0; c < kMaxUnroll; ++c) call_.out[c] = used >> c & 1 ? results_[c] : nullptr;
  draw_(call_);
  for (const Piece& p : pieces_) {
    for (int c = 0; c < kMaxUnroll; ++c) {
      if (!(p.mask >> c & 1)) continue;
      Scatter(results_[c] + p.lane * item_bytes_, data_ + p.local[c] * item_bytes_, stride, p.n,
              item_bytes_);
    }
  }
  pieces_.clear();
  lanes_ = 0;
}

}  // namespace dtensor
