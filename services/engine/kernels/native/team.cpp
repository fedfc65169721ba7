// How members of a team take pieces, wait and give way.
#include "team.h"

#include <sched.h>

namespace headrace {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 500, kYields = 20;  // 7 us, and the time of who else wants the core
constexpr auto kTurn = std::chrono::microseconds(250);

}  // namespace

void Team::enter(int member) {
  std::atomic<uint32_t>& state = members_[member].state;
  state.store(state.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);  // told by the first piece taken
}

bool Team::take(int member, int64_t count, int64_t grain, Queues queues, Piece& piece) {
  const int64_t queue_count = queues == kShared ? 1 : size();
  const uint64_t stage = members_[member].state.load(std::memory_order_relaxed);
  for (int64_t i = 0; i < queue_count; ++i) {
    const int64_t queue = (member + i) % queue_count;
    const int64_t begin = count * queue / queue_count, end = count * (queue + 1) / queue_count;
    std::atomic<uint64_t>& next = members_[queue].next;
    for (uint64_t seen = next.load(std::memory_order_acquire); seen >> 32 <= stage;) {
      const int64_t taken = seen >> 32 == stage ? static_cast<uint32_t>(seen) : 0;  // an older stage's are all done
      const int64_t from = begin + taken * grain;
      if (from >= end) break;
      if (next.compare_exchange_weak(seen, stage << 32 | (taken + 1), std::memory_order_acq_rel, std::memory_order_acquire)) {
        piece = {from, std::min(from + grain, end)};
        return true;
      }
    }
  }
  return false;
}

// All pieces are taken. Whoever took one had entered the stage before, and is seen to be in it until the piece is done.
void Team::leave(int member) {
  Member& self = members_[member];
  const uint32_t busy = self.state.load(std::memory_order_relaxed);
  self.state.store(busy + 1, std::memory_order_release);
  if (size() == 1) return;
  self.state.notify_all();
  give_way(self);
  for (const Member& other : members_)
    if (&other != &self) wait_for(other.state, busy);
}

// Lets who is queued for this core have it now and then while no piece is held: otherwise the kernel would choose the moment.
void Team::give_way(Member& self) {
  const Clock::time_point now = Clock::now();
  if (now < self.yield_at) return;
  sched_yield();
  const Clock::time_point back = Clock::now();
  self.yield_at = back + kTurn + 8 * (back - now);
}

void Team::wait_for(const std::atomic<uint32_t>& state, uint32_t busy) {
  for (int spins = 0; spins < kSpins; ++spins) {
    if (state.load(std::memory_order_acquire) != busy) return;
    __builtin_ia32_pause();
  }
  for (int yields = 0; yields < kYields; ++yields) {
    sched_yield();  // who we wait for may be queued behind us
    if (state.load(std::memory_order_acquire) != busy) return;
  }
  while (state.load(std::memory_order_acquire) == busy) state.wait(busy, std::memory_order_acquire);
}

}  // namespace headrace
