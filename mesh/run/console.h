// Console: the launcher's stdout and stderr, to which it and its processes print. Who reads them
// slowly, or not at all, holds up nobody: text waits here. Private to mesh/.
#pragma once

#include <poll.h>

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace dtensor::run {

class Console {
 public:
  enum Stream { kOut = 0, kErr = 1 };

  // Streams that are closed stay so: nothing that is opened later takes their numbers.
  Console();
  ~Console();
  Console(const Console&) = delete;

  // Never waits. What goes to stdout and stderr keeps its order where both are the same file.
  void Print(Stream to, absl::string_view text);
  // So much waits that processes are to wait with more.
  bool Full(Stream to) const;
  // What to poll for where something waits.
  void AddTo(std::vector<pollfd>* fds) const;
  // As much as is taken at once.
  void Write();
  // The launcher has been told to end: it waits for readers for a moment only, and processes, which
  // have to end too, for none.
  void Hurry() { hurry_ = true; }
  // Until all is written.
  void Flush();

  // A stream was a pipe that nobody reads any more.
  bool reader_gone() const { return reader_gone_; }
  // A stream could not be written for another reason.
  bool failed() const { return failed_; }

 private:
  struct Way {
    int fd = -1;
    const char* name = "";
    bool lost = false;  // what comes is dropped
    std::string text;   // what waits, from `begin`
    size_t begin = 0;
    bool waits() const { return begin < text.size(); }
  };
  Way& To(Stream to) { return ways_[one_ ? kOut : to]; }
  const Way& To(Stream to) const { return ways_[one_ ? kOut : to]; }
  void Write(Way& way);
  void Lose(Way& way, int error);

  Way ways_[2];
  bool one_ = false;  // both are one file: the first way
  bool hurry_ = false, reader_gone_ = false, failed_ = false;
};

}  // namespace dtensor::run
