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

constexpr int64_t kAlone = 16;   // rows that every member prepares by itself rather than wait for the others
constexpr int64_t kPanelsAPiece = 8, kRowsAPiece = 16, kHeadsAPiece = 32;  // of a stage: what a member takes at a time

// What a product reads: rows of `data`, made of the hidden ones where there is a norm, as bytes where weights are bytes.
struct Source {
  const float* norm;
  bf16* data;
  int64_t stride, k;
};

void forward(const Model& model, const Step& step, const Scratch& scratch, Team& team, int member) {
  const int64_t tokens = step.tokens, hs = scratch.hidden_stride, dim = model.dim, width = model.heads * dim;
  char* own = scratch.private_part + scratch.private_bytes * member;
  bf16* normed = scratch.normed;
  Codes codes = scratch.codes;
  const bool alone = tokens <= kAlone;
  if (alone) normed += member * kAlone * hs, codes = codes.from(member * kAlone);
  auto each_row = [&](auto&& make) {
    team.stage(member, tokens, kRowsAPiece, Team::kEach, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t) make(t);
    });
  };
  auto make_row = [&](const Source& source, int64_t t) {
    bf16* row = source.data + t * source.stride;
    if (source.norm) normalise(scratch.hidden + t * hs, source.norm, model.hidden, model.eps, row);
    if (model.quantised) quantise(row, source.k, codes.from(t));
  };
  auto multiply = [&](auto pair, const Source& source, const Matrix& m, auto end) {
    constexpr bool PAIR = decltype(pair)::value;
    constexpr int64_t unit = PAIR ? 2 : 1;
    bool needed = source.norm || model.quantised;
    if (needed && !alone) each_row([&](int64_t t) { make_row(source, t); }), needed = false;
    const Rows rows{source.data, source.stride, codes};
    team.stage(member, m.panels / unit, kPanelsAPiece / unit, Team::kEach, [&](int64_t from, int64_t to) {
      if (needed)
        for (int64_t t = 0; t < tokens; ++t) make_row(source, t);
      needed = false;
      product<PAIR>(rows, tokens, m, from * unit, to * unit, decltype(end)(end));
    });
  };
  auto add_product = [&](bf16* data, int64_t stride, int64_t k, const Matrix& m) {
    multiply(std::false_type{}, Source{nullptr, data, stride, k}, m,
             [hidden = scratch.hidden, hs, &m](int64_t row, int64_t panel, Vec* sum) {
               float* out = hidden + row * hs + panel * 16;
               store(out, add(load(out), with_bias(m, panel, *sum)));
             });
  };
  each_row([&](int64_t t) { embed(model, step.token_ids[t], scratch.hidden + t * hs); });
  for (size_t index = 0; index < model.layers.size(); ++index) {
    const Layer& layer = model.layers[index];
    char* pool = step.kv[index];
    multiply(std::false_type{}, Source{layer.input_norm, normed, hs, model.hidden}, layer.qkv,
             [out = scratch.qkv, stride = scratch.qkv_stride, &m = layer.qkv](int64_t row, int64_t panel, Vec* sum) {
               store(out + row * stride + panel * 16, with_bias(m, panel, *sum));
             });
    const int64_t all = model.heads + 2 * model.kv_heads;
    int8_t* codes_of_one = reinterpret_cast<int8_t*>(own + dim * 2);
    team.stage(member, tokens * all, kHeadsAPiece, Team::kEach, [&](int64_t from, int64_t to) {
      for (int64_t item = from; item < to; ++item) {
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
    });
    team.stage(member, step.units.size(), 1, Team::kShared, [&](int64_t unit, int64_t) {
      (step.codes ? attend<true> : attend<false>)(model, step, scratch, pool, step.units[unit], own);
    });
    if (!step.merges.empty())
      team.stage(member, step.merges.size(), 1, Team::kShared, [&](int64_t at, int64_t) {
        merge(model, step, scratch, step.merges[at]);
      });
    add_product(scratch.attended, width, width, layer.output);
    multiply(std::true_type{}, Source{layer.post_norm, normed, hs, model.hidden}, layer.gate_up,
             [out = scratch.gated, stride = scratch.inner_stride](int64_t row, int64_t panel, Vec* sum) {
               store_bf16(out + row * stride + panel * 8, mul(silu(sum[0]), sum[1]));
             });
    add_product(scratch.gated, scratch.inner_stride, model.inner, layer.down);
  }
}

void logits(const Model& model, const float* hidden, int64_t stride, const int64_t* rows, int64_t count,
            const Scratch& scratch, float* out, Team& team, int member) {
  team.stage(member, count, kRowsAPiece, Team::kEach, [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r) {
      bf16* normed = scratch.normed + r * scratch.hidden_stride;
      normalise(hidden + rows[r] * stride, model.final_norm, model.hidden, model.eps, normed);
      if (model.quantised) quantise(normed, model.hidden, scratch.codes.from(r));
    }
  });
  const Matrix& m = model.head;
  const Rows given{scratch.normed, scratch.hidden_stride, scratch.codes};
  team.stage(member, m.panels, kPanelsAPiece, Team::kEach, [&](int64_t from, int64_t to) {
    product<false>(given, count, m, from, to, [&](int64_t row, int64_t panel, Vec* sum) {
      store_first(out + row * m.n + panel * 16, *sum, m.n - panel * 16);
    });
  });
}

}  // namespace

extern const Isa HEADRACE_ISA;
const Isa HEADRACE_ISA = {HEADRACE_NAME, forward, logits, HEADRACE_WIDTH == 512 ? sample_row_avx512 : sample_row_avx2};

}  // namespace headrace
