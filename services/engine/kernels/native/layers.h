// The arithmetic, written once and compiled for each instruction set: the includer defines HEADRACE_ISA (the name of
// its Isa) and HEADRACE_BF16 (1: the processor multiplies bfloat16; 0: it is widened to float32 first).
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "stack.h"

namespace headrace {
namespace {

using Vec = __m512;

// --- numbers --------------------------------------------------------------------------------------------

inline float wide(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline Vec load_bf16(const bf16* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}

inline __m256i to_bf16(Vec x) {
#if HEADRACE_BF16
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

inline void store_bf16(bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }

// sum += a.low * b.low + a.high * b.high in each of sixteen places.
inline Vec dot(Vec sum, __m512i a, __m512i b) {
#if HEADRACE_BF16
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
#endif
}

// e to the x; NaN stays NaN, anything below -100 is treated as -100. Polynomial: Cephes, expf.
inline Vec exponential(Vec x) {
  x = _mm512_max_ps(_mm512_set1_ps(-100.f), x);  // the second operand wins when one is NaN
  Vec n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  Vec r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  Vec p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.f)));
  return _mm512_scalef_ps(p, n);
}

inline Vec silu(Vec x) {
  Vec e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_min_ps(_mm512_set1_ps(88.f), x)));
  return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1.f)));
}

// --- products -------------------------------------------------------------------------------------------

#ifndef HEADRACE_AHEAD
#define HEADRACE_AHEAD 2048
#endif
constexpr int kAhead = HEADRACE_AHEAD;  // elements of a weight that are fetched before they are needed, few rows

// MR rows times NP panels, in registers. KU sums in turn hide the latency of the addition where there are few. With
// FETCH, as many panels from `next` on are brought into the cache meanwhile.
template <int MR, int NP, int KU, int FETCH, class End>
inline __attribute__((always_inline)) void tile(const bf16* a, int64_t lda, const bf16* b, int64_t panel, int64_t pairs,
                                                const bf16* next, End&& end) {
  Vec sum[KU][MR][NP];
#pragma GCC unroll 4
  for (int u = 0; u < KU; ++u)
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < NP; ++j) sum[u][i][j] = _mm512_setzero_ps();
  int64_t p = 0;
  auto step = [&](int u, int64_t at) __attribute__((always_inline)) {
    __m512i w[NP];
#pragma GCC unroll 4
    for (int j = 0; j < NP; ++j) w[j] = _mm512_load_si512(b + j * panel + at * 32);
#pragma GCC unroll 4
    for (int j = 0; j < FETCH; ++j)
      _mm_prefetch(reinterpret_cast<const char*>(next + j * panel + at * 32), _MM_HINT_T0);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      int32_t two;
      std::memcpy(&two, a + i * lda + at * 2, 4);
      __m512i x = _mm512_set1_epi32(two);
#pragma GCC unroll 4
      for (int j = 0; j < NP; ++j) sum[u][i][j] = dot(sum[u][i][j], x, w[j]);
    }
  };
  for (; p + KU <= pairs; p += KU) {
#pragma GCC unroll 4
    for (int u = 0; u < KU; ++u) step(u, p + u);
  }
  for (; p < pairs; ++p) step(0, p);
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
    Vec out[NP];
#pragma GCC unroll 4
    for (int j = 0; j < NP; ++j) {
      out[j] = sum[0][i][j];
#pragma GCC unroll 4
      for (int u = 1; u < KU; ++u) out[j] = _mm512_add_ps(out[j], sum[u][i][j]);
    }
    end(i, out);
  }
}

constexpr int kRows = 6, kPanels = 4;  // of the tile for many rows: 24 sums, 4 weights, 1 input in 32 registers

// The last, fewer rows of a tile.
template <int MR, int NP, class End>
inline void few_rows(int64_t rows, const bf16* a, int64_t lda, const bf16* b, int64_t panel, int64_t pairs, End&& end) {
  if constexpr (MR > 0) {
    if (rows == MR) {
      tile<MR, NP, 1, 0>(a, lda, b, panel, pairs, b, end);
    } else {
      few_rows<MR - 1, NP>(rows, a, lda, b, panel, pairs, end);
    }
  }
}

