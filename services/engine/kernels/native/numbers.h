// Sixteen numbers at a time: widening, rounding, dot products, exponentials. The file that is compiled says HEADRACE_BF16
// (1: the processor multiplies bfloat16; 0: it is widened to float32 first) and HEADRACE_VNNI (the same of bytes).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "stack.h"

namespace headrace {
namespace {

using Vec = __m512;

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

// Thirty-two bytes, exactly: the lower half of such a float32 is empty.
inline __m512i codes_to_bf16(__m256i codes) {
  alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  auto widened = [](__m128i half) { return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(half))); };
  return _mm512_permutex2var_epi16(widened(_mm256_castsi256_si128(codes)), _mm512_load_si512(kUpper),
                                   widened(_mm256_extracti128_si256(codes, 1)));
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

// sum += the products of four bytes, unsigned in a and signed in b, in each of sixteen places; exact either way.
inline __m512i dot_bytes(__m512i sum, __m512i a, __m512i b) {
#if HEADRACE_VNNI
  return _mm512_dpbusd_epi32(sum, a, b);
#else
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, _mm512_set1_epi16(255)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
  return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
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

}  // namespace
}  // namespace headrace
