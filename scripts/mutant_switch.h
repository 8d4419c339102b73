// Part of scripts/mutate_source: included before everything in a tree whose mutants have switches.
// A mutant's number stands in DT_MUTANT; a process notes in the file DT_MUTANTS_REACHED, a byte for
// each mutant, which it came by. An operator is switched by a value between its operands:
// `a + Plus<7>{} + b` is a + b, or a - b where 7 is on.
#pragma once

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace dt_mutant {

struct State {
  int on = -1;
  int size = 0;
  unsigned char* reached = nullptr;
};

inline State Make() {
  State state;
  if (const char* number = getenv("DT_MUTANT")) state.on = atoi(number);
  const char* path = getenv("DT_MUTANTS_REACHED");
  const int file = path == nullptr ? -1 : open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return state;
  struct stat about;
  if (fstat(file, &about) == 0 && about.st_size > 0) {
    void* bytes = mmap(nullptr, static_cast<size_t>(about.st_size), PROT_READ | PROT_WRITE,
                       MAP_SHARED, file, 0);
    if (bytes != MAP_FAILED) {
      state.reached = static_cast<unsigned char*>(bytes);
      state.size = static_cast<int>(about.st_size);
    }
  }
  close(file);
  return state;
}

// Whether a mutant acts in this process.
inline bool On(int number) {
  static const State state = Make();
  if (number < state.size && __atomic_load_n(state.reached + number, __ATOMIC_RELAXED) == 0) {
    __atomic_store_n(state.reached + number, 1, __ATOMIC_RELAXED);
  }
  return number == state.on;
}

#define DT_MUTANT_OPERATOR(Name, op, other)                                    \
  template <int number>                                                        \
  struct Name {};                                                              \
  template <class A, int number>                                               \
  struct Name##Of {                                                            \
    const A& a;                                                                \
  };                                                                           \
  template <class A, int number>                                               \
  Name##Of<A, number> operator op(const A& a, Name<number>) {                  \
    return {a};                                                                \
  }                                                                            \
  template <class A, int number, class B>                                      \
  auto operator op(Name##Of<A, number> left, const B& b) {                     \
    return On(number) ? left.a other b : left.a op b;                          \
  }

DT_MUTANT_OPERATOR(Plus, +, -)
DT_MUTANT_OPERATOR(Minus, -, +)
DT_MUTANT_OPERATOR(Times, *, +)
DT_MUTANT_OPERATOR(Over, /, *)
DT_MUTANT_OPERATOR(Modulo, %, /)
DT_MUTANT_OPERATOR(Equal, ==, !=)
DT_MUTANT_OPERATOR(Unequal, !=, ==)
DT_MUTANT_OPERATOR(Less, <, <=)
DT_MUTANT_OPERATOR(LessEqual, <=, <)
DT_MUTANT_OPERATOR(Greater, >, >=)
DT_MUTANT_OPERATOR(GreaterEqual, >=, >)
DT_MUTANT_OPERATOR(And, &, |)
DT_MUTANT_OPERATOR(Or, |, &)
DT_MUTANT_OPERATOR(Left, <<, >>)
DT_MUTANT_OPERATOR(Right, >>, <<)

#define DT_MUTANT_ASSIGNMENT(Name, op, other)                                  \
  template <int number>                                                        \
  struct Name {};                                                              \
  template <class B, int number>                                               \
  struct Name##Of {                                                            \
    const B& b;                                                                \
  };                                                                           \
  template <int number, class B>                                               \
  Name##Of<B, number> operator op(Name<number>, const B& b) {                  \
    return {b};                                                                \
  }                                                                            \
  template <class A, class B, int number>                                      \
  A& operator op(A& a, Name##Of<B, number> right) {                            \
    if (On(number)) {                                                          \
      a other right.b;                                                         \
    } else {                                                                   \
      a op right.b;                                                            \
    }                                                                          \
    return a;                                                                  \
  }

DT_MUTANT_ASSIGNMENT(Add, +=, -=)
DT_MUTANT_ASSIGNMENT(Subtract, -=, +=)

template <int number>
struct Not {};

template <int number, class B>
bool operator->*(Not<number>, const B& b) {
  return On(number) ? static_cast<bool>(b) : !b;
}

}  // namespace dt_mutant
