#include "dtensor/rng/sweep.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "dtensor/tensor/status.h"

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

Sweeper::Sweeper(DrawFn draw, const DrawCall& call, void* data, int64_t item_bytes)
    : draw_(draw), call_(call), data_(static_cast<char*>(data)), item_bytes_(item_bytes) {}

void Sweeper::Window::Load() {
  begin = end = kNever;
  if (cursor.done() || cursor.begin() >= last) return;
  begin = std::max(cursor.begin(), first) - first;
  end = std::min(cursor.end(), last) - first;
}

void Sweeper::Fill(const RunBox& box, const RandomPlan& plan) {
  const int64_t low = box.first_g, high = box.last_g();
  for (const RandomSegment& s : plan.segments) {
    const int64_t begin = std::max(low, s.first) - s.first;
    const int64_t last = std::min(high, s.first + s.count - 1) - s.first;
    if (begin > last) continue;
    const int64_t sweep = s.threads * plan.unroll;
    for (int64_t k = begin / sweep; k <= last / sweep; ++k) {
      call_.block = s.offset / 4 + static_cast<uint64_t>(k * plan.blocks);
      Call(box, s, plan.unroll, k);
    }
  }
}

int64_t Sweeper::Window::Periods(int64_t thread, int64_t period) const {
  if (begin == kNever) return kNever;
  if (begin >= thread + period) return (begin - thread) / period;  // empty until then
  if (begin > thread && end > thread + period) return 0;  // not in the next period's beginning
  return std::min(cursor.left() - 1, (last - first - thread) / period - 1);
}

void Sweeper::Call(const RunBox& box, const RandomSegment& segment, int unroll, int64_t number) {
  const int64_t segment_end = segment.first + segment.count;
  Windows windows;
  int64_t thread = kNever;
  for (int c = 0; c < unroll; ++c) {
    const int64_t first = segment.first + (number * unroll + c) * segment.threads;
    Window w{RunCursor(box), first, std::min(first + segment.threads, segment_end), 0, 0};
    w.cursor.Seek(first);
    w.Load();
    thread = std::min(thread, w.begin);
    windows.push_back(std::move(w));
  }
  stride_ = box.run().local_stride;
  while (thread != kNever) {
    const int64_t behind = WalkPeriods(&windows, thread);
    // One piece where no period was found: the next place to look is close.
    thread = behind != thread ? behind : Walk(&windows, thread, thread + 1, nullptr);
  }
  Flush();
}

int64_t Sweeper::Walk(Windows* windows, int64_t thread, int64_t limit,
                      std::vector<Stretch>* pattern) {
  while (thread < limit) {
    Stretch piece{thread, 0, 0, {}};
    int64_t next = pattern ? limit : kNever;  // where the set of results to keep changes
    for (size_t c = 0; c < windows->size(); ++c) {
      const Window& w = (*windows)[c];
      const bool inside = w.begin <= thread;
      next = std::min(next, inside ? w.end : w.begin);
      if (!inside) continue;
      piece.mask |= 1u << c;
      piece.local[c] = w.cursor.LocalAt(w.first + thread);
    }
    piece.n = next - thread;
    Emit(piece);
    if (pattern) pattern->push_back(piece);
    int64_t nearest = kNever;
    for (Window& w : *windows) {
      if (w.end == next) {
        w.cursor.Next();
        w.Load();
      }
      nearest = std::min(nearest, w.begin);
    }
    thread = std::max(next, nearest);
  }
  return thread;
}

