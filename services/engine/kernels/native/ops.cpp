// The stack of layers as two operators: what tensors hold is checked here, scratch is laid out here, nothing is computed.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <omp.h>
#include <torch/library.h>

#include "sampler_op.h"
#include "step.h"
#include "weights.h"

namespace headrace {

namespace {

std::atomic<const Isa*> chosen{nullptr};  // by who asks; none: the best that there is

// What this processor can do, the least first.
std::vector<const Isa*> ways() {
  TORCH_CHECK(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), "the processor has no AVX2");
  std::vector<const Isa*> found{&kAvx2};
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq"))
    return found;
  found.push_back(&kAvx512);
  if (!__builtin_cpu_supports("avx512vnni")) return found;
  found.push_back(&kAvx512Vnni);
  if (__builtin_cpu_supports("avx512bf16")) found.push_back(&kAvx512Bf16);
  return found;
}

const Isa* isa() {
  static const Isa* const best = ways().back();
  const Isa* way = chosen.load();
  return way ? way : best;
}

const int32_t* ints(const at::Tensor& t, const char* name, int64_t count) {
  TORCH_CHECK(t.scalar_type() == at::kInt && t.is_contiguous() && t.numel() == count, name, " must be ", count,
              " contiguous int32");
  return t.const_data_ptr<int32_t>();
}

// Bytes of `take_codes`: rows of up to k numbers, where weights are bytes.
int64_t codes_bytes(const Model& model, int64_t rows, int64_t k) {
  return model.quantised ? rows * (round_up(k, kGroup) + round_up(k, kGroup) / kGroup * 8) + 192 : 0;
}

Codes take_codes(const Model& model, Region& memory, int64_t rows, int64_t k) {
  if (!model.quantised) return {};
  const int64_t stride = round_up(k, kGroup), groups = stride / kGroup;
  return {memory.take<int8_t>(rows * stride), memory.take<float>(rows * groups), memory.take<int32_t>(rows * groups), stride,
          groups};
}

template <class Run>
void together(Run&& run) {
  const int wanted = at::get_num_threads();
  Team team(wanted);
#pragma omp parallel num_threads(wanted)
  run(team, omp_get_thread_num());
}

at::Tensor forward(const c10::intrusive_ptr<Stack>& self, const at::Tensor& token_ids, const at::Tensor& positions,
                   const at::Tensor& slots, const at::Tensor& query_starts, const at::Tensor& context_lens,
                   const at::Tensor& tables, at::TensorList kv) {
  const Model& model = self->model;
  Step step;
  step.tokens = token_ids.numel(), step.sequences = context_lens.numel();
  TORCH_CHECK(kv.size() == model.layers.size() && !kv.empty(), "a pool a layer was expected");
  TORCH_CHECK(step.tokens > 0 && tables.dim() == 2, "an empty step");
  step.block_size = kv[0].size(1), step.table_width = tables.size(1);
  step.token_ids = ints(token_ids, "token_ids", step.tokens), step.positions = ints(positions, "positions", step.tokens);
  step.slots = ints(slots, "slots", step.tokens);
  step.query_starts = ints(query_starts, "query_starts", step.sequences + 1);
  step.context_lens = ints(context_lens, "context_lens", step.sequences);
  step.tables = ints(tables, "block_tables", step.sequences * step.table_width);
  step.codes = kv[0].scalar_type() == at::kChar;
  for (const at::Tensor& pool : kv) {
    TORCH_CHECK(pool.scalar_type() == (step.codes ? at::kChar : at::kBFloat16) && pool.is_contiguous() && pool.dim() == 5 &&
                    pool.sizes() == kv[0].sizes() && pool.size(2) == 2 && pool.size(3) == model.kv_heads &&
                    pool.size(4) == model.dim + (step.codes ? kScaleBytes : 0),
                "pools must be [N, B, 2, Hkv, D] contiguous bfloat16, or [N, B, 2, Hkv, D + 4] int8");
    step.kv.push_back(static_cast<char*>(pool.mutable_data_ptr()));
  }
  check(model, step, kv[0].size(0) * step.block_size, kv[0].size(0));
  const int threads = at::get_num_threads();
  int64_t partial_rows = 0;
  plan_units(model, step, threads, partial_rows);

  Scratch scratch;
  const int64_t t = step.tokens, width = model.heads * model.dim;
  scratch.hidden_stride = round_up(model.hidden, 32);
  scratch.qkv_stride = round_up(width + 2 * model.kv_heads * model.dim, 32);
  scratch.inner_stride = round_up(model.inner, 32);
  scratch.private_bytes = private_bytes(model.dim, std::max(kQueryRows, model.group()), step.codes);
  const int64_t normed_rows = std::max<int64_t>(t, 16 * threads);
  const int64_t longest = std::max({model.hidden, width, model.inner});  // input of a product
  Region& memory = self->scratch(normed_rows * scratch.hidden_stride * 2 + t * scratch.qkv_stride * 4 +
                                 2 * t * width * 2 + t * scratch.inner_stride * 2 + partial_rows * (model.dim + 2) * 4 +
                                 threads * scratch.private_bytes + codes_bytes(model, normed_rows, longest) + 8192);
  scratch.private_part = memory.take<char>(threads * scratch.private_bytes);
  scratch.normed = memory.take<bf16>(normed_rows * scratch.hidden_stride);
  scratch.qkv = memory.take<float>(t * scratch.qkv_stride);
  scratch.query = memory.take<bf16>(t * width);
  scratch.attended = memory.take<bf16>(t * width);
  scratch.gated = memory.take<bf16>(t * scratch.inner_stride);
  scratch.partials = memory.take<float>(partial_rows * (model.dim + 2));
  scratch.codes = take_codes(model, memory, normed_rows, longest);
  at::Tensor hidden = at::empty({t, scratch.hidden_stride}, at::kFloat);
  scratch.hidden = hidden.mutable_data_ptr<float>();

  const Isa* way = isa();
  together([&](Team& team, int member) { way->forward(model, step, scratch, team, member); });
  return hidden.narrow(1, 0, model.hidden);
}

at::Tensor logits(const c10::intrusive_ptr<Stack>& self, const at::Tensor& hidden, const at::Tensor& rows) {
  const Model& model = self->model;
  TORCH_CHECK(hidden.scalar_type() == at::kFloat && hidden.dim() == 2 && hidden.size(1) == model.hidden &&
                  hidden.stride(1) == 1,
              "hidden must be [T, hidden] float32");
  TORCH_CHECK(rows.scalar_type() == at::kLong && rows.is_contiguous(), "rows must be int64");
  const int64_t count = rows.numel();
  const int64_t* wanted = rows.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < count; ++r) TORCH_CHECK(wanted[r] >= 0 && wanted[r] < hidden.size(0), "a row out of bounds");
  at::Tensor out = at::empty({count, model.vocab}, at::kFloat);
  if (count == 0) return out;
  Scratch scratch;
  scratch.hidden_stride = round_up(model.hidden, 32);
  Region& memory = self->scratch(count * scratch.hidden_stride * 2 + codes_bytes(model, count, model.hidden) + 64);
  scratch.normed = memory.take<bf16>(count * scratch.hidden_stride);
  scratch.codes = take_codes(model, memory, count, model.hidden);
  const Isa* way = isa();
  together([&](Team& team, int member) {
    way->logits(model, hidden.const_data_ptr<float>(), hidden.stride(0), wanted, count, scratch,
                out.mutable_data_ptr<float>(), team, member);
  });
  return out;
}

