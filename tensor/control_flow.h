#pragma once

namespace dtensor {

// Base of exceptions that are no errors: one ends a function early, and somebody further out waits
// for it. What turns exceptions into errors lets it pass.
struct ControlFlow {};

}  // namespace dtensor
