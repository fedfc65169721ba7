// The sampler as an operator: checks what tensors hold, takes rows apart, shares them out among threads.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <tuple>

#include "sampler.h"

namespace headrace {
namespace {

// Columns of `numbers`, `counts` and `ends`; native_sampler.py writes them.
enum Number { kTemperature, kTopP, kLowest, kRepetition, kPresence, kFrequency, kNumbers };
enum Count { kSeed, kPosition, kTopK, kExplained, kPromptCount, kOnlyAllowed, kCounts };
enum List { kBiased, kAllowed, kBanned, kTokens, kLists };

template <class T>
const T* table(const at::Tensor& t, const char* name, int64_t rows, int64_t columns) {
  TORCH_CHECK(t.scalar_type() == c10::CppTypeToScalarType<T>::value && t.is_contiguous() && t.dim() == 2 &&
                  t.size(0) == rows && t.size(1) == columns,
              name, " must be contiguous [", rows, ", ", columns, "] of the right type");
  return t.const_data_ptr<T>();
}

// Tokens of the [L, vocabulary] logits, below zero where there is none; where log probabilities are asked for theirs,
// and ids and log probabilities of the most likely tokens, as many columns as the row that wants most.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> sample(SampleRow* sample_row, const at::Tensor& logits,
                                                                  const at::Tensor& numbers, const at::Tensor& counts,
                                                                  const at::Tensor& ends, const at::Tensor& ids,
                                                                  const at::Tensor& biases) {
  TORCH_CHECK(logits.scalar_type() == at::kFloat && logits.is_contiguous() && logits.dim() == 2 && logits.size(1) > 0,
              "logits must be contiguous [L, vocabulary] float32");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  const double* number = table<double>(numbers, "numbers", rows, kNumbers);
  const int64_t* count = table<int64_t>(counts, "counts", rows, kCounts);
  const int64_t* end = table<int64_t>(ends, "ends", rows, kLists);
  TORCH_CHECK(ids.scalar_type() == at::kInt && ids.is_contiguous() && biases.scalar_type() == at::kFloat &&
                  biases.is_contiguous(),
              "ids must be int32, biases float32");
  float* logit = logits.mutable_data_ptr<float>();
  std::vector<Draw> draws(rows);
  int64_t taken = 0, biases_taken = 0, widest = 0;
  for (int64_t r = 0; r < rows; ++r, number += kNumbers, count += kCounts, end += kLists) {
    Draw& draw = draws[r];
    const int32_t* lists[kLists];
    int64_t sizes[kLists];
    for (int list = 0; list < kLists; ++list) {
      TORCH_CHECK(end[list] >= taken && end[list] <= ids.numel(), "ends of row ", r, " do not ascend");
      lists[list] = ids.const_data_ptr<int32_t>() + taken, sizes[list] = end[list] - taken;
      taken = end[list];
    }
    TORCH_CHECK(biases_taken + sizes[kBiased] <= biases.numel(), "a bias is missing");
    TORCH_CHECK(number[kTemperature] >= 0 && count[kPromptCount] >= 0, "row ", r, " is out of bounds");
    draw.logits = logit + r * vocab;
    draw.temperature = number[kTemperature], draw.top_p = number[kTopP], draw.lowest = number[kLowest];
    draw.repetition = static_cast<float>(number[kRepetition]);
    draw.presence = static_cast<float>(number[kPresence]), draw.frequency = static_cast<float>(number[kFrequency]);
    draw.seed = count[kSeed], draw.position = count[kPosition], draw.top_k = count[kTopK];
    draw.explained = std::min(count[kExplained], vocab), draw.only_allowed = count[kOnlyAllowed] != 0;
    draw.biased = lists[kBiased], draw.biased_count = sizes[kBiased];
    draw.biases = biases.const_data_ptr<float>() + biases_taken;
    draw.allowed = lists[kAllowed], draw.allowed_count = sizes[kAllowed];
    draw.banned = lists[kBanned], draw.banned_count = sizes[kBanned];
    draw.tokens = lists[kTokens], draw.token_count = sizes[kTokens], draw.prompt_count = count[kPromptCount];
    biases_taken += sizes[kBiased], widest = std::max(widest, draw.explained);
  }
  at::Tensor tokens = at::empty({rows}, at::kInt), logprobs = at::zeros({rows}, at::kFloat);
  at::Tensor top_ids = at::empty({rows, widest}, at::kInt), top_logprobs = at::empty({rows, widest}, at::kFloat);
  int32_t *token = tokens.mutable_data_ptr<int32_t>(), *top_id = top_ids.mutable_data_ptr<int32_t>();
  float *logprob = logprobs.mutable_data_ptr<float>(), *top_logprob = top_logprobs.mutable_data_ptr<float>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t stop) {
    for (int64_t r = begin; r < stop; ++r)
      sample_row(draws[r], vocab, {token + r, logprob + r, top_id + r * widest, top_logprob + r * widest});
  });
  return {tokens, logprobs, top_ids, top_logprobs};
}

}  // namespace
}  // namespace headrace
