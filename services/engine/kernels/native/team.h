// Members of a team take the pieces of one stage after another; who loses its core delays the others by one piece at most.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace headrace {

// Threads that go through the same stages. A stage is cut into pieces; each member has a queue of its own, so that it reads
// its weights as one stream, and takes from the others' when that is empty. Nobody waits for a member, only for pieces that a
// member has taken: one that sleeps between two pieces is not missed, and finds when it comes back that the others have done
// its share. Which member computes a piece changes nothing in it.
class Team {
 public:
  enum Queues { kEach, kShared };

  explicit Team(int members) : members_(members) {}

  int size() const { return static_cast<int>(members_.size()); }

  // The next stage of `member`: run(from, to) for pieces of 0 .. count of up to `grain`, until all are taken; returns when
  // all are done. Every member calls it with the same numbers. kShared: one queue for all, in order.
  template <class Run>
  void stage(int member, int64_t count, int64_t grain, Queues queues, Run&& run) {
    enter(member);
    for (Piece piece; take(member, count, grain, queues, piece);) run(piece.from, piece.to);
    leave(member);
  }

 private:
  struct Piece {
    int64_t from = 0, to = 0;
  };

  struct alignas(64) Member {
    std::atomic<uint32_t> state{0};             // odd while it may hold a piece; two more each stage
    alignas(64) std::atomic<uint64_t> next{0};  // of its queue: odd state of the stage << 32 | pieces taken
    std::chrono::steady_clock::time_point yield_at{};
  };

  void enter(int member);
  bool take(int member, int64_t count, int64_t grain, Queues queues, Piece& piece);
  void leave(int member);
  void give_way(Member& self);
  void wait_for(const std::atomic<uint32_t>& state, uint32_t busy);

  std::vector<Member> members_;
};

}  // namespace headrace