// Any rows times NP panels; end(row, out[NP]). With FETCH the first tiles fetch the NP panels after these.
template <int NP, bool FETCH, class End>
inline void column(const bf16* a, int64_t lda, int64_t rows, const bf16* b, int64_t panel, int64_t pairs, End&& end) {
  int64_t i = 0;
  if constexpr (FETCH) {
    constexpr int kEach = NP > 1 ? 2 : 1;
    for (int64_t j = 0; j < NP && i + kRows <= rows; j += kEach, i += kRows)
      tile<kRows, NP, 1, kEach>(a + i * lda, lda, b, panel, pairs, b + (NP + j) * panel,
                                [&](int r, Vec* out) { end(i + r, out); });
  }
  for (; i + kRows <= rows; i += kRows)
    tile<kRows, NP, 1, 0>(a + i * lda, lda, b, panel, pairs, b, [&](int r, Vec* out) { end(i + r, out); });
  if (i < rows)
    few_rows<kRows - 1, NP>(rows - i, a + i * lda, lda, b, panel, pairs, [&](int r, Vec* out) { end(i + r, out); });
}

// Few rows, at the speed of memory: a thread reads its panels as one stream.
template <int MR, int NP, class End>
inline void stream_rows(int64_t rows, const bf16* a, int64_t lda, const bf16* b, int64_t panel, int64_t pairs, End&& end) {
  if constexpr (MR > 0) {
    if (rows == MR) {
      constexpr int KU = MR * NP >= 6 ? 1 : MR * NP >= 3 ? 2 : 4;
      tile<MR, NP, KU, NP>(a, lda, b, panel, pairs, b + kAhead, end);
    } else {
      stream_rows<MR - 1, NP>(rows, a, lda, b, panel, pairs, end);
    }
  }
}

constexpr int64_t kFewRows = 8;

// Panels from .. to of a product; end(row, panel, sum) for each panel, or for each pair of panels with PAIR.
template <bool PAIR, class End>
void product(const bf16* a, int64_t lda, int64_t rows, const Matrix& m, int64_t from, int64_t to, End&& end) {
  const int64_t pairs = m.k / 2, panel = pairs * 32;
  constexpr int STEP = PAIR ? 2 : 1;
  int64_t j = from;
  auto give = [&](int64_t row, int64_t at, Vec* out, int count) __attribute__((always_inline)) {
    for (int c = 0; c < count; c += STEP) end(row, at + c, out + c);
  };
  if (rows <= kFewRows) {
    for (; j + 2 <= to; j += 2)
      stream_rows<kFewRows, 2>(rows, a, lda, m.data + j * panel, panel, pairs,
                               [&](int r, Vec* out) { give(r, j, out, 2); });
    if constexpr (!PAIR)
      for (; j < to; ++j)
        stream_rows<kFewRows, 1>(rows, a, lda, m.data + j * panel, panel, pairs,
                                 [&](int r, Vec* out) { give(r, j, out, 1); });
    return;
  }
  for (; j + kPanels <= to; j += kPanels)
    column<kPanels, true>(a, lda, rows, m.data + j * panel, panel, pairs,
                    [&](int64_t r, Vec* out) { give(r, j, out, kPanels); });
  for (; j + 2 <= to; j += 2)
    column<2, true>(a, lda, rows, m.data + j * panel, panel, pairs, [&](int64_t r, Vec* out) { give(r, j, out, 2); });
  if constexpr (!PAIR)
    for (; j < to; ++j)
      column<1, true>(a, lda, rows, m.data + j * panel, panel, pairs, [&](int64_t r, Vec* out) { give(r, j, out, 1); });
}

inline Vec with_bias(const Matrix& m, int64_t panel, Vec sum) {
  return m.bias ? _mm512_add_ps(sum, _mm512_loadu_ps(m.bias + panel * 16)) : sum;
}

// --- rows -----------------------------------------------------------------------------------------------

