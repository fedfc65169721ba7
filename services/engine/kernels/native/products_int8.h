// Rows times a packed weight of bytes: exact sums of a group of inputs, scaled and added in float32. The order of the
// groups is the same for any number of rows, so a row's result does not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <cmath>

#include "numbers.h"

namespace headrace {
namespace {

// n numbers of one row, group by group, the last one filled up with zeros: the largest of a group becomes 127. The scale of
// a group with a NaN is one too.
void quantise(const bf16* x, int64_t n, const Codes& out) {
  for (int64_t g = 0; g * kGroup < n; ++g) {
    const int64_t from = g * kGroup, count = std::min(kGroup, n - from);
    Vec values[kGroup / 16], top = _mm512_setzero_ps();
    __mmask16 broken = 0;
#pragma GCC unroll 4
    for (int i = 0; i < kGroup / 16; ++i) {
      const int64_t left = count - i * 16;
      const __mmask16 mask = static_cast<__mmask16>(left >= 16 ? 0xffff : left <= 0 ? 0 : (1u << left) - 1);
      values[i] = _mm512_castsi512_ps(
          _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x + from + i * 16)), 16));
      broken |= _mm512_cmp_ps_mask(values[i], values[i], _CMP_UNORD_Q);
      top = _mm512_max_ps(top, _mm512_abs_ps(values[i]));
    }
    const float largest = broken ? NAN : _mm512_reduce_max_ps(top);
    const Vec inverse = _mm512_set1_ps(largest > 1e-30f ? 127.f / largest : 0.f);
    __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int i = 0; i < kGroup / 16; ++i) {
      const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(values[i], inverse));
      sum = _mm512_add_epi32(sum, code);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out.data + from + i * 16), _mm512_cvtsepi32_epi8(code));
    }
    out.scales[g] = largest / 127.f;
    out.offsets[g] = -128 * _mm512_reduce_add_epi32(sum);
  }
}

// MR rows times NP panels. With FETCH, as many panels from `next` on are brought into the cache meanwhile.
template <int MR, int NP, int FETCH, class End>
inline __attribute__((always_inline)) void tile_int8(const Codes& a, const Matrix& m, int64_t panel, const uint8_t* next,
                                                     End&& end) {
  const int64_t bytes = m.panel_bytes(), groups = m.groups();
  const uint8_t* w = m.bytes + panel * bytes;
  const bf16* scales = m.scales + panel * groups * 16;
  Vec sum[MR][NP];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < NP; ++j) sum[i][j] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m512i part[MR][NP];
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
      for (int j = 0; j < NP; ++j) part[i][j] = _mm512_set1_epi32(a.offsets[i * a.group_stride + g]);
    const int64_t begin = g * kGroup / 4, stop = std::min(begin + kGroup / 4, bytes / 64);
#pragma GCC unroll 2
    for (int64_t s = begin; s < stop; ++s) {
      __m512i v[NP];
#pragma GCC unroll 2
      for (int j = 0; j < NP; ++j) v[j] = _mm512_load_si512(w + j * bytes + s * 64);
#pragma GCC unroll 2
      for (int j = 0; j < FETCH; ++j) _mm_prefetch(reinterpret_cast<const char*>(next + j * bytes + s * 64), _MM_HINT_T0);
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        int32_t four;
        std::memcpy(&four, a.data + i * a.stride + s * 4, 4);
        const __m512i x = _mm512_set1_epi32(four);
#pragma GCC unroll 2
        for (int j = 0; j < NP; ++j) part[i][j] = dot_bytes(part[i][j], v[j], x);
      }
    }
#pragma GCC unroll 2
    for (int j = 0; j < NP; ++j) {
      const Vec of_weight = load_bf16(scales + (j * groups + g) * 16);
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i)
        sum[i][j] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(part[i][j]), of_weight),
                                    _mm512_set1_ps(a.scales[i * a.group_stride + g]), sum[i][j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) end(i, sum[i]);
}

// The last, fewer rows of a tile.
template <int MR, int NP, int FETCH, class End>
inline void few_rows_int8(int64_t rows, const Codes& a, const Matrix& m, int64_t panel, const uint8_t* next, End&& end) {
  if constexpr (MR > 0) {
    if (rows == MR) {
      tile_int8<MR, NP, FETCH>(a, m, panel, next, end);
    } else {
      few_rows_int8<MR - 1, NP, FETCH>(rows, a, m, panel, next, end);
    }
  }
}

constexpr int kRowsInt8 = 6;  // of a tile: 12 sums of a group, 12 of all, 2 weights, 1 input in 32 registers

// Any rows times NP panels; end(row, out[NP]). The first tiles fetch the panels after these.
template <int NP, class End>
void column_int8(const Codes& a, int64_t rows, const Matrix& m, int64_t panel, End&& end) {
  const uint8_t* next = m.bytes + (panel + NP) * m.panel_bytes();
  int64_t i = 0;
  auto here = [&](int r, Vec* out) { end(i + r, out); };
  if (rows >= NP * kRowsInt8) {
    for (int64_t j = 0; j < NP; ++j, i += kRowsInt8)
      tile_int8<kRowsInt8, NP, 1>(a.from(i), m, panel, next + j * m.panel_bytes(), here);
  } else if (rows >= kRowsInt8) {
    tile_int8<kRowsInt8, NP, NP>(a, m, panel, next, here);
    i += kRowsInt8;
  } else {
    few_rows_int8<kRowsInt8 - 1, NP, NP>(rows, a, m, panel, next, here);
    return;
  }
  for (; i + kRowsInt8 <= rows; i += kRowsInt8) tile_int8<kRowsInt8, NP, 0>(a.from(i), m, panel, next, here);
  if (i < rows) few_rows_int8<kRowsInt8 - 1, NP, 0>(rows - i, a.from(i), m, panel, next, here);
}

// Panels from .. to of a product; end(row, panel, sum) for each panel, or for each pair of panels with PAIR.
template <bool PAIR, class End>
void product_int8(const Codes& a, int64_t rows, const Matrix& m, int64_t from, int64_t to, End&& end) {
  int64_t j = from;
  for (; j + 2 <= to; j += 2)
    column_int8<2>(a, rows, m, j, [&](int64_t r, Vec* out) {
      end(r, j, out);
      if constexpr (!PAIR) end(r, j + 1, out + 1);
    });
  if constexpr (!PAIR)
    if (j < to) column_int8<1>(a, rows, m, j, [&](int64_t r, Vec* out) { end(r, j, out); });
}

}  // namespace
}  // namespace headrace
