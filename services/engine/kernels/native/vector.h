// Sixteen numbers at a time, on processors with 512 or with 256 bits: all that the loops ask of an instruction set. The
// file that is compiled says HEADRACE_WIDTH, HEADRACE_BF16 (1: the processor multiplies bfloat16; 0: it is widened to
// float32 first) and HEADRACE_VNNI (the same of bytes). With 256 bits both are 0.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "stack.h"

namespace headrace {
namespace {

#if HEADRACE_WIDTH == 512

using Vec = __m512;
using Ints = __m512i;

inline __mmask16 first_lanes(int64_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1);
}

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
// Of the first n lanes alone, none to all; the others are zero.
inline Vec load_first(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store_first(float* p, Vec x, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
inline Vec first_or(Vec x, int64_t n, Vec other) { return _mm512_mask_blend_ps(first_lanes(n), other, x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fmadd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fmsub(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }
inline Vec fnmadd(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
// Of a NaN and a number, the second.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec abs(Vec x) { return _mm512_abs_ps(x); }
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, 8); }
// x times 2 to the n, a whole number of at least kLeastPower.
inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
constexpr float kLeastExponent = -100.f;
inline float largest_of(Vec x) { return _mm512_reduce_max_ps(x); }
inline float sum_of(Vec x) { return _mm512_reduce_add_ps(x); }
inline bool has_nan(Vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }

inline Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline Ints load_halves(const void* low, const void* high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(low))),
                            _mm256_loadu_si256(static_cast<const __m256i*>(high)), 1);
}
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Vec to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints to_ints(Vec x) { return _mm512_cvtps_epi32(x); }
inline int32_t sum_of_ints(Ints x) { return _mm512_reduce_add_epi32(x); }
inline void store_codes(int8_t* p, Ints x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x)); }

inline Vec widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline Vec load_bf16(const bf16* p) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load_bf16_first(const bf16* p, int64_t n) { return widened(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }

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
inline void store_bf16_first(bf16* p, Vec x, int64_t n) { _mm256_mask_storeu_epi16(p, first_lanes(n), to_bf16(x)); }

// To every other place from p on, or from the one after it; those between stay as they are.
inline void store_bf16_apart(bf16* p, Vec x, bool second) {
  const __m512i wide = _mm512_cvtepu16_epi32(to_bf16(x));
  if (second) {
    _mm512_mask_storeu_epi16(p, 0xaaaaaaaau, _mm512_slli_epi32(wide, 16));
  } else {
    _mm512_mask_storeu_epi16(p, 0x55555555u, wide);
  }
}

// Thirty-two codes as bfloat16, exactly: the lower half of such a float32 is empty.
inline void widen_codes(const int8_t* codes, bf16* out) {
  alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  auto half = [&](int at) {
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + at));
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(some)));
  };
  _mm512_storeu_si512(out, _mm512_permutex2var_epi16(half(0), _mm512_load_si512(kUpper), half(16)));
}

// sum += a.low * b.low + a.high * b.high in each of sixteen places, all bfloat16.
inline Vec dot(Vec sum, Ints a, Ints b) {
#if HEADRACE_BF16
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
#endif
}

// sum += the products of four bytes, unsigned in a and signed in b, in each of sixteen places; exact either way.
inline Ints dot_bytes(Ints sum, Ints a, Ints b) {
#if HEADRACE_VNNI
  return _mm512_dpbusd_epi32(sum, a, b);
#else
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, _mm512_set1_epi16(255)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
  return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
#endif
}

// Rows of a tile, and panels; in 32 registers of sixteen numbers.
constexpr int kRows = 6, kPanels = 4;  // many rows of bfloat16: 24 sums, 4 weights, 1 input
constexpr int kFewRows = 8;            // that are computed at the speed of memory
constexpr int kRowsInt8 = 6;           // two panels: 12 sums of a group, 12 of all, 2 weights, 1 input
constexpr int kQueries = 6;            // of attention: 24 sums, 4 keys or values, 1 query or weight

#else

struct Vec {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};

