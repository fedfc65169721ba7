// What the stack of layers is made of, without torch: the ops fill it in, an instruction set computes it.
//
// T tokens of a step, S sequences, Hq query and Hkv key/value heads, D dimensions a head. Packed weights are
// [N / 16][K / 2][16][2] bfloat16 or [N / 16][K / 4][16][4] bytes: sixteen outputs side by side, neighbours of the sum
// together, because that is what one dot-product instruction reads. A panel is sixteen outputs. Rows of scratch are
// padded to whole vectors, so only logits are masked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sampler.h"
#include "team.h"

namespace headrace {

using bf16 = uint16_t;

// Inputs of a sum that share a scale where weights and activations are bytes: one output of one row has k / 64 scales.
constexpr int64_t kGroup = 64;

// A packed [n, k] weight: bfloat16, or bytes with a scale for each output and group of inputs.
struct Matrix {
  const bf16* data = nullptr;
  const uint8_t* bytes = nullptr;  // the value divided by its scale, plus 128; inputs padded to fours with 128
  const bf16* scales = nullptr;    // [panels][groups][16]
  const float* bias = nullptr;  // [panels * 16], or none
  int64_t n = 0;                // outputs
  int64_t k = 0;                // inputs, even
  int64_t panels = 0;           // rounded up

  int64_t groups() const { return (k + kGroup - 1) / kGroup; }
  int64_t panel_bytes() const { return (k + 3) / 4 * 64; }  // of `bytes`
};

// Rows of activations as bytes.
struct Codes {
  int8_t* data = nullptr;      // [rows, stride], from -127 to 127
  float* scales = nullptr;     // [rows, group_stride]
  int32_t* offsets = nullptr;  // [rows, group_stride]: -128 times the sum of a group; takes the weights' 128 back
  int64_t stride = 0, group_stride = 0;

  Codes from(int64_t row) const {
    return {data + row * stride, scales + row * group_stride, offsets + row * group_stride, stride, group_stride};
  }
};

// Rows that are multiplied with a weight, in the form that the weight asks for.
struct Rows {
  const bf16* data = nullptr;
  int64_t stride = 0;
  Codes codes;
};

struct Layer {
  Matrix qkv, output, gate_up, down;  // gate_up: a panel of gates, the panel of the same ups, and so on
  const float *input_norm = nullptr, *post_norm = nullptr;
  const float *q_norm = nullptr, *k_norm = nullptr;  // [D], or none
};

struct Model {
  int64_t hidden = 0, heads = 0, kv_heads = 0, dim = 0, inner = 0, vocab = 0, length = 0;
  float eps = 0;
  std::vector<Layer> layers;
  Matrix head;
  const bf16* embedding = nullptr;  // [vocab, hidden]; none: the head's rows are the embedding
  const float* final_norm = nullptr;
  const float *cos = nullptr, *sin = nullptr;  // [length, D / 2], unsigned
  bool quantised = false;                      // all weights but the embedding are bytes

  int64_t group() const { return heads / kv_heads; }
};

// Queries q0 .. q0 + count of a sequence, with one key/value head, over the places kv0 .. kv1.
struct Unit {
  int32_t sequence, head, q0, count, kv0, kv1;
  int32_t partial;  // first row of its partial results; -1: it is the only unit of its queries
};

// Rows whose context was split: their partial results become one.
struct Merge {
  int32_t sequence, head, q0, count, parts, partial;
};

struct Step {
  int64_t tokens = 0, sequences = 0, block_size = 0, table_width = 0;
  const int32_t *token_ids = nullptr, *positions = nullptr, *slots = nullptr;
  const int32_t *query_starts = nullptr, *context_lens = nullptr, *tables = nullptr;
  std::vector<char*> kv;  // a pool a layer, N blocks as in pool.h
  bool codes = false;     // keys and values are bytes with a scale for each slot and head
  std::vector<Unit> units;
  std::vector<Merge> merges;
};

// Scratch of one step, row strides in elements.
struct Scratch {
  float* hidden = nullptr;  // [T, hidden_stride]
  bf16* normed = nullptr;   // [T, hidden_stride]
  float* qkv = nullptr;     // [T, qkv_stride]
  bf16* query = nullptr;    // [T, Hq * D]
  bf16* attended = nullptr; // [T, Hq * D]
  bf16* gated = nullptr;    // [T, inner_stride]
  Codes codes;              // what the next product reads, where weights are bytes
  float* partials = nullptr; // [rows, D + 2]: sum, maximum, total
  char* private_part = nullptr;
  int64_t private_bytes = 0;  // a thread
  int64_t hidden_stride = 0, qkv_stride = 0, inner_stride = 0;
};

constexpr int64_t kScaleBytes = 4;  // of the numbers of one head in one slot, where they are codes

constexpr int64_t kQueryRows = 96;  // rows (queries times group) that share one reading of the context
constexpr int64_t kPlaces = 64;     // of the context that are scored at a time

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Bytes that one thread needs for attention.
inline int64_t private_bytes(int64_t dim, int64_t rows, bool codes) {
  const int64_t count = rows * (dim * 6 + kPlaces * 6 + 8) + (codes ? kPlaces * (dim * 4 + 8) : 0);
  return round_up(count + 1024, 4096);
}

// One instruction set's way through it. Every member of the team calls the same with its own index.
struct Isa {
  const char* name;
  void (*forward)(const Model&, const Step&, const Scratch&, Team&, int member);
  void (*logits)(const Model&, const float* hidden, int64_t stride, const int64_t* rows, int64_t count,
                 const Scratch&, float* out, Team&, int member);
  SampleRow* sample_row;
};

extern const Isa kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16;

}  // namespace headrace
