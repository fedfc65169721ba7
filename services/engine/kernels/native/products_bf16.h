// Rows times a packed bfloat16 weight: few rows at the speed of memory, many from registers.
#pragma once

#include "numbers.h"

namespace headrace {
namespace {

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
      for (int j = 0; j < NP; ++j) sum[u][i][j] = zero();
  int64_t p = 0;
  auto step = [&](int u, int64_t at) __attribute__((always_inline)) {
    Ints w[NP];
#pragma GCC unroll 4
    for (int j = 0; j < NP; ++j) w[j] = load_ints(b + j * panel + at * 32);
#pragma GCC unroll 4
    for (int j = 0; j < FETCH; ++j)
      fetch(next + j * panel + at * 32);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      int32_t two;
      std::memcpy(&two, a + i * lda + at * 2, 4);
      Ints x = splat_int(two);
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
      for (int u = 1; u < KU; ++u) out[j] = add(out[j], sum[u][i][j]);
    }
    end(i, out);
  }
}

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

// Panels from .. to of a product; end(row, panel, sum) for each panel, or for each pair of panels with PAIR.
template <bool PAIR, class End>
void product_bf16(const bf16* a, int64_t lda, int64_t rows, const Matrix& m, int64_t from, int64_t to, End&& end) {
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

}  // namespace
}  // namespace headrace
