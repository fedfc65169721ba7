// What is made of single numbers: widening, exponentials, gates.
#pragma once

#include "vector.h"

namespace headrace {
namespace {

inline float wide(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// e to the x; NaN stays NaN, anything below kLeastExponent is treated as that. Polynomial: Cephes, expf.
inline Vec exponential(Vec x) {
  x = max(splat(kLeastExponent), x);  // the second operand wins when one is NaN
  Vec n = nearest(mul(x, splat(1.44269504f)));
  Vec r = fnmadd(n, splat(0.693359375f), x);
  r = fnmadd(n, splat(-2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fmadd(p, r, splat(1.3981999507e-3f));
  p = fmadd(p, r, splat(8.3334519073e-3f));
  p = fmadd(p, r, splat(4.1665795894e-2f));
  p = fmadd(p, r, splat(1.6666665459e-1f));
  p = fmadd(p, r, splat(5.0000001201e-1f));
  p = fmadd(p, mul(r, r), add(r, splat(1.f)));
  return scale_by_power(p, n);
}

inline Vec silu(Vec x) {
  Vec e = exponential(sub(zero(), min(splat(88.f), x)));
  return div(x, add(e, splat(1.f)));
}

}  // namespace
}  // namespace headrace