std::string instruction_set() { return isa()->name; }

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Isa* way : ways()) names.push_back(way->name);
  return names;
}

// Compute as a lesser processor would; "" takes the choice back.
void use_instruction_set(std::string name) {
  chosen.store(nullptr);
  if (name.empty()) return;
  for (const Isa* way : ways())
    if (name == way->name) chosen.store(way);
  TORCH_CHECK(chosen.load(), "no ", name, " here");
}

}  // namespace

TORCH_LIBRARY(headrace, m) {
  m.class_<Stack>("Stack")
      .def(torch::init<c10::List<int64_t>, double, at::Tensor, at::Tensor, bool, bool>())
      .def("add_layer", &Stack::add_layer)
      .def("add_ends", &Stack::add_ends)
      .def("weight_bytes", &Stack::weight_bytes);
  m.def("instruction_set() -> str", instruction_set);
  m.def("instruction_sets() -> str[]", instruction_sets);
  m.def("use_instruction_set(str name) -> ()", use_instruction_set);
  m.def(
      "forward(__torch__.torch.classes.headrace.Stack stack, Tensor token_ids, Tensor positions, Tensor slots, Tensor "
      "query_starts, Tensor context_lens, Tensor block_tables, Tensor[] kv) -> Tensor",
      forward);
  m.def(
      "sample(Tensor logits, Tensor numbers, Tensor counts, Tensor ends, Tensor ids, Tensor biases) -> (Tensor tokens, "
      "Tensor logprobs, Tensor top_ids, Tensor top_logprobs)",
      [](const at::Tensor& logits, const at::Tensor& numbers, const at::Tensor& counts, const at::Tensor& ends,
         const at::Tensor& ids, const at::Tensor& biases) {
        return sample(isa()->sample_row, logits, numbers, counts, ends, ids, biases);
      });
  m.def("logits(__torch__.torch.classes.headrace.Stack stack, Tensor hidden, Tensor rows) -> Tensor", logits);
}

}  // namespace headrace
