// Rows times a packed weight, whatever its format.
#pragma once

#include "products_bf16.h"
#include "products_int8.h"

namespace headrace {
namespace {

// Panels from .. to of a product; end(row, panel, sum) for each panel, or for each pair of panels with PAIR. A function of its
// own: inlined into the layers, its sums did not all stay in registers.
template <bool PAIR, class End>
__attribute__((noinline)) void product(const Rows& a, int64_t rows, const Matrix& m, int64_t from, int64_t to, End&& end) {
  if (m.bytes) {
    product_int8<PAIR>(a.codes, rows, m, from, to, end);
  } else {
    product_bf16<PAIR>(a.data, a.stride, rows, m, from, to, end);
  }
}

inline Vec with_bias(const Matrix& m, int64_t panel, Vec sum) {
  return m.bias ? add(sum, load(m.bias + panel * 16)) : sum;
}

}  // namespace
}  // namespace headrace
