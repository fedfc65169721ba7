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
    Vec values[kGroup / 16], top = zero();
    bool broken = false;
#pragma GCC unroll 4
    for (int i = 0; i < kGroup / 16; ++i) {
      values[i] = load_bf16_first(x + from + i * 16, count - i * 16);
      broken |= has_nan(values[i]);
      top = max(top, abs(values[i]));
    }
    const float largest = broken ? NAN : largest_of(top);
    const Vec inverse = splat(largest > 1e-30f ? 127.f / largest : 0.f);
    Ints sum = splat_int(0);
#pragma GCC unroll 4
    for (int i = 0; i < kGroup / 16; ++i) {
      const Ints code = to_ints(mul(values[i], inverse));
      sum = add_ints(sum, code);
      store_codes(out.data + from + i * 16, code);
    }
    out.scales[g] = largest / 127.f;
    out.offsets[g] = -128 * sum_of_ints(sum);
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
    for (int j = 0; j < NP; ++j) sum[i][j] = zero();
  for (int64_t g = 0; g < groups; ++g) {
    Ints part[MR][NP];
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
      for (int j = 0; j < NP; ++j) part[i][j] = splat_int(a.offsets[i * a.group_stride + g]);
    const int64_t begin = g * kGroup / 4, stop = std::min(begin + kGroup / 4, bytes / 64);
#pragma GCC unroll 2
    for (int64_t s = begin; s < stop; ++s) {
      Ints v[NP];
#pragma GCC unroll 2
      for (int j = 0; j < NP; ++j) v[j] = load_ints(w + j * bytes + s * 64);
#pragma GCC unroll 2
      for (int j = 0; j < FETCH; ++j) fetch(next + j * bytes + s * 64);
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        int32_t four;
        std::memcpy(&four, a.data + i * a.stride + s * 4, 4);
        const Ints x = splat_int(four);
#pragma GCC unroll 2
        for (int j = 0; j < NP; ++j) part[i][j] = dot_bytes(part[i][j], v[j], x);
      }
    }
#pragma GCC unroll 2
    for (int j = 0; j < NP; ++j) {
      const Vec of_weight = load_bf16(scales + (j * groups + g) * 16);
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i)
        sum[i][j] = fmadd(mul(to_floats(part[i][j]), of_weight), splat(a.scales[i * a.group_stride + g]), sum[i][j]);
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
