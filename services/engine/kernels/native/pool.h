// How keys and values lie in a block of the pool. For the rest of the engine a block is opaque; here its [B, 2, Hkv, D]
// numbers are, for each head, keys [D / 2][B][2] and then values [B / 2][D][2]: what a dot-product instruction reads.
#pragma once

#include "numbers.h"

namespace headrace {
namespace {

inline const bf16* keys_of(const Model& model, const bf16* pool, int64_t block_size, int64_t block, int64_t head) {
  return pool + (block * model.kv_heads + head) * 2 * block_size * model.dim;
}

inline const bf16* values_of(const Model& model, const bf16* pool, int64_t block_size, int64_t block, int64_t head) {
  return keys_of(model, pool, block_size, block, head) + block_size * model.dim;
}

// One head's D keys to a slot.
inline void write_key(const Model& model, bf16* pool, int64_t block_size, int64_t slot, int64_t head, const bf16* key) {
  bf16* to = const_cast<bf16*>(keys_of(model, pool, block_size, slot / block_size, head)) + slot % block_size * 2;
  for (int64_t d = 0; d < model.dim; d += 2) std::memcpy(to + d * block_size, key + d, 4);
}

// One head's D values to a slot: every other number, so that the neighbour's stay as they are.
inline void write_value(const Model& model, bf16* pool, int64_t block_size, int64_t slot, int64_t head, const float* value) {
  const int64_t place = slot % block_size;
  bf16* to = const_cast<bf16*>(values_of(model, pool, block_size, slot / block_size, head)) + place / 2 * 2 * model.dim;
  for (int64_t d = 0; d < model.dim; d += 16) {
    const __m512i wide = _mm512_cvtepu16_epi32(to_bf16(_mm512_loadu_ps(value + d)));
    if (place % 2) {
      _mm512_mask_storeu_epi16(to + d * 2, 0xaaaaaaaau, _mm512_slli_epi32(wide, 16));
    } else {
      _mm512_mask_storeu_epi16(to + d * 2, 0x55555555u, wide);
    }
  }
}

}  // namespace
}  // namespace headrace
