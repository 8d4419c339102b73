// What is known of every op, on stdout.
//
//   dtensor-ops --catalog       docs/reference/ops.md
//   dtensor-ops --strategies    the golden file of derived strategies
#include <cstdio>
#include <string>

#include "dtensor/mesh/program.h"
#include "dtensor/tensor/status.h"
#include "examples/op_catalog.h"

int main(int argc, char** argv) {
  return dtensor::RunProgram([&]() -> absl::Status {
    const std::string what = argc == 2 ? argv[1] : "";
    if (what != "--catalog" && what != "--strategies") {
      return absl::InvalidArgumentError("usage: dtensor-ops --catalog | --strategies");
    }
    DT_ASSIGN_OR_RETURN(const std::string text,
                        what == "--catalog" ? dtensor::OpCatalog() : dtensor::DerivedStrategies());
    std::fputs(text.c_str(), stdout);
    return absl::OkStatus();
  });
}
