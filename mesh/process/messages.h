// What a plugin for messages between processes gives: one function, dtensor_messages, which returns
// this table. C only, so that plugins are built without this library and this library without them:
// mesh/mpi has that of MPI, mesh/gloo that of gloo. Everything above single messages (groups,
// collectives, agreement, deadlines, aborts) is in mesh/process.
#pragma once

#include <stddef.h>
#include <stdint.h>

// Another number: another table. Fields are only ever appended; struct_size says how many there
// are.
#define DT_MESSAGES_ABI 1

// Where the processes of a launch meet, for a library whose processes do not find each other.
typedef struct DtMeeting {
  int64_t rank, size;
  const char* address;  // of this process, as the others reach it: "127.0.0.1"
  int64_t timeout_ms;   // of every wait
  // Small texts that all share. `get` waits until somebody has set the key, writes at most so many
  // bytes of its value and says how many it has. Both return 0, or not 0 and write why.
  void* store;
  int (*set)(void* store, const char* key, const void* data, int64_t bytes, char* why,
             size_t why_size);
  int (*get)(void* store, const char* key, void* data, int64_t most, int64_t* bytes, char* why,
             size_t why_size);
} DtMeeting;

typedef struct DtMessages {
  uint32_t struct_size, abi;
  // "Open MPI v4.1.4, ...": which library does it.
  const char* (*library)(void);
  // Once per process, and alike in all of them. All functions return 0, or not 0 and write why.
  int (*open)(int64_t* rank, int64_t* size, char* why, size_t why_size);
  // The largest channel; stands once `open` has returned.
  int64_t most_channels;
  // Starts to send `bytes` bytes to another rank, or to receive at most so many. Of one sender, to
  // one receiver, over one channel, messages arrive in order. `data` stays the message's until
  // `test` says that it is done. Called by one thread at a time. After an error *request may not be
  // null: some of it was started, and is to be forgotten.
  int (*send)(int64_t peer, int64_t channel, const void* data, int64_t bytes, void** request,
              char* why, size_t why_size);
  int (*recv)(int64_t peer, int64_t channel, void* data, int64_t bytes, void** request, char* why,
              size_t why_size);
  // Whether it is done; waits for nobody. What is done is gone: *request is null then.
  int (*test)(void** request, int* done, char* why, size_t why_size);
  // Nobody waits for it any more. Its memory may still be used: keep it.
  void (*forget)(void** request);
  // Once all ranks are through with everything.
  void (*close)(void);
  // Called instead of `open` where it is not null.
  int (*meet)(const DtMeeting* meeting, char* why, size_t why_size);
  // Sleeps until `test` has something to say of it, at most for so long. May be called beside any
  // other function, of other requests. Null where nothing moves unless `test` is called.
  void (*wait)(void* request, int64_t microseconds);
} DtMessages;

typedef const DtMessages* (*DtMessagesEntry)(void);
#define DT_MESSAGES_ENTRY "dtensor_messages"
