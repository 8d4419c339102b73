// Free blocks of an allocator by size class. The owner's thread takes and gives back without a
// lock; other threads give back to a list of their own, which the owner collects.
#pragma once

#include <atomic>
#include <thread>
#include <utility>

#include "dtensor/tensor/size_class.h"

namespace dtensor {

// `Node` has size_class and next. Made by the owner's thread; all but Give is for that one, and for
// who destroys the allocator when no one else knows it any more.
template <class Node>
class FreeLists {
 public:
  void Give(Node* node) {
    if (std::this_thread::get_id() == owner_) {
      Push(node);
      return;
    }
    node->next = remote_.load(std::memory_order_relaxed);
    while (!remote_.compare_exchange_weak(node->next, node, std::memory_order_release,
                                          std::memory_order_relaxed)) {
    }
  }
  // Null where there is none.
  Node* Take(int size_class) {
    if (remote_.load(std::memory_order_relaxed) != nullptr) Collect();
    Node* const node = free_[size_class];
    if (node != nullptr) free_[size_class] = node->next;
    return node;
  }

 private:
  void Collect() {
    Node* node = remote_.exchange(nullptr, std::memory_order_acquire);
    while (node != nullptr) Push(std::exchange(node, node->next));
  }
  void Push(Node* node) { node->next = std::exchange(free_[node->size_class], node); }

  const std::thread::id owner_ = std::this_thread::get_id();
  Node* free_[kNumSizeClasses] = {};
  std::atomic<Node*> remote_{nullptr};  // given back by other threads
};

}  // namespace dtensor
