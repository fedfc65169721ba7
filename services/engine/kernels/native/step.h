// What a step is to compute: checked against the bounds of pool and model, and cut into units of attention.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>

#include "stack.h"

namespace headrace {
namespace {

// Cut the step's attention into units of about equal reading, the longest first.
void plan_units(const Model& model, Step& step, int threads, int64_t& partial_rows) {
  const int64_t group = model.group(), per = std::max<int64_t>(1, kQueryRows / group);
  int64_t items = 0;
  for (int64_t s = 0; s < step.sequences; ++s)
    items += (step.query_starts[s + 1] - step.query_starts[s] + per - 1) / per * model.kv_heads;
  const int64_t wanted = threads == 1 ? 1 : std::max<int64_t>(1, 4 * threads / std::max<int64_t>(1, items));
  partial_rows = 0;
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t start = step.query_starts[s], count = step.query_starts[s + 1] - start;
    for (int64_t q0 = 0; q0 < count; q0 += per)
      for (int64_t head = 0; head < model.kv_heads; ++head) {
        const int64_t queries = std::min(per, count - q0), seen = step.positions[start + q0 + queries - 1] + 1;
        const int64_t parts = std::clamp<int64_t>(std::min(wanted, seen / 256), 1, 64);
        const int64_t each = round_up((seen + parts - 1) / parts, kPlaces);
        Unit unit{static_cast<int32_t>(s), static_cast<int32_t>(head), static_cast<int32_t>(q0),
                  static_cast<int32_t>(queries), 0, static_cast<int32_t>(seen), -1};
        if (parts == 1) {
          step.units.push_back(unit);
          continue;
        }
        Merge merge{unit.sequence, unit.head, unit.q0, unit.count, 0, static_cast<int32_t>(partial_rows)};
        for (int64_t from = 0; from < seen; from += each, ++merge.parts) {
          unit.kv0 = static_cast<int32_t>(from), unit.kv1 = static_cast<int32_t>(std::min(seen, from + each));
          unit.partial = static_cast<int32_t>(partial_rows);
          partial_rows += queries * group;
          step.units.push_back(unit);
        }
        step.merges.push_back(merge);
      }
  }
  auto cost = [&](const Unit& u) { return (u.count * group + 16) * static_cast<int64_t>(u.kv1 - u.kv0); };
  std::sort(step.units.begin(), step.units.end(), [&](const Unit& a, const Unit& b) { return cost(a) > cost(b); });
}

void check(const Model& model, const Step& step, int64_t slot_count, int64_t block_count) {
  TORCH_CHECK(step.query_starts[0] == 0 && step.query_starts[step.sequences] == step.tokens, "query starts do not fit");
  for (int64_t t = 0; t < step.tokens; ++t)
    TORCH_CHECK(step.token_ids[t] >= 0 && step.token_ids[t] < model.vocab && step.positions[t] >= 0 &&
                    step.positions[t] < model.length && step.slots[t] >= 0 && step.slots[t] < slot_count,
                "token ", t, " is out of bounds");
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t first = step.query_starts[s], end = step.query_starts[s + 1], context = step.context_lens[s];
    TORCH_CHECK(first < end && end <= step.tokens, "sequence ", s, " has no tokens");
    const int64_t blocks = (context + step.block_size - 1) / step.block_size;
    TORCH_CHECK(context >= 1 && blocks <= step.table_width, "sequence ", s, " is longer than its table");
    for (int64_t b = 0; b < blocks; ++b)
      TORCH_CHECK(step.tables[s * step.table_width + b] >= 0 && step.tables[s * step.table_width + b] < block_count,
                  "sequence ", s, " has a block out of bounds");
    for (int64_t t = first; t < end; ++t)
      TORCH_CHECK(step.positions[t] == context - (end - t), "positions of sequence ", s, " do not end its context");
  }
}

}  // namespace
}  // namespace headrace
