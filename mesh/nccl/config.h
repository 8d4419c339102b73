// What the environment says of NCCL's communicators, by group. Private to mesh/.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/nccl/api.h"

namespace dtensor::nccl {

// What DTENSOR_NCCL_CONFIG says of the group with this label: "dp:max_ctas=4,min_ctas=1;
// *:cga_cluster_size=2", where * is every group and later entries go over earlier ones. Options:
// cga_cluster_size, min_ctas, max_ctas (numbers), net_name (a text).
//   Errors: InvalidArgument naming the entry and what is known.
absl::StatusOr<Config> ConfigOf(absl::string_view label);

// Whether all calls are compared before they begin: DTENSOR_CHECK=each. Errors: InvalidArgument for
// another value.
absl::StatusOr<bool> ChecksEach();

}  // namespace dtensor::nccl
