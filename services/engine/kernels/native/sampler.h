// Choosing the tokens of rows of logits: what is asked of a row, and what comes of it. The arithmetic is that of
// services/engine/sampler.py and drawing.py, operation by operation, so that both choose the same tokens.
#pragma once

#include <cstdint>

namespace headrace {

// What one row asks for. Arrays are the caller's.
struct Draw {
  float* logits;             // [vocab]; overwritten
  double temperature;        // 0: the most likely token, without a draw
  double top_p, lowest;      // lowest: log of min_p; no token further below the peak is kept
  float repetition, presence, frequency;
  int64_t seed, position;    // of the draw
  int64_t top_k;             // 0 or less: off
  int64_t explained;         // most likely tokens to tell; -1: no log probabilities
  const int32_t *biased, *allowed, *banned, *tokens;  // ids; tokens: prompt, then output
  const float* biases;
  int64_t biased_count, allowed_count, banned_count, token_count, prompt_count;
  bool only_allowed;
};

// Where the answer goes; the last three only where log probabilities are asked for.
struct Choice {
  int32_t* token;  // or, below zero, why there is none
  float* logprob;
  int32_t* top_ids;
  float* top_logprobs;
};

constexpr int32_t kNotFinite = -1, kNothingLeft = -2, kOutside = -3;

using SampleRow = void(const Draw& draw, int64_t vocab, const Choice& choice);
SampleRow sample_row_avx512, sample_row_avx2;

}  // namespace headrace
