// DtMessages over MPI.
#include "dtensor/mesh/process/messages.h"

#define OMPI_SKIP_MPICXX 1  // the C interface only
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

namespace {

MPI_Comm world = MPI_COMM_NULL;  // ours: other users of MPI in the process do not meet us

constexpr int64_t kMostAtOnce = int64_t{1} << 30;  // MPI counts in int

int Failed(int code, const char* what, char* why, size_t why_size) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int size = 0;
  MPI_Error_string(code, text, &size);
  snprintf(why, why_size, "%s: %s", what, text);
  return 1;
}

// The parts of one message.
struct Request {
  std::vector<MPI_Request> parts;
};

const char* Library() {
  static char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int size = 0;
  if (text[0] == '\0') MPI_Get_library_version(text, &size);
  return text;
}

int Open(int64_t* rank, int64_t* size, char* why, size_t why_size) {
  int is = 0, provided = 0, value = 0;
  MPI_Initialized(&is);
  int code = MPI_SUCCESS;
  if (is) {
    code = MPI_Query_thread(&provided);
  } else {
    code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  }
  if (code != MPI_SUCCESS) return Failed(code, "MPI_Init_thread", why, why_size);
  if (provided < MPI_THREAD_SERIALIZED) {
    snprintf(why, why_size, "it serves one thread only (no MPI_THREAD_SERIALIZED)");
    return 1;
  }
  code = MPI_Comm_dup(MPI_COMM_WORLD, &world);
  if (code != MPI_SUCCESS) return Failed(code, "MPI_Comm_dup", why, why_size);
  MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN);
  MPI_Comm_rank(world, &value);
  *rank = value;
  MPI_Comm_size(world, &value);
  *size = value;
  return 0;
}

// Calls start(part, bytes, request) for the parts of a message.
template <class Start>
int InParts(int64_t bytes, Start start, const char* what, void** request, char* why,
            size_t why_size) {
  auto parts = std::make_unique<Request>();
  int64_t at = 0;
  do {
    const int64_t n = std::min(bytes - at, kMostAtOnce);
    parts->parts.push_back(MPI_REQUEST_NULL);
    const int code = start(at, static_cast<int>(n), &parts->parts.back());
    if (code != MPI_SUCCESS) return Failed(code, what, why, why_size);
    at += n;
  } while (at < bytes);
  *request = parts.release();
  return 0;
}

int Send(int64_t peer, int64_t channel, const void* data, int64_t bytes, void** request, char* why,
         size_t why_size) {
  return InParts(
      bytes,
      [&](int64_t at, int n, MPI_Request* part) {
        return MPI_Isend(static_cast<const char*>(data) + at, n, MPI_BYTE, static_cast<int>(peer),
                         static_cast<int>(channel), world, part);
      },
      "MPI_Isend", request, why, why_size);
}

int Recv(int64_t peer, int64_t channel, void* data, int64_t bytes, void** request, char* why,
         size_t why_size) {
  return InParts(
      bytes,
      [&](int64_t at, int n, MPI_Request* part) {
        return MPI_Irecv(static_cast<char*>(data) + at, n, MPI_BYTE, static_cast<int>(peer),
                         static_cast<int>(channel), world, part);
      },
      "MPI_Irecv", request, why, why_size);
}

int Test(void** request, int* done, char* why, size_t why_size) {
  auto* parts = static_cast<Request*>(*request);
  const int code = MPI_Testall(static_cast<int>(parts->parts.size()), parts->parts.data(), done,
                               MPI_STATUSES_IGNORE);
  if (code != MPI_SUCCESS) return Failed(code, "MPI_Testall", why, why_size);
  if (*done) {
    delete parts;
    *request = nullptr;
  }
  return 0;
}

// A receive that has met no message yet will meet none.
void Forget(void** request) {
  auto* parts = static_cast<Request*>(*request);
  for (MPI_Request& part : parts->parts) {
    if (part == MPI_REQUEST_NULL) continue;
    MPI_Cancel(&part);
    MPI_Request_free(&part);
  }
  delete parts;
  *request = nullptr;
}

void Close() {
  int is = 0;
  MPI_Finalized(&is);
  if (!is) MPI_Finalize();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const DtMessages* dtensor_messages(void) {
  // Open MPI and MPICH promise 32,767 at least, and have millions; asked once MPI is there.
  static DtMessages table = {sizeof(DtMessages),
                             DT_MESSAGES_ABI,
                             Library,
                             Open,
                             int64_t{1} << 22,
                             Send,
                             Recv,
                             Test,
                             Forget,
                             Close,
                             /*meet=*/nullptr};
  return &table;
}
