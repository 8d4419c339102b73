#include "dtensor/mesh/strided.h"

#include <algorithm>
#include <cstring>

#include "dtensor/tensor/next_index.h"

namespace dtensor {
namespace {

template <class T>
void CopyRun(char* element, int64_t stride, char* array, int64_t n, bool pack) {
  T* e = reinterpret_cast<T*>(element);
  T* a = reinterpret_cast<T*>(array);
  if (pack) {
    for (int64_t i = 0; i < n; ++i) a[i] = e[i * stride];
  } else {
    for (int64_t i = 0; i < n; ++i) e[i * stride] = a[i];
  }
}

void MoveRun(char* element, int64_t stride, char* array, int64_t n, int64_t size, bool pack) {
  if (stride == 1) {
    memcpy(pack ? array : element, pack ? element : array, n * size);
    return;
  }
  switch (size) {
    case 1:
      return CopyRun<uint8_t>(element, stride, array, n, pack);
    case 2:
      return CopyRun<uint16_t>(element, stride, array, n, pack);
    case 4:
      return CopyRun<uint32_t>(element, stride, array, n, pack);
    default:
      return CopyRun<uint64_t>(element, stride, array, n, pack);
  }
}

void Move(const Tensor& tensor, int64_t start, int64_t count, char* array, bool pack) {
  if (count == 0) return;
  const int64_t size = SizeOf(tensor.dtype());
  char* base = static_cast<char*>(tensor.data());
  if (tensor.is_contiguous()) return MoveRun(base + start * size, 1, array, count, size, pack);
  const int last = tensor.ndim() - 1;  // a 0-dim tensor is contiguous
  const int64_t step = tensor.strides()[last];
  Dims row(last);                                         // index of the row
  int64_t first = start % tensor.size(last), offset = 0;  // in the row; of the row
  int64_t rest = start / tensor.size(last);
  for (int d = last - 1; d >= 0; --d) {
    row[d] = rest % tensor.size(d);
    rest /= tensor.size(d);
    offset += row[d] * tensor.strides()[d];
  }
  do {
    const int64_t run = std::min(count, tensor.size(last) - first);
    MoveRun(base + (offset + first * step) * size, step, array, run, size, pack);
    array += run * size;
    count -= run;
    first = 0;
  } while (count > 0 && NextIndex(
                            row, [&](size_t d) { return tensor.size(static_cast<int>(d)); },
                            [&](size_t d, int64_t by) { offset += by * tensor.strides()[d]; }));
}

}  // namespace

void Pack(const Tensor& tensor, int64_t start, int64_t count, void* array) {
  Move(tensor, start, count, static_cast<char*>(array), true);
}

void Unpack(const void* array, int64_t start, int64_t count, const Tensor& tensor) {
  // Move only reads the array when it does not pack.
  Move(tensor, start, count, const_cast<char*>(static_cast<const char*>(array)), false);
}

}  // namespace dtensor
