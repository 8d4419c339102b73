// Template: the part of Jinja that chat templates are written in.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/parallel/io/json_fields.h"

namespace dtensor::text {

// Statements for (with if and else), if, elif, else, set; expressions of strings, whole numbers,
// lists, names, members, indices, slices, comparisons, and, or, not, in, is, +, -, ~, %, x if c
// else y, computed as far as they are needed; the filters and methods that ways of trimming need;
// all of `loop` but cycle, changed and depth; raise_exception and strftime_now (the local time). A
// block takes the line break after it and the blanks before it along, as in Hugging Face's library,
// and its functions are defined. What is not served is refused where it is come to, never passed
// over. Immutable.
class Template {
 public:
  //   Errors: Unimplemented naming what is not served; InvalidArgument for what is not closed.
  static absl::StatusOr<Template> Parse(absl::string_view source);
  // The text with the names that `context`, an object, gives.
  //   Errors: InvalidArgument with the message of raise_exception, and for values that do not fit;
  //   Unimplemented for what is not served and met first here; ResourceExhausted for too much work.
  absl::StatusOr<std::string> Render(const Json& context) const;

  struct Node;

 private:
  std::shared_ptr<const Node> root_;
};

}  // namespace dtensor::text
