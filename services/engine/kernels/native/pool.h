// How keys and values lie in a block of the pool. For the rest of the engine a block is opaque; here its [B, 2, Hkv, D]
// numbers are, for each head, keys [D / 2][B][2] and then values [B / 2][D][2]: what a dot-product instruction reads. Where
// they are bytes, two times B scales follow, float32: of the keys, of the values.
#pragma once

#include <cmath>

#include "numbers.h"

namespace headrace {
namespace {

inline bf16* keys_of(const Model& model, char* pool, int64_t block_size, int64_t block, int64_t head) {
  return reinterpret_cast<bf16*>(pool) + (block * model.kv_heads + head) * 2 * block_size * model.dim;
}

inline bf16* values_of(const Model& model, char* pool, int64_t block_size, int64_t block, int64_t head) {
  return keys_of(model, pool, block_size, block, head) + block_size * model.dim;
}

// The same of bytes: codes of keys and then of values.
inline int8_t* codes_of(const Model& model, char* pool, int64_t block_size, int64_t block, int64_t head) {
  return reinterpret_cast<int8_t*>(pool) + (block * model.kv_heads + head) * 2 * block_size * (model.dim + kScaleBytes);
}

inline float* scales_of(const Model& model, int8_t* codes, int64_t block_size) {
  return reinterpret_cast<float*>(codes + 2 * block_size * model.dim);
}

// One head's D keys to a slot.
inline void write_key(const Model& model, char* pool, int64_t block_size, int64_t slot, int64_t head, const bf16* key) {
  bf16* to = keys_of(model, pool, block_size, slot / block_size, head) + slot % block_size * 2;
  for (int64_t d = 0; d < model.dim; d += 2) std::memcpy(to + d * block_size, key + d, 4);
}

// One head's D values to a slot: every other number, so that the neighbour's stay as they are.
inline void write_value(const Model& model, char* pool, int64_t block_size, int64_t slot, int64_t head, const float* value) {
  const int64_t place = slot % block_size;
  bf16* to = values_of(model, pool, block_size, slot / block_size, head) + place / 2 * 2 * model.dim;
  for (int64_t d = 0; d < model.dim; d += 16) store_bf16_apart(to + d * 2, load(value + d), place % 2);
}

// D numbers, sixteen from at(d), as codes whose largest is 127; returns their scale, which is NaN where one of them is.
template <class At>
inline float encode(int64_t dim, At&& at, int8_t* codes) {
  Vec top = zero();
  bool broken = false;
  for (int64_t d = 0; d < dim; d += 16) {
    const Vec x = at(d);
    broken |= has_nan(x);
    top = max(top, abs(x));
  }
  const float largest = broken ? NAN : largest_of(top);
  const Vec inverse = splat(largest > 1e-30f ? 127.f / largest : 0.f);
  for (int64_t d = 0; d < dim; d += 16)
    store_codes(codes + d, to_ints(mul(at(d), inverse)));
  return largest / 127.f;
}

// One head's D keys to a slot, as codes by way of `codes`.
inline void encode_key(const Model& model, char* pool, int64_t block_size, int64_t slot, int64_t head, const bf16* key,
                       int8_t* codes) {
  int8_t* to = codes_of(model, pool, block_size, slot / block_size, head);
  const int64_t place = slot % block_size;
  scales_of(model, to, block_size)[place] = encode(model.dim, [&](int64_t d) { return load_bf16(key + d); }, codes);
  for (int64_t d = 0; d < model.dim; d += 2) std::memcpy(to + d * block_size + place * 2, codes + d, 2);
}

// The same of its values.
inline void encode_value(const Model& model, char* pool, int64_t block_size, int64_t slot, int64_t head, const float* value,
                         int8_t* codes) {
  int8_t* to = codes_of(model, pool, block_size, slot / block_size, head);
  const int64_t place = slot % block_size;
  scales_of(model, to, block_size)[block_size + place] =
      encode(model.dim, [&](int64_t d) { return load(value + d); }, codes);
  to += block_size * model.dim + place / 2 * 2 * model.dim + place % 2;
  for (int64_t d = 0; d < model.dim; ++d) to[d * 2] = codes[d];
}

// `count` codes, a multiple of 64, as bfloat16, which has them all; as many from `next` on are brought into the cache.
inline void widen(const int8_t* codes, int64_t count, const int8_t* next, bf16* out) {
  for (int64_t i = 0; i < count; i += 64) {
    fetch(next + i);
    widen_codes(codes + i, out + i);
    widen_codes(codes + i + 32, out + i + 32);
  }
}

}  // namespace
}  // namespace headrace
