// Weights of a model as the loops read them: checked, packed, owned. Computes nothing.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "region.h"

namespace headrace {

// Packed weights of one model, and the scratch of the step that is being computed. One step at a time.
struct Stack : torch::CustomClassHolder {
  Stack(c10::List<int64_t> shape, double eps, at::Tensor cos, at::Tensor sin, bool tied, bool quantised)
      : cos_(cos), sin_(sin) {
    TORCH_CHECK(shape.size() == 7, "seven sizes were expected");
    model.hidden = shape[0], model.heads = shape[1], model.kv_heads = shape[2], model.dim = shape[3];
    model.inner = shape[4], model.vocab = shape[5], layer_count_ = shape[6];
    model.eps = static_cast<float>(eps), model.quantised = quantised;
    TORCH_CHECK(model.dim % 16 == 0 && model.hidden % 2 == 0 && model.inner % 2 == 0, "a shape that cannot be packed");
    TORCH_CHECK(cos.scalar_type() == at::kFloat && cos.is_contiguous() && sin.is_contiguous() && cos.dim() == 2 &&
                    cos.sizes() == sin.sizes() && cos.size(1) == model.dim / 2,
                "cos and sin must be [length, D / 2] float32");
    model.length = cos.size(0);
    model.cos = cos.const_data_ptr<float>(), model.sin = sin.const_data_ptr<float>();
    const int64_t width = model.heads * model.dim, all = width + 2 * model.kv_heads * model.dim;
    auto size = [&](int64_t n, int64_t k) {
      const int64_t each = quantised ? round_up(k, 4) + (k + kGroup - 1) / kGroup * 2 : k * 2;  // of an output
      return round_up(n, 16) * (each + 4) + 192;
    };
    const int64_t layer = size(all, model.hidden) + size(model.hidden, width) + 2 * size(model.inner, model.hidden) +
                          size(model.hidden, model.inner) + 8 * (model.hidden + 2 * model.dim) + 256;
    const int64_t ends = size(model.vocab, model.hidden) + 4 * model.hidden + 64;
    weights_.allocate(layer_count_ * layer + ends + (tied ? 0 : model.vocab * model.hidden * 2 + 64));
  }

  void add_layer(at::Tensor qkv, std::optional<at::Tensor> qkv_bias, std::optional<at::Tensor> q_norm,
                 std::optional<at::Tensor> k_norm, at::Tensor output, std::optional<at::Tensor> output_bias,
                 at::Tensor gate_up, at::Tensor down, at::Tensor input_norm, at::Tensor post_norm) {
    TORCH_CHECK(static_cast<int64_t>(model.layers.size()) < layer_count_, "too many layers");
    const int64_t width = model.heads * model.dim;
    Layer layer;
    layer.input_norm = floats(input_norm, model.hidden);
    layer.qkv = pack(qkv, width + 2 * model.kv_heads * model.dim, model.hidden, qkv_bias);
    if (q_norm) layer.q_norm = floats(*q_norm, model.dim);
    if (k_norm) layer.k_norm = floats(*k_norm, model.dim);
    layer.output = pack(output, model.hidden, width, output_bias);
    layer.post_norm = floats(post_norm, model.hidden);
    layer.gate_up = pack(gate_up, 2 * model.inner, model.hidden, {}, true);
    layer.down = pack(down, model.hidden, model.inner, {});
    model.layers.push_back(layer);
  }

  // The embedding is none where it is the same matrix as the head.
  void add_ends(at::Tensor head, std::optional<at::Tensor> embedding, at::Tensor final_norm) {
    model.final_norm = floats(final_norm, model.hidden);
    model.head = pack(head, model.vocab, model.hidden, {});
    if (embedding) {
      const bf16* from = source(*embedding, model.vocab, model.hidden);
      bf16* to = weights_.take<bf16>(model.vocab * model.hidden);
      std::copy(from, from + model.vocab * model.hidden, to);
      model.embedding = to;
    }
  }

  int64_t weight_bytes() const { return weights_.used(); }

