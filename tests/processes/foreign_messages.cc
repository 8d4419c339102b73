// A plugin of another MPI than Open MPI, for processes_test.cc: it can say what it is, and no more.
#include <cstdio>

#include "dtensor/mesh/process/messages.h"

extern "C" const DtMessages* dtensor_messages() {
  static DtMessages table = {};
  table.struct_size = sizeof(DtMessages);
  table.abi = DT_MESSAGES_ABI;
  table.library = [] { return "MPICH Version:\t4.0.2\nMPICH Release date:\tThu Apr  7 2022"; };
  table.open = [](int64_t*, int64_t*, char* why, size_t why_size) {
    std::snprintf(why, why_size, "it was opened");
    return 1;
  };
  return &table;
}
