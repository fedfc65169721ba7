// Attention over the paged pool, unit by unit; long contexts are split and merged.
#pragma once

#include <algorithm>
#include <cmath>

#include "products_bf16.h"

namespace headrace {
namespace {

// Sixteen rows of sixteen 32-bit values change places with their columns.
inline __attribute__((always_inline)) void transpose(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

template <class End>
inline void any_panels(int64_t panels, const bf16* a, int64_t lda, int64_t rows, const bf16* b, int64_t panel,
                       int64_t pairs, End&& end) {
  int64_t j = 0;
  for (; j + 4 <= panels; j += 4)
    column<4, false>(a, lda, rows, b + j * panel, panel, pairs, [&](int64_t r, Vec* out) {
      for (int c = 0; c < 4; ++c) end(r, j + c, out[c]);
    });
  for (; j < panels; ++j)
    column<1, false>(a, lda, rows, b + j * panel, panel, pairs, [&](int64_t r, Vec* out) { end(r, j, out[0]); });
}

// Puts the dimensions back in order after values were interleaved sixteen bytes at a time.
inline void straighten(float* x, int64_t dim) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int64_t d = 0; d + 32 <= dim; d += 32) {
    const Vec low = _mm512_loadu_ps(x + d), high = _mm512_loadu_ps(x + d + 16);
    _mm512_storeu_ps(x + d, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(x + d + 16, _mm512_permutex2var_ps(low, second, high));
  }
}

// One unit, block by block of the context, keys and values read once for all query heads of the group; running maximum
// and total as in Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
void attend(const Model& model, const Step& step, const Scratch& scratch, const bf16* pool, const Unit& unit, char* own) {
  const int64_t dim = model.dim, group = model.group(), rows = unit.count * group, width = model.heads * dim;
  const int64_t token_stride = 2 * model.kv_heads * dim, first = step.query_starts[unit.sequence] + unit.q0;
  const int32_t* table = step.tables + unit.sequence * step.table_width;
  auto take = [&](int64_t bytes) {
    char* at = own;
    own += round_up(bytes, 64);
    return at;
  };
  float* scores = reinterpret_cast<float*>(take(rows * kPlaces * 4));
  float* sums = reinterpret_cast<float*>(take(rows * dim * 4));
  bf16* keys = reinterpret_cast<bf16*>(take(kPlaces * dim * 2));    // [places / 16][D / 2][16][2]
  bf16* values = reinterpret_cast<bf16*>(take(kPlaces * dim * 2));  // [D / 16][places / 2][16][2]
  bf16* query = reinterpret_cast<bf16*>(take(rows * dim * 2));
  bf16* weights = reinterpret_cast<bf16*>(take(rows * kPlaces * 2));
  float* peak = reinterpret_cast<float*>(take(rows * 4));
  float* total = reinterpret_cast<float*>(take(rows * 4));
  for (int64_t i = 0; i < unit.count; ++i)
    std::memcpy(query + i * group * dim, scratch.query + (first + i) * width + unit.head * group * dim, group * dim * 2);
  bf16* zeros = reinterpret_cast<bf16*>(take(dim * 2));  // in the place of slots beyond the context
  std::memset(zeros, 0, dim * 2);
  std::fill(peak, peak + rows, -1e30f);
  std::fill(total, total + rows, 0.f);
  std::memset(sums, 0, rows * dim * 4);
  const Vec scale = _mm512_set1_ps(1.f / std::sqrt(static_cast<float>(dim)));
  const Vec none = _mm512_set1_ps(-INFINITY);
  const int64_t last = step.positions[first + unit.count - 1] + 1;  // places that the last query sees
  const int64_t end = std::min<int64_t>(unit.kv1, last);
  const bf16* places[2][kPlaces];  // of this block of the context and of the next
  auto locate = [&](int64_t from, int64_t count, const bf16** at) {
    int64_t block = from / step.block_size, offset = from % step.block_size;
    for (int64_t p = 0; p < count; ++p) {
      at[p] = pool + (table[block] * step.block_size + offset) * token_stride + unit.head * dim;
      if (++offset == step.block_size) ++block, offset = 0;
    }
    for (int64_t p = count; p < round_up(count, 16); ++p) at[p] = zeros;
  };
  for (int64_t from = unit.kv0; from < end; from += kPlaces) {
    const int64_t count = std::min(kPlaces, end - from), padded = round_up(count, 16);
    const bf16** at = places[(from - unit.kv0) / kPlaces % 2];
    if (from == unit.kv0) locate(from, count, at);
    const int64_t coming = std::min(kPlaces, end - from - kPlaces);
    if (coming > 0) {  // fetched while this block is computed: places of one head lie apart, which no hardware foresees
      const bf16** then = places[((from - unit.kv0) / kPlaces + 1) % 2];
      locate(from + kPlaces, coming, then);
      for (int64_t p = 0; p < coming; ++p)
        for (int64_t d = 0; d < dim; d += 32) {
          _mm_prefetch(reinterpret_cast<const char*>(then[p] + d), _MM_HINT_T0);
          _mm_prefetch(reinterpret_cast<const char*>(then[p] + model.kv_heads * dim + d), _MM_HINT_T0);
        }
    }
    for (int64_t p = 0; p < padded; p += 16)
      for (int64_t d = 0; d < dim; d += 32) {
        const int64_t pairs = std::min<int64_t>(16, (dim - d) / 2);
        const __mmask16 mask = static_cast<__mmask16>(pairs == 16 ? 0xffff : (1u << pairs) - 1);
        __m512i r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi32(mask, at[p + i] + d);
        transpose(r);
        bf16* to = keys + (p / 16 * (dim / 2) + d / 2) * 32;
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
          if (i < pairs) _mm512_store_si512(to + i * 32, r[i]);
      }
    const int64_t value_at = model.kv_heads * dim, value_pairs = padded / 2;
    for (int64_t p = 0; p < padded; p += 2) {
      const bf16 *one = p < count ? at[p] + value_at : zeros, *two = p + 1 < count ? at[p + 1] + value_at : zeros;
      bf16* to = values + p / 2 * 32;
      int64_t d = 0;
      for (; d + 32 <= dim; d += 32) {  // leaves the dimensions in the order that `straighten` undoes
        const __m512i a = _mm512_loadu_si512(one + d), b = _mm512_loadu_si512(two + d);
        _mm512_store_si512(to + d / 16 * value_pairs * 32, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to + (d / 16 + 1) * value_pairs * 32, _mm512_unpackhi_epi16(a, b));
      }
      if (d < dim) {
        auto load = [&](const bf16* x) {
          return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + d)));
        };
        _mm512_store_si512(to + d / 16 * value_pairs * 32, _mm512_or_si512(load(one), _mm512_slli_epi32(load(two), 16)));
      }
    }
    any_panels(padded / 16, query, dim, rows, keys, dim / 2 * 32, dim / 2,
               [&](int64_t r, int64_t j, Vec s) { _mm512_storeu_ps(scores + r * kPlaces + j * 16, _mm512_mul_ps(s, scale)); });
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t visible = std::min<int64_t>(count, step.positions[first + r / group] + 1 - from);
      float* s = scores + r * kPlaces;
      Vec top = _mm512_set1_ps(peak[r]);
      for (int64_t p = 0; p < padded; p += 16) {
        const int64_t seen = visible - p;
        const __mmask16 mask = static_cast<__mmask16>(seen >= 16 ? 0xffff : seen <= 0 ? 0 : (1u << seen) - 1);
        Vec v = _mm512_mask_blend_ps(mask, none, _mm512_loadu_ps(s + p));
        _mm512_storeu_ps(s + p, v);
        top = _mm512_max_ps(top, v);
      }
      const float highest = _mm512_reduce_max_ps(top);
      const Vec now = _mm512_set1_ps(highest);
      Vec sum = _mm512_setzero_ps();
      for (int64_t p = 0; p < padded; p += 16) {
        Vec e = exponential(_mm512_sub_ps(_mm512_loadu_ps(s + p), now));
        sum = _mm512_add_ps(sum, e);
        store_bf16(weights + r * kPlaces + p, e);
      }
      if (highest != peak[r]) {
        const float fade = std::exp(peak[r] - highest);
        total[r] *= fade;
        for (int64_t d = 0; d < dim; d += 16)
          _mm512_storeu_ps(sums + r * dim + d, _mm512_mul_ps(_mm512_loadu_ps(sums + r * dim + d), _mm512_set1_ps(fade)));
        peak[r] = highest;
      }
      total[r] += _mm512_reduce_add_ps(sum);
    }
    any_panels(dim / 16, weights, kPlaces, rows, values, value_pairs * 32, value_pairs, [&](int64_t r, int64_t j, Vec v) {
      float* o = sums + r * dim + j * 16;
      _mm512_storeu_ps(o, _mm512_add_ps(_mm512_loadu_ps(o), v));
    });
  }
  for (int64_t r = 0; r < rows; ++r) {
    straighten(sums + r * dim, dim);
    if (unit.partial >= 0) {
      float* out = scratch.partials + (unit.partial + r) * (dim + 2);
      std::memcpy(out, sums + r * dim, dim * 4);
      out[dim] = peak[r];
      out[dim + 1] = total[r];
      continue;
    }
    bf16* out = scratch.attended + (first + r / group) * width + (unit.head * group + r % group) * dim;
    const Vec whole = _mm512_set1_ps(1.f / total[r]);
    for (int64_t d = 0; d < dim; d += 16) store_bf16(out + d, _mm512_mul_ps(_mm512_loadu_ps(sums + r * dim + d), whole));
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
      Vec sum = _mm512_setzero_ps();
      for (int64_t p = 0; p < m.parts; ++p)
        sum = _mm512_fmadd_ps(_mm512_loadu_ps(parts + p * stride + d),
                              _mm512_set1_ps(std::exp(parts[p * stride + dim] - peak) / total), sum);
      store_bf16(out + d, sum);
    }
  }
}

}  // namespace
}  // namespace headrace