// Root-mean-square normalisation (Zhang and Sennrich, 2019) of n floats into bfloat16.
void normalise(const float* x, const float* weight, int64_t n, float eps, bf16* out) {
  Vec sum = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    Vec v = _mm512_loadu_ps(x + i);
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  const __mmask16 tail = static_cast<__mmask16>((1u << (n - i)) - 1);
  Vec rest = _mm512_maskz_loadu_ps(tail, x + i);
  sum = _mm512_fmadd_ps(rest, rest, sum);
  const Vec scale = _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(sum) / static_cast<float>(n) + eps));
  for (i = 0; i + 16 <= n; i += 16)
    store_bf16(out + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), scale), _mm512_loadu_ps(weight + i)));
  if (tail) store_bf16(out + i, _mm512_mul_ps(_mm512_mul_ps(rest, scale), _mm512_maskz_loadu_ps(tail, weight + i)));
}

// One head: normalise it (where the family does), rotate it (Su et al., 2021), write it as bfloat16.
void rotate(float* x, const float* norm, float eps, int64_t dim, const float* cos, const float* sin, bf16* out) {
  if (norm) {
    float sum = 0;
    for (int64_t d = 0; d < dim; ++d) sum += x[d] * x[d];
    const float scale = 1.f / std::sqrt(sum / static_cast<float>(dim) + eps);
    for (int64_t d = 0; d < dim; ++d) x[d] *= scale * norm[d];
  }
  const int64_t half = dim / 2;
  for (int64_t d = 0; d < half; d += 16) {
    const __mmask16 m = static_cast<__mmask16>(half - d >= 16 ? 0xffff : (1u << (half - d)) - 1);
    Vec a = _mm512_maskz_loadu_ps(m, x + d), b = _mm512_maskz_loadu_ps(m, x + half + d);
    Vec c = _mm512_maskz_loadu_ps(m, cos + d), s = _mm512_maskz_loadu_ps(m, sin + d);
    Vec first = _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)), second = _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s));
    _mm256_mask_storeu_epi16(out + d, m, to_bf16(first));
    _mm256_mask_storeu_epi16(out + half + d, m, to_bf16(second));
  }
}

void embed(const Model& model, int64_t token, float* out) {
  const int64_t n = model.hidden;
  if (model.embedding) {
    for (int64_t i = 0; i < n; ++i) out[i] = wide(model.embedding[token * n + i]);
    return;
  }
  const bf16* row = model.head.data + token / 16 * (n / 2) * 32 + token % 16 * 2;
  for (int64_t i = 0; i < n; i += 2) {
    out[i] = wide(row[i * 16]);
    out[i + 1] = wide(row[i * 16 + 1]);
  }
}

// --- attention ------------------------------------------------------------------------------------------

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

// --- the stack ------------------------------------------------------------------------------------------

constexpr int64_t kAlone = 16;  // rows that every thread normalises by itself rather than wait for the others

