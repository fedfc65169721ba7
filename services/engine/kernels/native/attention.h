// Attention over the paged pool, unit by unit; long contexts are split and merged.
#pragma once

#include <algorithm>
#include <cmath>

#include "numbers.h"
#include "pool.h"

namespace headrace {
namespace {

// Scores of MR queries against kPlaces places, sixteen by sixteen. `keys` has a pointer for each sixteen, or two where a
// block holds but eight; `stride` is between two pairs of dimensions. With FETCH, `next` likewise is brought into the cache.
template <int MR, bool EIGHT, bool FETCH, class End>
inline __attribute__((always_inline)) void score_tile(const bf16* q, int64_t dim, const bf16* const* keys, int64_t stride,
                                                      const bf16* const* next, End&& end) {
  constexpr int NT = kPlaces / 16;
  Vec sum[MR][NT];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NT; ++j) sum[i][j] = zero();
  for (int64_t p = 0; p < dim / 2; ++p) {
    Ints k[NT];
#pragma GCC unroll 4
    for (int j = 0; j < NT; ++j) {
      if constexpr (EIGHT) {
        k[j] = load_halves(keys[2 * j] + p * stride, keys[2 * j + 1] + p * stride);
      } else {
        k[j] = load_ints(keys[j] + p * stride);
      }
      if constexpr (FETCH) fetch(next[EIGHT ? 2 * j + p % 2 : j] + p * stride);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      int32_t two;
      std::memcpy(&two, q + i * dim + p * 2, 4);
      const Ints x = splat_int(two);
#pragma GCC unroll 4
      for (int j = 0; j < NT; ++j) sum[i][j] = dot(sum[i][j], x, k[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NT; ++j) end(i, j, sum[i][j]);
}

// Adds to NP times sixteen dimensions from d on of MR rows of sums the values of `count` places by their weights. `values`
// has a pointer for each block of `block` places. With FETCH, `next` likewise is brought into the cache.
template <int MR, int NP, bool FETCH>
inline __attribute__((always_inline)) void value_tile(const bf16* weights, const bf16* const* values, int64_t dim,
                                                      int64_t d, int64_t block, int64_t count, float* sums,
                                                      const bf16* const* next) {
  Vec sum[MR][NP];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NP; ++j) sum[i][j] = load(sums + i * dim + d + j * 16);
  auto add = [&](const bf16* at, int64_t place, Ints mask) __attribute__((always_inline)) {
    Ints v[NP];
#pragma GCC unroll 4
    for (int j = 0; j < NP; ++j) v[j] = bit_and(load_ints(at + j * 32), mask);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      int32_t two;
      std::memcpy(&two, weights + i * kPlaces + place, 4);
      const Ints x = splat_int(two);
#pragma GCC unroll 4
      for (int j = 0; j < NP; ++j) sum[i][j] = dot(sum[i][j], x, v[j]);
    }
  };
  const Ints both = splat_int(-1), first = splat_int(0xffff);
  for (int64_t from = 0, b = 0; from < count; from += block, ++b) {
    const int64_t here = std::min(block, count - from);
    for (int64_t place = 0; place + 2 <= here; place += 2) {
      add(values[b] + place * dim + d * 2, from + place, both);
      if constexpr (FETCH)
#pragma GCC unroll 4
        for (int j = 0; j < NP; ++j) fetch(next[b] + place * dim + d * 2 + j * 32);
    }
    if (here % 2)  // nothing was written beside the last place
      add(values[b] + (here - 1) * dim + d * 2, from + here - 1, first);
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NP; ++j) store(sums + i * dim + d + j * 16, sum[i][j]);
}

// run(std::integral_constant<int, MR>, row) for all rows, in tiles of kQueries and a rest.
template <int MR = kQueries, class Run>
inline void in_tiles(int64_t row, int64_t rows, Run&& run) {
  if constexpr (MR > 0) {
    for (; row + MR <= rows; row += MR) run(std::integral_constant<int, MR>{}, row);
    in_tiles<MR - 1>(row, rows, run);
  }
}

// Where the keys and values of some places of a context are: a pointer for each block, or each half of a large one.
struct Places {
  const bf16 *keys[kPlaces / 8], *values[kPlaces / 8];
};

// [rows, kPlaces] scores; those of places beyond the context are of other places, or of none.
template <bool EIGHT>
void scores_of(const bf16* query, int64_t rows, int64_t dim, const Places& at, const Places& next, int64_t stride, Vec scale,
               float* scores) {
  in_tiles(0, rows, [&](auto count, int64_t row) {
    constexpr int MR = decltype(count)::value;
    auto end = [&](int i, int j, Vec s) {
      store(scores + (row + i) * kPlaces + j * 16, mul(s, scale));
    };
    if (row == 0) {
      score_tile<MR, EIGHT, true>(query, dim, at.keys, stride, next.keys, end);
    } else {
      score_tile<MR, EIGHT, false>(query + row * dim, dim, at.keys, stride, next.keys, end);
    }
  });
}

// One unit, part by part of the context, keys and values read once for all query heads of the group; running maximum
// and total as in Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
template <bool CODES>
void attend(const Model& model, const Step& step, const Scratch& scratch, char* pool, const Unit& unit, char* own) {
  const int64_t dim = model.dim, group = model.group(), rows = unit.count * group, width = model.heads * dim;
  const int64_t first = step.query_starts[unit.sequence] + unit.q0, block = step.block_size;
  const int32_t* table = step.tables + unit.sequence * step.table_width;
  auto take = [&](int64_t bytes) {
    char* at = own;
    own += round_up(bytes, 64);
    return at;
  };
  float* scores = reinterpret_cast<float*>(take(rows * kPlaces * 4));
  float* sums = reinterpret_cast<float*>(take(rows * dim * 4));
  bf16* query = reinterpret_cast<bf16*>(take(rows * dim * 2));
  bf16* weights = reinterpret_cast<bf16*>(take(rows * kPlaces * 2));
  float* peak = reinterpret_cast<float*>(take(rows * 4));
  float* total = reinterpret_cast<float*>(take(rows * 4));
  for (int64_t i = 0; i < unit.count; ++i)
    std::memcpy(query + i * group * dim, scratch.query + (first + i) * width + unit.head * group * dim, group * dim * 2);
  std::fill(peak, peak + rows, -1e30f);
  std::fill(total, total + rows, 0.f);
  std::memset(sums, 0, rows * dim * 4);
  const Vec scale = splat(1.f / std::sqrt(static_cast<float>(dim)));
  const Vec none = splat(-INFINITY);
  const int64_t last = step.positions[first + unit.count - 1] + 1;  // places that the last query sees
  const int64_t end = std::min<int64_t>(unit.kv1, last);
  const int64_t tile_blocks = std::max<int64_t>(1, 16 / block);  // whose keys make one tile
  // Pointers beyond the context repeat the last block, whose places are then masked.
  auto locate = [&](int64_t from, Places& at) {
    const int64_t final_block = (end - 1) / block;
    for (int64_t b = 0; b < kPlaces / block; ++b)
      at.values[b] = values_of(model, pool, block, table[std::min(from / block + b, final_block)], unit.head);
    for (int64_t t = 0; t < kPlaces / 16 * tile_blocks; ++t) {
      const int64_t place = from + t * 16 / tile_blocks, b = std::min(place / block, final_block);
      at.keys[t] = keys_of(model, pool, block, table[b], unit.head) + place % block / 16 * 32;
    }
  };
  // Where keys and values are codes, a part's are widened here, to the places where `at` then finds them.
  bf16* widened = CODES ? reinterpret_cast<bf16*>(take(kPlaces * dim * 4)) : nullptr;
  float* key_scales = CODES ? reinterpret_cast<float*>(take(kPlaces * 8)) : nullptr;
  float* value_scales = key_scales + kPlaces;
  auto decode = [&](int64_t from, Places& at) {
    const int64_t final_block = (end - 1) / block, each = block * dim;
    for (int64_t b = 0; b < kPlaces / block; ++b) {
      auto block_at = [&](int64_t index) {
        return codes_of(model, pool, block, table[std::min(index, final_block)], unit.head);
      };
      int8_t *codes = block_at(from / block + b), *ahead = block_at((from + kPlaces) / block + b);
      widen(codes, each, ahead, widened + b * each);
      widen(codes + each, each, ahead + each, widened + kPlaces * dim + b * each);
      std::memcpy(key_scales + b * block, scales_of(model, codes, block), block * 4);
      std::memcpy(value_scales + b * block, scales_of(model, codes, block) + block, block * 4);
      at.values[b] = widened + kPlaces * dim + b * each;
    }
    for (int64_t t = 0; t < kPlaces / 16 * tile_blocks; ++t) {
      const int64_t place = t * 16 / tile_blocks;
      at.keys[t] = widened + place / block * each + place % block / 16 * 32;
    }
  };
  Places at, next;  // of this part and of the one after it
  if constexpr (!CODES) locate(unit.kv0, next);
  for (int64_t from = unit.kv0; from < end; from += kPlaces) {
    const int64_t count = std::min(kPlaces, end - from), padded = round_up(count, 16);
    if constexpr (CODES) {
      decode(from, next);
      at = next;
    } else {
      at = next;
      if (from + kPlaces < end) locate(from + kPlaces, next);
    }
    if (block == 8) {
      scores_of<true>(query, rows, dim, at, next, block * 2, scale, scores);
    } else {
      scores_of<false>(query, rows, dim, at, next, block * 2, scale, scores);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t visible = std::min<int64_t>(count, step.positions[first + r / group] + 1 - from);
      float* s = scores + r * kPlaces;
      Vec top = splat(peak[r]);
      for (int64_t p = 0; p < padded; p += 16) {
        Vec v = load(s + p);
        if constexpr (CODES) v = mul(v, load(key_scales + p));
        v = first_or(v, visible - p, none);
        store(s + p, v);
        top = max(top, v);
      }
      const float highest = largest_of(top);
      const Vec now = splat(highest);
      Vec sum = zero();
      for (int64_t p = 0; p < padded; p += 16) {
        Vec e = exponential(sub(load(s + p), now));
        sum = add(sum, e);
        // Nothing was written beyond the last place, and its neighbour is read with it.
        if constexpr (CODES) e = mul(e, load_first(value_scales + p, count - p));
        store_bf16(weights + r * kPlaces + p, e);
      }
      if (highest != peak[r]) {
        const float fade = std::exp(peak[r] - highest);
        total[r] *= fade;
        for (int64_t d = 0; d < dim; d += 16)
          store(sums + r * dim + d, mul(load(sums + r * dim + d), splat(fade)));
        peak[r] = highest;
      }
      total[r] += sum_of(sum);
    }
    in_tiles(0, rows, [&](auto tile, int64_t row) {
      constexpr int MR = decltype(tile)::value;
      int64_t d = 0;
      const bf16* w = weights + row * kPlaces;
      for (; d + 64 <= dim; d += 64) {
        if (row == 0) {
          value_tile<MR, 4, true>(w, at.values, dim, d, block, count, sums + row * dim, next.values);
        } else {
          value_tile<MR, 4, false>(w, at.values, dim, d, block, count, sums + row * dim, next.values);
        }
      }
      for (; d < dim; d += 16) value_tile<MR, 1, false>(w, at.values, dim, d, block, count, sums + row * dim, next.values);
    });
  }
  for (int64_t r = 0; r < rows; ++r) {
    if (unit.partial >= 0) {
      float* out = scratch.partials + (unit.partial + r) * (dim + 2);
      std::memcpy(out, sums + r * dim, dim * 4);
      out[dim] = peak[r];
      out[dim + 1] = total[r];
      continue;
    }
    bf16* out = scratch.attended + (first + r / group) * width + (unit.head * group + r % group) * dim;
    const Vec whole = splat(1.f / total[r]);
    for (int64_t d = 0; d < dim; d += 16) store_bf16(out + d, mul(load(sums + r * dim + d), whole));
  }
}

void merge(const Model& model, const Step& step, const Scratch& scratch, const Merge& m) {
  const int64_t dim = model.dim, group = model.group(), rows = m.count * group, width = model.heads * dim;
  const int64_t first = step.query_starts[m.sequence] + m.q0;
  for (int64_t r = 0; r < rows; ++r) {
    const float* parts = scratch.partials + (m.partial + r) * (dim + 2);
    const int64_t stride = rows * (dim + 2);
    float peak = -1e30f, total = 0;
    for (int64_t p = 0; p < m.parts; ++p) peak = std::max(peak, parts[p * stride + dim]);
    for (int64_t p = 0; p < m.parts; ++p) total += parts[p * stride + dim + 1] * std::exp(parts[p * stride + dim] - peak);
    bf16* out = scratch.attended + (first + r / group) * width + (m.head * group + r % group) * dim;
    for (int64_t d = 0; d < dim; d += 16) {
      Vec sum = zero();
      for (int64_t p = 0; p < m.parts; ++p)
        sum = fmadd(load(parts + p * stride + d), splat(std::exp(parts[p * stride + dim] - peak) / total), sum);
      store_bf16(out + d, sum);
    }
  }
}

}  // namespace
}  // namespace headrace
