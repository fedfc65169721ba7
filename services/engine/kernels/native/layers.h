// The stack of layers, written once and compiled for each instruction set: the includer defines HEADRACE_ISA (the name
// of its Isa), HEADRACE_NAME, and what vector.h asks for.
#pragma once

#include <algorithm>

#include "attention.h"
#include "pool.h"
#include "products.h"
#include "rows.h"

namespace headrace {
namespace {

constexpr int64_t kAlone = 16;  // rows that every thread prepares by itself rather than wait for the others

void forward(const Model& model, const Step& step, const Scratch& scratch, std::atomic<int>* tickets, Barrier& barrier,
             int thread, int threads) {
  const int64_t tokens = step.tokens, hs = scratch.hidden_stride, dim = model.dim, width = model.heads * dim;
  const int64_t begin = tokens * thread / threads, end = tokens * (thread + 1) / threads;
  char* own = scratch.private_part + scratch.private_bytes * thread;
  bf16* normed = scratch.normed;
  Codes codes = scratch.codes;
  const bool alone = tokens <= kAlone;
  if (alone) normed += thread * kAlone * hs, codes = codes.from(thread * kAlone);
  auto share = [&](const Matrix& m, int64_t unit, auto&& run) {
    const int64_t units = m.panels / unit;
    run(units * thread / threads * unit, units * (thread + 1) / threads * unit);
  };
  auto each_row = [&](auto&& make) {
    for (int64_t t = alone ? 0 : begin; t < (alone ? tokens : end); ++t) make(t);
    if (!alone) barrier.wait();
  };
  auto norm_rows = [&](const float* weight) {
    each_row([&](int64_t t) {
      normalise(scratch.hidden + t * hs, weight, model.hidden, model.eps, normed + t * hs);
      if (model.quantised) quantise(normed + t * hs, model.hidden, codes.from(t));
    });
    return Rows{normed, hs, codes};
  };
  auto rows_of = [&](const bf16* data, int64_t stride, int64_t k) {
    if (model.quantised) each_row([&](int64_t t) { quantise(data + t * stride, k, codes.from(t)); });
    return Rows{data, stride, codes};
  };
  auto add_product = [&](const Rows& a, const Matrix& m) {
    share(m, 1, [&](int64_t from, int64_t to) {
      product<false>(a, tokens, m, from, to, [&](int64_t row, int64_t panel, Vec* sum) {
        float* out = scratch.hidden + row * hs + panel * 16;
        store(out, add(load(out), with_bias(m, panel, *sum)));
      });
    });
    barrier.wait();
  };
  for (int64_t t = begin; t < end; ++t) embed(model, step.token_ids[t], scratch.hidden + t * hs);
  barrier.wait();
  for (size_t index = 0; index < model.layers.size(); ++index) {
    const Layer& layer = model.layers[index];
    char* pool = step.kv[index];
    const Rows before = norm_rows(layer.input_norm);
    share(layer.qkv, 1, [&](int64_t from, int64_t to) {
      product<false>(before, tokens, layer.qkv, from, to, [&](int64_t row, int64_t panel, Vec* sum) {
        store(scratch.qkv + row * scratch.qkv_stride + panel * 16, with_bias(layer.qkv, panel, *sum));
      });
    });
    barrier.wait();
    const int64_t all = model.heads + 2 * model.kv_heads;
    int8_t* codes_of_one = reinterpret_cast<int8_t*>(own + dim * 2);
    for (int64_t item = tokens * all * thread / threads; item < tokens * all * (thread + 1) / threads; ++item) {
      const int64_t t = item / all, head = item % all;
      float* x = scratch.qkv + t * scratch.qkv_stride + head * dim;
      const float *cos = model.cos + step.positions[t] * (dim / 2), *sin = model.sin + step.positions[t] * (dim / 2);
      if (head < model.heads) {
        rotate(x, layer.q_norm, model.eps, dim, cos, sin, scratch.query + t * width + head * dim);
      } else if (head < model.heads + model.kv_heads) {
        bf16* key = reinterpret_cast<bf16*>(own);
        rotate(x, layer.k_norm, model.eps, dim, cos, sin, key);
        if (step.codes) {
          encode_key(model, pool, step.block_size, step.slots[t], head - model.heads, key, codes_of_one);
        } else {
          write_key(model, pool, step.block_size, step.slots[t], head - model.heads, key);
        }
      } else if (step.codes) {
        encode_value(model, pool, step.block_size, step.slots[t], head - model.heads - model.kv_heads, x, codes_of_one);
      } else {
        write_value(model, pool, step.block_size, step.slots[t], head - model.heads - model.kv_heads, x);
      }
    }
    barrier.wait();
    const int units = static_cast<int>(step.units.size()), merges = static_cast<int>(step.merges.size());
    for (int u; (u = tickets[2 * index].fetch_add(1, std::memory_order_relaxed)) < units;)
      (step.codes ? attend<true> : attend<false>)(model, step, scratch, pool, step.units[u], own);
    barrier.wait();
    if (merges) {
      for (int u; (u = tickets[2 * index + 1].fetch_add(1, std::memory_order_relaxed)) < merges;)
        merge(model, step, scratch, step.merges[u]);
      barrier.wait();
    }
    add_product(rows_of(scratch.attended, width, width), layer.output);
    const Rows between = norm_rows(layer.post_norm);
    share(layer.gate_up, 2, [&](int64_t from, int64_t to) {
      product<true>(between, tokens, layer.gate_up, from, to, [&](int64_t row, int64_t panel, Vec* sum) {
        store_bf16(scratch.gated + row * scratch.inner_stride + panel * 8, mul(silu(sum[0]), sum[1]));
      });
    });
    barrier.wait();
    add_product(rows_of(scratch.gated, scratch.inner_stride, model.inner), layer.down);
  }
}

void logits(const Model& model, const float* hidden, int64_t stride, const int64_t* rows, int64_t count,
            const Scratch& scratch, float* out, Barrier& barrier, int thread, int threads) {
  for (int64_t r = count * thread / threads; r < count * (thread + 1) / threads; ++r) {
    bf16* normed = scratch.normed + r * scratch.hidden_stride;
    normalise(hidden + rows[r] * stride, model.final_norm, model.hidden, model.eps, normed);
    if (model.quantised) quantise(normed, model.hidden, scratch.codes.from(r));
  }
  barrier.wait();
  const Matrix& m = model.head;
  const Rows given{scratch.normed, scratch.hidden_stride, scratch.codes};
  product<false>(given, count, m, m.panels * thread / threads, m.panels * (thread + 1) / threads,
                 [&](int64_t row, int64_t panel, Vec* sum) {
                   store_first(out + row * m.n + panel * 16, *sum, m.n - panel * 16);
                 });
}

}  // namespace

extern const Isa HEADRACE_ISA;
const Isa HEADRACE_ISA = {HEADRACE_NAME, forward, logits, HEADRACE_WIDTH == 512 ? sample_row_avx512 : sample_row_avx2};

}  // namespace headrace
