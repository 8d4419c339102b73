// Runs a program as a user does and keeps what it printed.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <string>

namespace dtensor::testing {

struct Outcome {
  int code = -1;     // exit status; -1: it did not start or was killed
  std::string text;  // stdout and stderr
};

inline Outcome RunProgram(const std::string& program, const std::string& args) {
  Outcome o;
  FILE* pipe = popen((program + " " + args + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return o;
  char buffer[4096];
  while (const size_t n = fread(buffer, 1, sizeof(buffer), pipe)) o.text.append(buffer, n);
  const int status = pclose(pipe);
  o.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return o;
}

// How many times a text has a part.
inline int Count(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace dtensor::testing