int64_t Sweeper::WalkPeriods(Windows* windows, int64_t thread) {
  if (windows->front().cursor.single()) return thread;
  const RunDim row = windows->front().cursor.row();
  const int64_t period = row.g_stride;
  int64_t periods = kNever;
  for (const Window& w : *windows) periods = std::min(periods, w.Periods(thread, period));
  if (periods < 2) return thread;
  absl::InlinedVector<bool, kMaxUnroll> active;
  for (const Window& w : *windows) active.push_back(w.begin < thread + period);
  pattern_.clear();
  Walk(windows, thread, thread + period, &pattern_);
  const bool comb = pattern_.size() == 1 && stride_ == 1 && pattern_[0].n % kRunUnit == 0 &&
                    row.local_stride == pattern_[0].n;
  if (comb) EmitRuns(pattern_[0], period, periods - 1);
  for (int64_t r = 1; r < periods && !comb; ++r) {
    for (Stretch& p : pattern_) {
      p.thread += period;
      for (int64_t& local : p.local) local += row.local_stride;
      Emit(p);
    }
  }
  int64_t nearest = kNever;
  for (size_t c = 0; c < windows->size(); ++c) {
    Window& w = (*windows)[c];
    if (active[c]) {
      w.cursor.Skip(periods - 1);
      w.Load();
    }
    nearest = std::min(nearest, w.begin);
  }
  return nearest == kNever ? kNever : std::max(thread + periods * period, nearest);
}

void Sweeper::Emit(const Stretch& piece) {
  if (piece.n < kLongPiece || stride_ != 1) return AddToBatch(piece);
  DrawTo(piece, piece.n);
}

void Sweeper::EmitRuns(Stretch piece, int64_t period, int64_t runs) {
  piece.thread += period;
  for (int64_t& local : piece.local) local += piece.n;
  call_.run = piece.n;
  call_.run_step = static_cast<uint32_t>(period);
  DrawTo(piece, piece.n * runs);
  call_.run = 0;
}

void Sweeper::DrawTo(const Stretch& piece, int64_t n) {
  call_.threads = nullptr;
  call_.first_thread = static_cast<uint32_t>(piece.thread);
  call_.n = n;
  for (int c = 0; c < kMaxUnroll; ++c) {
    call_.out[c] = piece.mask >> c & 1 ? data_ + piece.local[c] * item_bytes_ : nullptr;
  }
  draw_(call_);
}

void Sweeper::AddToBatch(Stretch piece) {
  while (piece.n > 0) {
    if (lanes_ == kLanes) Flush();
    const int64_t n = std::min<int64_t>(piece.n, kLanes - lanes_);
    const auto thread = static_cast<uint32_t>(piece.thread);
    for (int64_t i = 0; i < n; ++i) threads_[lanes_ + i] = thread + static_cast<uint32_t>(i);
    // Joined with the one before where its results go on: then nothing need be moved.
    bool joins = !pieces_.empty() && pieces_.back().mask == piece.mask;
    for (int c = 0; c < kMaxUnroll && joins; ++c) {
      joins = !(piece.mask >> c & 1) ||
              pieces_.back().local[c] + pieces_.back().n * stride_ == piece.local[c];
    }
    if (joins) {
      pieces_.back().n += n;
    } else {
      pieces_.push_back({0, n, piece.mask, piece.local});
    }
    lanes_ += static_cast<int>(n);
    piece.thread += n;
    piece.n -= n;
    for (int64_t& local : piece.local) local += n * stride_;
  }
}

void Sweeper::Flush() {
  if (lanes_ == 0) return;
  unsigned used = 0;
  for (const Stretch& p : pieces_) used |= p.mask;
  const bool in_place = pieces_.size() == 1 && stride_ == 1;
  call_.threads = threads_;
  call_.n = lanes_;
  for (int c = 0; c < kMaxUnroll; ++c) {
    char* const target = in_place ? data_ + pieces_[0].local[c] * item_bytes_ : results_[c];
    call_.out[c] = used >> c & 1 ? target : nullptr;
  }
  draw_(call_);
  int64_t lane = 0;
  for (const Stretch& p : pieces_) {
    for (int c = 0; c < kMaxUnroll && !in_place; ++c) {
      if (!(p.mask >> c & 1)) continue;
      Scatter(results_[c] + lane * item_bytes_, data_ + p.local[c] * item_bytes_, stride_,
              static_cast<int>(p.n), item_bytes_);
    }
    lane += p.n;
  }
  pieces_.clear();
  lanes_ = 0;
}

}  // namespace dtensor
