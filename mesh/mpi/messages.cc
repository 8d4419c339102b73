// DtMessages over MPI.
#include "dtensor/mesh/process/messages.h"

#define OMPI_SKIP_MPICXX 1  // the C interface only
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace {

MPI_Comm world = MPI_COMM_NULL;  // ours: other users of MPI in the process do not meet us

DtMessages table;

constexpr int64_t kMostAtOnce = int64_t{1} << 30;  // MPI counts in int

int Failed(int code, const char* what, char* why, size_t why_size) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int size = 0;
  MPI_Error_string(code, text, &size);
  snprintf(why, why_size, "%s: %s", what, text);
  return 1;
}

// One message: nearly always of one part.
struct Request {
  MPI_Request first = MPI_REQUEST_NULL;
  std::vector<MPI_Request> rest;
};

bool finalize = false;          // whoever started MPI ends it
std::atomic<bool> over{false};  // it has been ended, by the program

// An attribute of MPI_COMM_SELF goes first of all when MPI ends.
int NoteEnd(MPI_Comm, int, void*, void*) {
  over.store(true);
  return MPI_SUCCESS;
}

int Over(char* why, size_t why_size) {
  snprintf(why, why_size, "the program has called MPI_Finalize");
  return 1;
}

// What a call says first carries up to 16 KiB of data (mesh/process/backend.cc). On one machine
// Open MPI sends 4 KiB without asking whether it may, which takes another way there and back; here
// as much as we send. And it listens for connections that none of us makes, at which a stranger can
// hold up the start of all: here it does not. What the environment says holds. Read by MPI_Init; of
// its versions 4 and 5.
void SetUpOneMachine() {
#ifdef OPEN_MPI
  setenv("OMPI_MCA_btl_vader_eager_limit", "20480", /*overwrite=*/0);
  setenv("OMPI_MCA_btl_sm_eager_limit", "20480", /*overwrite=*/0);
  const char *all = std::getenv("OMPI_COMM_WORLD_SIZE"),
             *here = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  if (all != nullptr && here != nullptr && std::strcmp(all, here) == 0) {
    setenv("OMPI_MCA_btl", OMPI_MAJOR_VERSION < 5 ? "self,vader" : "self,sm", /*overwrite=*/0);
  }
#endif
}

const char* Library() {
  static char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int size = 0;
  if (text[0] == '\0') MPI_Get_library_version(text, &size);
  return text;
}

// Where MPI cannot start it says so and ends the program itself: nobody can ask it not to before.
int Open(int64_t* rank, int64_t* size, char* why, size_t why_size) {
  int is = 0, provided = 0, value = 0;
  MPI_Finalized(&is);
  if (is) return Over(why, why_size);
  MPI_Initialized(&is);
  int code = MPI_SUCCESS;
  if (is) {
    code = MPI_Query_thread(&provided);
  } else {
    SetUpOneMachine();
    code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
    finalize = code == MPI_SUCCESS;
  }
  if (code != MPI_SUCCESS) return Failed(code, "MPI_Init_thread", why, why_size);
  if (provided < MPI_THREAD_SERIALIZED) {
    snprintf(why, why_size,
             "it serves one thread only: whoever calls MPI_Init has to call MPI_Init_thread with "
             "MPI_THREAD_SERIALIZED or more");
    return 1;
  }
  code = MPI_Comm_dup(MPI_COMM_WORLD, &world);
  if (code != MPI_SUCCESS) return Failed(code, "MPI_Comm_dup", why, why_size);
  MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN);
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, NoteEnd, &value, nullptr);
  MPI_Comm_set_attr(MPI_COMM_SELF, value, nullptr);
  int* most = nullptr;  // 32,767 at least
  MPI_Comm_get_attr(world, MPI_TAG_UB, &most, &is);
  table.most_channels = is ? *most : 32767;
  MPI_Comm_rank(world, &value);
  *rank = value;
  MPI_Comm_size(world, &value);
  *size = value;
  return 0;
}

// Calls start(at, bytes, request) for the parts of a message.
template <class Start>
int InParts(int64_t bytes, Start start, const char* what, void** request, char* why,
            size_t why_size) {
  if (over.load(std::memory_order_relaxed)) return Over(why, why_size);
  auto* message = new Request;
  *request = message;
  int code = start(0, static_cast<int>(std::min(bytes, kMostAtOnce)), &message->first);
  for (int64_t at = kMostAtOnce; code == MPI_SUCCESS && at < bytes; at += kMostAtOnce) {
    message->rest.push_back(MPI_REQUEST_NULL);
    code = start(at, static_cast<int>(std::min(bytes - at, kMostAtOnce)), &message->rest.back());
  }
  return code == MPI_SUCCESS ? 0 : Failed(code, what, why, why_size);
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
  if (over.load(std::memory_order_relaxed)) return Over(why, why_size);
  auto* message = static_cast<Request*>(*request);
  int code = MPI_Test(&message->first, done, MPI_STATUS_IGNORE);
  if (code == MPI_SUCCESS && *done && !message->rest.empty()) {
    code = MPI_Testall(static_cast<int>(message->rest.size()), message->rest.data(), done,
                       MPI_STATUSES_IGNORE);
  }
  if (code != MPI_SUCCESS) return Failed(code, "MPI_Test", why, why_size);
  if (*done) {
    delete message;
    *request = nullptr;
  }
  return 0;
}

// A receive that has met no message yet will meet none.
void Forget(void** request) {
  auto* message = static_cast<Request*>(*request);
  if (over.load()) {
    *request = nullptr;
    return;
  }
  message->rest.push_back(message->first);
  for (MPI_Request& part : message->rest) {
    if (part == MPI_REQUEST_NULL) continue;
    MPI_Cancel(&part);
    MPI_Request_free(&part);
  }
  delete message;
  *request = nullptr;
}

void Close() {
  int is = 0;
  MPI_Finalized(&is);
  if (!is && finalize) MPI_Finalize();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const DtMessages* dtensor_messages(void) {
  if (table.struct_size == 0) {
    table = {sizeof(DtMessages),
             DT_MESSAGES_ABI,
             Library,
             Open,
             /*most_channels=*/0,
             Send,
             Recv,
             Test,
             Forget,
             Close,
             /*meet=*/nullptr,
             /*wait=*/nullptr};
  }
  return &table;
}
