// Two ranks with a GPU each, whose 65th calls differ in size: the hosts have stopped to compare,
// NCCL finds it. Prints what the ranks are told; the stand-in says its part.
#include <cstdio>
#include <string>

#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"

int main() {
  using namespace dtensor;
  const absl::Status status =
      RunSpmd(2,
              [](RankContext& context) -> absl::Status {
                DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
                const Tensor t = ValueOrThrow(Tensor::Empty({8}, DType::kI32, DeviceType::kCuda));
                Fill(t, 1);
                for (int i = 0; i < 64; ++i) {
                  DT_RETURN_IF_ERROR(comm->AllReduce(t, t, ReduceOp::kMax).Wait());
                }
                const Tensor part = t.Slice(0, 0, comm->index() == 0 ? 8 : 5);
                DT_RETURN_IF_ERROR(comm->AllReduce(part, part, ReduceOp::kMax).Wait());
                t.ToVector<double>();
                while (comm->Health().ok()) {  // it may have read before it was told
                }
                return comm->Health();
              },
              {.timeout = absl::Seconds(20), .device = DeviceType::kCuda});
  std::printf("told: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 1 : 0;
}
