// What is done to one row by itself: its embedding, its normalisation, the rotation of its heads.
#pragma once

#include <cmath>

#include "numbers.h"

namespace headrace {
namespace {

// Root-mean-square normalisation (Zhang and Sennrich, 2019) of n floats into bfloat16.
void normalise(const float* x, const float* weight, int64_t n, float eps, bf16* out) {
  Vec sum = zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    Vec v = load(x + i);
    sum = fmadd(v, v, sum);
  }
  const int64_t tail = n - i;
  Vec rest = load_first(x + i, tail);
  sum = fmadd(rest, rest, sum);
  const Vec scale = splat(1.f / std::sqrt(sum_of(sum) / static_cast<float>(n) + eps));
  for (i = 0; i + 16 <= n; i += 16)
    store_bf16(out + i, mul(mul(load(x + i), scale), load(weight + i)));
  if (tail) store_bf16(out + i, mul(mul(rest, scale), load_first(weight + i, tail)));
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
    const int64_t n = half - d;
    Vec a = load_first(x + d, n), b = load_first(x + half + d, n), c = load_first(cos + d, n), s = load_first(sin + d, n);
    Vec first = fmsub(a, c, mul(b, s)), second = fmadd(b, c, mul(a, s));
    store_bf16_first(out + d, first, n);
    store_bf16_first(out + half + d, second, n);
  }
}

// One token's row of the embedding, or of the packed head that serves as one.
void embed(const Model& model, int64_t token, float* out) {
  const int64_t n = model.hidden, panel = token / 16, column = token % 16;
  const Matrix& head = model.head;
  if (model.embedding) {
    for (int64_t i = 0; i < n; ++i) out[i] = wide(model.embedding[token * n + i]);
  } else if (head.bytes) {
    const uint8_t* bytes = head.bytes + panel * head.panel_bytes() + column * 4;
    const bf16* scales = head.scales + panel * head.groups() * 16 + column;
    for (int64_t i = 0; i < n; ++i)
      out[i] = static_cast<float>(bytes[i / 4 * 64 + i % 4] - 128) * wide(scales[i / kGroup * 16]);
  } else {
    const bf16* row = head.data + panel * (n / 2) * 32 + column * 2;
    for (int64_t i = 0; i < n; i += 2) {
      out[i] = wide(row[i * 16]);
      out[i + 1] = wide(row[i * 16 + 1]);
    }
  }
}

}  // namespace
}  // namespace headrace
