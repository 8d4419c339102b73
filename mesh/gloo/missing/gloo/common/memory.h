// What gloo's headers include and Debian's package lacks: names only. Our plugin makes none of
// these and looks at nothing that lies behind one.
#pragma once

namespace gloo {

template <class T>
class NonOwningPtr;

template <class T>
class WeakNonOwningPtr {
 public:
  template <class From>
  explicit WeakNonOwningPtr(const From& from);
};

template <class T>
class ShareableNonOwningPtr {
  void* opaque_;
};

}  // namespace gloo
