#include "dtensor/distributed_tensor.h"

namespace dtensor {

Values& Values::Add(absl::string_view name, DTensor value) {
  names_.resize(size());
  names_.emplace_back(name);
  push_back(std::move(value));
  return *this;
}
absl::string_view Values::name(size_t position) const {
  return position < names_.size() ? absl::string_view(names_[position]) : "";
}
DTensor Values::Named(absl::string_view name, size_t position) const {
  for (size_t i = 0; i < size() && i < names_.size(); ++i) {
    if (!name.empty() && names_[i] == name) return (*this)[i];
  }
  return position < size() && this->name(position).empty() ? (*this)[position] : DTensor();
}

}  // namespace dtensor