  // Memory of at least so many bytes, until the next call.
  Region& scratch(int64_t bytes) {
    if (bytes > scratch_bytes_) scratch_.allocate(scratch_bytes_ = bytes);
    scratch_.rewind();
    return scratch_;
  }

  Model model;

 private:
  const bf16* source(const at::Tensor& t, int64_t n, int64_t k) {
    TORCH_CHECK(t.scalar_type() == at::kBFloat16 && t.is_contiguous() && t.dim() == 2 && t.size(0) == n && t.size(1) == k,
                "a [", n, ", ", k, "] contiguous bfloat16 weight was expected");
    return reinterpret_cast<const bf16*>(t.const_data_ptr<at::BFloat16>());
  }

  const float* floats(const at::Tensor& t, int64_t n) {
    TORCH_CHECK(t.numel() == n, n, " numbers were expected");
    auto wide = t.to(at::kFloat).contiguous();
    float* to = weights_.take<float>(round_up(n, 16));
    std::copy_n(wide.const_data_ptr<float>(), n, to);
    return to;
  }

  // One output's k weights, group by group: the largest of a group becomes 127 beside its 128.
  static void quantise_output(const bf16* row, int64_t k, uint8_t* bytes, bf16* scales) {
    for (int64_t from = 0; from < k; from += kGroup) {
      const int64_t end = std::min(k, from + kGroup);
      float largest = 0;
      for (int64_t i = from; i < end; ++i) largest = std::max(largest, std::abs(c10::detail::f32_from_bits(row[i])));
      const c10::BFloat16 scale(largest / 127.f);
      scales[from / kGroup * 16] = scale.x;
      const float inverse = scale == 0.f ? 0.f : 1.f / static_cast<float>(scale);
      for (int64_t i = from; i < end; ++i)
        bytes[i / 4 * 64 + i % 4] = static_cast<uint8_t>(
            128.f + std::clamp(std::nearbyint(c10::detail::f32_from_bits(row[i]) * inverse), -127.f, 127.f));
    }
  }

  // With interleave, panel 2i holds rows of the first half, panel 2i + 1 the same of the second.
  Matrix pack(const at::Tensor& t, int64_t n, int64_t k, const std::optional<at::Tensor>& bias, bool interleave = false) {
    const bf16* from = source(t, n, k);
    Matrix m;
    m.n = n, m.k = k;
    const int64_t half = n / 2, half_panels = (half + 15) / 16;
    m.panels = interleave ? 2 * half_panels : (n + 15) / 16;
    bf16* whole = model.quantised ? nullptr : weights_.take<bf16>(m.panels * 16 * k);
    uint8_t* bytes = model.quantised ? weights_.take<uint8_t>(m.panels * m.panel_bytes()) : nullptr;
    bf16* scales = model.quantised ? weights_.take<bf16>(m.panels * m.groups() * 16) : nullptr;
    m.data = whole, m.bytes = bytes, m.scales = scales;
    if (bytes) std::fill_n(bytes, m.panels * m.panel_bytes(), 128);
    at::parallel_for(0, m.panels, 16, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p)
        for (int64_t c = 0; c < 16; ++c) {
          const int64_t inside = interleave ? p / 2 * 16 + c : p * 16 + c;
          if (inside >= (interleave ? half : n)) continue;
          const bf16* row = from + (interleave && p % 2 ? half + inside : inside) * k;
          if (bytes) {
            quantise_output(row, k, bytes + p * m.panel_bytes() + c * 4, scales + p * m.groups() * 16 + c);
          } else {
            for (int64_t i = 0; i < k; ++i) whole[p * 16 * k + i / 2 * 32 + c * 2 + i % 2] = row[i];
          }
        }
    });
    if (bias) {
      TORCH_CHECK(bias->numel() == n, "a bias of ", n, " was expected");
      auto wide = bias->to(at::kFloat).contiguous();
      float* b = weights_.take<float>(m.panels * 16);
      std::copy_n(wide.const_data_ptr<float>(), n, b);
      m.bias = b;
    }
    return m;
  }

  at::Tensor cos_, sin_;
  int64_t layer_count_ = 0, scratch_bytes_ = 0;
  Region weights_, scratch_;
};

}  // namespace headrace