void forward(const Model& model, const Step& step, const Scratch& scratch, std::atomic<int>* tickets, Barrier& barrier,
             int thread, int threads) {
  const int64_t tokens = step.tokens, hs = scratch.hidden_stride, dim = model.dim, width = model.heads * dim;
  const int64_t begin = tokens * thread / threads, end = tokens * (thread + 1) / threads;
  char* own = scratch.private_part + scratch.private_bytes * thread;
  bf16* normed = scratch.normed;
  const bool alone = tokens <= kAlone;
  if (alone) normed += thread * kAlone * hs;
  auto share = [&](const Matrix& m, int64_t unit, auto&& run) {
    const int64_t units = m.panels / unit;
    run(units * thread / threads * unit, units * (thread + 1) / threads * unit);
  };
  auto norm_rows = [&](const float* weight) {
    for (int64_t t = alone ? 0 : begin; t < (alone ? tokens : end); ++t)
      normalise(scratch.hidden + t * hs, weight, model.hidden, model.eps, normed + t * hs);
    if (!alone) barrier.wait();
  };
  auto add_product = [&](const bf16* a, int64_t lda, const Matrix& m) {
    share(m, 1, [&](int64_t from, int64_t to) {
      product<false>(a, lda, tokens, m, from, to, [&](int64_t row, int64_t panel, Vec* sum) {
        float* out = scratch.hidden + row * hs + panel * 16;
        _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), with_bias(m, panel, *sum)));
      });
    });
    barrier.wait();
  };
  for (int64_t t = begin; t < end; ++t) embed(model, step.token_ids[t], scratch.hidden + t * hs);
  barrier.wait();
  for (size_t index = 0; index < model.layers.size(); ++index) {
    const Layer& layer = model.layers[index];
    bf16* pool = step.kv[index];
    norm_rows(layer.input_norm);
    share(layer.qkv, 1, [&](int64_t from, int64_t to) {
      product<false>(normed, hs, tokens, layer.qkv, from, to, [&](int64_t row, int64_t panel, Vec* sum) {
        _mm512_storeu_ps(scratch.qkv + row * scratch.qkv_stride + panel * 16, with_bias(layer.qkv, panel, *sum));
      });
    });
    barrier.wait();
    const int64_t all = model.heads + 2 * model.kv_heads;
    for (int64_t item = tokens * all * thread / threads; item < tokens * all * (thread + 1) / threads; ++item) {
      const int64_t t = item / all, head = item % all;
      float* x = scratch.qkv + t * scratch.qkv_stride + head * dim;
      const float *cos = model.cos + step.positions[t] * (dim / 2), *sin = model.sin + step.positions[t] * (dim / 2);
      bf16* slot = pool + step.slots[t] * 2 * model.kv_heads * dim + (head - model.heads) * dim;
      if (head < model.heads) {
        rotate(x, layer.q_norm, model.eps, dim, cos, sin, scratch.query + t * width + head * dim);
      } else if (head < model.heads + model.kv_heads) {
        rotate(x, layer.k_norm, model.eps, dim, cos, sin, slot);
      } else {
        for (int64_t d = 0; d < dim; d += 16) store_bf16(slot + d, _mm512_loadu_ps(x + d));
      }
    }
    barrier.wait();
    const int units = static_cast<int>(step.units.size()), merges = static_cast<int>(step.merges.size());
    for (int u; (u = tickets[2 * index].fetch_add(1, std::memory_order_relaxed)) < units;)
      attend(model, step, scratch, pool, step.units[u], own);
    barrier.wait();
    if (merges) {
      for (int u; (u = tickets[2 * index + 1].fetch_add(1, std::memory_order_relaxed)) < merges;)
        merge(model, step, scratch, step.merges[u]);
      barrier.wait();
    }
    add_product(scratch.attended, width, layer.output);
    norm_rows(layer.post_norm);
    share(layer.gate_up, 2, [&](int64_t from, int64_t to) {
      product<true>(normed, hs, tokens, layer.gate_up, from, to, [&](int64_t row, int64_t panel, Vec* sum) {
        store_bf16(scratch.gated + row * scratch.inner_stride + panel * 8, _mm512_mul_ps(silu(sum[0]), sum[1]));
      });
    });
    barrier.wait();
    add_product(scratch.gated, scratch.inner_stride, layer.down);
  }
}

void logits(const Model& model, const float* hidden, int64_t stride, const int64_t* rows, int64_t count, bf16* normed,
            int64_t normed_stride, float* out, Barrier& barrier, int thread, int threads) {
  for (int64_t r = count * thread / threads; r < count * (thread + 1) / threads; ++r)
    normalise(hidden + rows[r] * stride, model.final_norm, model.hidden, model.eps, normed + r * normed_stride);
  barrier.wait();
  const Matrix& m = model.head;
  product<false>(normed, normed_stride, count, m, m.panels * thread / threads, m.panels * (thread + 1) / threads,
                 [&](int64_t row, int64_t panel, Vec* sum) {
                   const int64_t left = m.n - panel * 16;
                   const __mmask16 mask = static_cast<__mmask16>(left >= 16 ? 0xffff : (1u << left) - 1);
                   _mm512_mask_storeu_ps(out + row * m.n + panel * 16, mask, *sum);
                 });
}

}  // namespace

extern const Isa HEADRACE_ISA;
const Isa HEADRACE_ISA = {HEADRACE_NAME, forward, logits};

}  // namespace headrace