inline __m256i lanes(int64_t n) {  // of eight
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.low), _mm256_storeu_ps(p + 8, x.high); }
inline Vec load_first(const float* p, int64_t n) {
  return {_mm256_maskload_ps(p, lanes(n)), _mm256_maskload_ps(p + 8, lanes(n - 8))};
}
inline void store_first(float* p, Vec x, int64_t n) {
  _mm256_maskstore_ps(p, lanes(n), x.low), _mm256_maskstore_ps(p + 8, lanes(n - 8), x.high);
}
inline Vec first_or(Vec x, int64_t n, Vec other) {
  return {_mm256_blendv_ps(other.low, x.low, _mm256_castsi256_ps(lanes(n))),
          _mm256_blendv_ps(other.high, x.high, _mm256_castsi256_ps(lanes(n - 8)))};
}
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Vec fmadd(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Vec fmsub(Vec a, Vec b, Vec c) {
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
inline Vec fnmadd(Vec a, Vec b, Vec c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Vec abs(Vec x) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Vec nearest(Vec x) {
  constexpr int kHow = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, kHow), _mm256_round_ps(x.high, kHow)};
}
inline Vec scale_by_power(Vec x, Vec n) {
  auto power = [](__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  };
  return {_mm256_mul_ps(x.low, power(n.low)), _mm256_mul_ps(x.high, power(n.high))};
}
constexpr float kLeastExponent = -87.f;  // below, the power would be subnormal
inline float largest_of(Vec x) {
  __m256 of = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(of), _mm256_extractf128_ps(of, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline float sum_of(Vec x) {
  __m256 of = _mm256_add_ps(x.low, x.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(of), _mm256_extractf128_ps(of, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline bool has_nan(Vec x) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q),
                                         _mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q))) != 0;
}

inline Ints splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints load_halves(const void* low, const void* high) {
  return {_mm256_loadu_si256(static_cast<const __m256i*>(low)), _mm256_loadu_si256(static_cast<const __m256i*>(high))};
}
inline Ints load_ints(const void* p) { return load_halves(p, static_cast<const char*>(p) + 32); }
inline Ints add_ints(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Ints bit_and(Ints a, Ints b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
inline Vec to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline Ints to_ints(Vec x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
inline int32_t sum_of_ints(Ints x) {
  alignas(32) int32_t each[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(each), _mm256_add_epi32(x.low, x.high));
  int32_t sum = 0;
  for (int32_t one : each) sum += one;
  return sum;
}
inline void store_codes(int8_t* p, Ints x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0b11011000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

inline Vec load_bf16(const bf16* p) {
  auto half = [](const bf16* at) {
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(some), 16));
  };
  return {half(p), half(p + 8)};
}
inline Vec load_bf16_first(const bf16* p, int64_t n) {
  bf16 some[16] = {};
  if (n > 0) std::memcpy(some, p, (n < 16 ? n : 16) * 2);
  return load_bf16(some);
}

inline __m256i to_bf16(Vec x) {
  auto rounded = [](__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), nan), 16);
  };
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(x.low), rounded(x.high)), 0b11011000);
}

inline void store_bf16(bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }
inline void store_bf16_first(bf16* p, Vec x, int64_t n) {
  bf16 some[16];
  store_bf16(some, x);
  if (n > 0) std::memcpy(p, some, (n < 16 ? n : 16) * 2);
}
inline void store_bf16_apart(bf16* p, Vec x, bool second) {
  bf16 some[16];
  store_bf16(some, x);
  for (int i = 0; i < 16; ++i) p[2 * i + second] = some[i];
}

inline void widen_codes(const int8_t* codes, bf16* out) {
  auto eight = [&](int at) {
    const __m128i some = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + at));
    return _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(some))), 16);
  };
  for (int at = 0; at < 32; at += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + at),
                        _mm256_permute4x64_epi64(_mm256_packus_epi32(eight(at), eight(at + 8)), 0b11011000));
}

inline Vec dot(Vec sum, Ints a, Ints b) {
  auto half = [](__m256 sum, __m256i a, __m256i b) __attribute__((always_inline)) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), sum);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high)),
                           sum);
  };
  return {half(sum.low, a.low, b.low), half(sum.high, a.high, b.high)};
}

inline Ints dot_bytes(Ints sum, Ints a, Ints b) {
  auto half = [](__m256i sum, __m256i a, __m256i b) __attribute__((always_inline)) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
  };
  return {half(sum.low, a.low, b.low), half(sum.high, a.high, b.high)};
}

// As above; in 16 registers of eight numbers.
constexpr int kRows = 2, kPanels = 2, kFewRows = 2, kRowsInt8 = 2, kQueries = 1;

#endif

inline void fetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace
}  // namespace headrace
