#include "dtensor/ops/cpu/trig_table.h"

#include "dtensor/ops/cpu/make_trig_table.h"

namespace dtensor {

constinit const TrigTable kTrigTable = MakeTrigTable();

}  // namespace dtensor
