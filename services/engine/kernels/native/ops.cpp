// The stack of layers as two operators: what tensors hold is checked here, memory is owned here, nothing is computed.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <omp.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <algorithm>

#include "stack.h"

namespace headrace {

void Barrier::wait() {
  const int round = round_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    round_.notify_all();
    return;
  }
  for (int spins = 0; spins < 40000; ++spins) {
    if (round_.load(std::memory_order_acquire) != round) return;
    __builtin_ia32_pause();
  }
  round_.wait(round, std::memory_order_acquire);  // sleeps: the core may be needed by who we wait for
}

namespace {

std::atomic<const Isa*> chosen{nullptr};  // by a test; none: the best that there is

const Isa* isa() {
  if (const Isa* way = chosen.load()) return way;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq"))
    return nullptr;
  return __builtin_cpu_supports("avx512bf16") ? &kAvx512Bf16 : &kAvx512;
}

// Zeroed memory of its own, on huge pages where the system gives them: a step reads all weights once, and with small
// pages it would wait for address translation.
class Region {
 public:
  Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { free(); }

  void allocate(int64_t bytes) {
    free();
    constexpr int64_t kHuge = 2 << 20;
    size_ = round_up(bytes, kHuge) + kHuge;
    void* at = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "no memory for ", bytes, " bytes");
    base_ = static_cast<char*>(at);
    data_ = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(base_), kHuge));
    used_ = 0;
    madvise(data_, size_ - kHuge, MADV_HUGEPAGE);
  }

  template <class T>
  T* take(int64_t count) {
    char* at = data_ + used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    TORCH_CHECK(data_ + used_ <= base_ + size_, "more was taken than allocated");
    return reinterpret_cast<T*>(at);
  }

  void rewind() { used_ = 0; }
  int64_t used() const { return used_; }

 private:
  void free() {
    if (base_) munmap(base_, size_);
    base_ = nullptr;
  }
  char *base_ = nullptr, *data_ = nullptr;
  int64_t size_ = 0, used_ = 0;
};

const int32_t* ints(const at::Tensor& t, const char* name, int64_t count) {
  TORCH_CHECK(t.scalar_type() == at::kInt && t.is_contiguous() && t.numel() == count, name, " must be ", count,
              " contiguous int32");
  return t.const_data_ptr<int32_t>();
}

}  // namespace

// Packed weights of one model, and the scratch of the step that is being computed. One step at a time.
struct Stack : torch::CustomClassHolder {
  Stack(c10::List<int64_t> shape, double eps, at::Tensor cos, at::Tensor sin, bool tied) : cos_(cos), sin_(sin) {
    TORCH_CHECK(isa(), "the processor has no AVX-512");
    TORCH_CHECK(shape.size() == 7, "seven sizes were expected");
    model.hidden = shape[0], model.heads = shape[1], model.kv_heads = shape[2], model.dim = shape[3];
    model.inner = shape[4], model.vocab = shape[5], layer_count_ = shape[6];
    model.eps = static_cast<float>(eps);
    TORCH_CHECK(model.dim % 16 == 0 && model.hidden % 2 == 0 && model.inner % 2 == 0, "a shape that cannot be packed");
    TORCH_CHECK(cos.scalar_type() == at::kFloat && cos.is_contiguous() && sin.is_contiguous() && cos.dim() == 2 &&
                    cos.sizes() == sin.sizes() && cos.size(1) == model.dim / 2,
                "cos and sin must be [length, D / 2] float32");
    model.length = cos.size(0);
    model.cos = cos.const_data_ptr<float>(), model.sin = sin.const_data_ptr<float>();
    const int64_t width = model.heads * model.dim, all = width + 2 * model.kv_heads * model.dim;
    auto size = [](int64_t n, int64_t k) { return round_up(n, 16) * k * 2 + round_up(n, 16) * 4 + 128; };
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

  Model model;
  Region scratch_memory;
  int64_t scratch_bytes = 0;

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

  // With interleave, panel 2i holds rows of the first half, panel 2i + 1 the same of the second.
  Matrix pack(const at::Tensor& t, int64_t n, int64_t k, const std::optional<at::Tensor>& bias, bool interleave = false) {
    const bf16* from = source(t, n, k);
    Matrix m;
    m.n = n, m.k = k;
    const int64_t half = n / 2, half_panels = (half + 15) / 16;
    m.panels = interleave ? 2 * half_panels : (n + 15) / 16;
    bf16* to = weights_.take<bf16>(m.panels * 16 * k);
    m.data = to;
    at::parallel_for(0, m.panels, 16, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p)
        for (int64_t c = 0; c < 16; ++c) {
          const int64_t inside = interleave ? p / 2 * 16 + c : p * 16 + c;
          if (inside >= (interleave ? half : n)) continue;
          const bf16* row = from + (interleave && p % 2 ? half + inside : inside) * k;
          for (int64_t i = 0; i < k; ++i) to[p * 16 * k + i / 2 * 32 + c * 2 + i % 2] = row[i];
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
  int64_t layer_count_ = 0;
  Region weights_;
};

namespace {

// Cut the step's attention into units of about equal reading, the longest first.
void plan_units(const Model& model, Step& step, int threads, int64_t& partial_rows) {
  const int64_t group = model.group(), per = std::max<int64_t>(1, kQueryRows / group);
  int64_t items = 0;
  for (int64_t s = 0; s < step.sequences; ++s)
    items += (step.query_starts[s + 1] - step.query_starts[s] + per - 1) / per * model.kv_heads;
  const int64_t wanted = threads == 1 ? 1 : std::max<int64_t>(1, 4 * threads / std::max<int64_t>(1, items));
  partial_rows = 0;
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t start = step.query_starts[s], count = step.query_starts[s + 1] - start;
    for (int64_t q0 = 0; q0 < count; q0 += per)
      for (int64_t head = 0; head < model.kv_heads; ++head) {
        const int64_t queries = std::min(per, count - q0), seen = step.positions[start + q0 + queries - 1] + 1;
        const int64_t parts = std::clamp<int64_t>(std::min(wanted, seen / 256), 1, 64);
        const int64_t each = round_up((seen + parts - 1) / parts, kPlaces);
        Unit unit{static_cast<int32_t>(s), static_cast<int32_t>(head), static_cast<int32_t>(q0),
                  static_cast<int32_t>(queries), 0, static_cast<int32_t>(seen), -1};
        if (parts == 1) {
          step.units.push_back(unit);
          continue;
        }
        Merge merge{unit.sequence, unit.head, unit.q0, unit.count, 0, static_cast<int32_t>(partial_rows)};
        for (int64_t from = 0; from < seen; from += each, ++merge.parts) {
          unit.kv0 = static_cast<int32_t>(from), unit.kv1 = static_cast<int32_t>(std::min(seen, from + each));
          unit.partial = static_cast<int32_t>(partial_rows);
          partial_rows += queries * group;
          step.units.push_back(unit);
        }
        step.merges.push_back(merge);
      }
  }
  auto cost = [&](const Unit& u) { return (u.count * group + 16) * static_cast<int64_t>(u.kv1 - u.kv0); };
  std::sort(step.units.begin(), step.units.end(), [&](const Unit& a, const Unit& b) { return cost(a) > cost(b); });
}

void check(const Model& model, const Step& step, int64_t slot_count, int64_t block_count) {
  TORCH_CHECK(step.query_starts[0] == 0 && step.query_starts[step.sequences] == step.tokens, "query starts do not fit");
  for (int64_t t = 0; t < step.tokens; ++t)
    TORCH_CHECK(step.token_ids[t] >= 0 && step.token_ids[t] < model.vocab && step.positions[t] >= 0 &&
                    step.positions[t] < model.length && step.slots[t] >= 0 && step.slots[t] < slot_count,
                "token ", t, " is out of bounds");
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t first = step.query_starts[s], end = step.query_starts[s + 1], context = step.context_lens[s];
    TORCH_CHECK(first < end && end <= step.tokens, "sequence ", s, " has no tokens");
    const int64_t blocks = (context + step.block_size - 1) / step.block_size;
    TORCH_CHECK(context >= 1 && blocks <= step.table_width, "sequence ", s, " is longer than its table");
    for (int64_t b = 0; b < blocks; ++b)
      TORCH_CHECK(step.tables[s * step.table_width + b] >= 0 && step.tables[s * step.table_width + b] < block_count,
                  "sequence ", s, " has a block out of bounds");
    for (int64_t t = first; t < end; ++t)
      TORCH_CHECK(step.positions[t] == context - (end - t), "positions of sequence ", s, " do not end its context");
  }
}

template <class Run>
void team(Run&& run) {
  const int wanted = at::get_num_threads();
  Barrier barrier(wanted);
#pragma omp parallel num_threads(wanted)
  {
#pragma omp single
    barrier.count = omp_get_num_threads();
    run(barrier, omp_get_thread_num(), omp_get_num_threads());
  }
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
  for (const at::Tensor& pool : kv) {
    TORCH_CHECK(pool.scalar_type() == at::kBFloat16 && pool.is_contiguous() && pool.dim() == 5 &&
                    pool.sizes() == kv[0].sizes() && pool.size(2) == 2 && pool.size(3) == model.kv_heads &&
                    pool.size(4) == model.dim,
                "pools must be [N, B, 2, Hkv, D] contiguous bfloat16");
    step.kv.push_back(reinterpret_cast<bf16*>(pool.mutable_data_ptr<at::BFloat16>()));
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
  scratch.private_bytes = private_bytes(model.dim, std::max(kQueryRows, model.group()));
  const int64_t normed_rows = std::max<int64_t>(t, 16 * threads);
  const int64_t bytes = normed_rows * scratch.hidden_stride * 2 + t * scratch.qkv_stride * 4 + 2 * t * width * 2 +
                        t * scratch.inner_stride * 2 + partial_rows * (model.dim + 2) * 4 +
                        threads * scratch.private_bytes + 8192;
  if (bytes > self->scratch_bytes) {
    self->scratch_memory.allocate(bytes);
    self->scratch_bytes = bytes;
  }
  Region& memory = self->scratch_memory;
  memory.rewind();
  scratch.private_part = memory.take<char>(threads * scratch.private_bytes);
  scratch.normed = memory.take<bf16>(normed_rows * scratch.hidden_stride);
  scratch.qkv = memory.take<float>(t * scratch.qkv_stride);
  scratch.query = memory.take<bf16>(t * width);
  scratch.attended = memory.take<bf16>(t * width);
  scratch.gated = memory.take<bf16>(t * scratch.inner_stride);
  scratch.partials = memory.take<float>(partial_rows * (model.dim + 2));
  at::Tensor hidden = at::empty({t, scratch.hidden_stride}, at::kFloat);
  scratch.hidden = hidden.mutable_data_ptr<float>();

  std::vector<std::atomic<int>> tickets(2 * model.layers.size());
  const Isa* way = isa();
  team([&](Barrier& barrier, int thread, int team_size) {
    way->forward(model, step, scratch, tickets.data(), barrier, thread, team_size);
  });
  return hidden.narrow(1, 0, model.hidden);
}

at::Tensor logits(const c10::intrusive_ptr<Stack>& self, const at::Tensor& hidden, const at::Tensor& rows) {
  const Model& model = self->model;
  TORCH_CHECK(hidden.scalar_type() == at::kFloat && hidden.dim() == 2 && hidden.size(1) == model.hidden &&
                  hidden.stride(1) == 1,
              "hidden must be [T, hidden] float32");
  TORCH_CHECK(rows.scalar_type() == at::kLong && rows.is_contiguous(), "rows must be int64");
  const int64_t count = rows.numel(), stride = round_up(model.hidden, 32);
  const int64_t* wanted = rows.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < count; ++r) TORCH_CHECK(wanted[r] >= 0 && wanted[r] < hidden.size(0), "a row out of bounds");
  at::Tensor out = at::empty({count, model.vocab}, at::kFloat);
  if (count == 0) return out;
  at::Tensor normed = at::empty({count, stride}, at::kBFloat16);
  const Isa* way = isa();
  team([&](Barrier& barrier, int thread, int team_size) {
    way->logits(model, hidden.const_data_ptr<float>(), hidden.stride(0), wanted, count,
                reinterpret_cast<bf16*>(normed.mutable_data_ptr<at::BFloat16>()), stride, out.mutable_data_ptr<float>(),
                barrier, thread, team_size);
  });
  return out;
}

std::string instruction_set() { return isa() ? isa()->name : ""; }

// For tests: compute as a lesser processor would; "" takes the choice back.
void use_instruction_set(std::string name) {
  chosen.store(nullptr);
  if (name.empty()) return;
  const Isa* best = isa();
  TORCH_CHECK(best && (name == kAvx512.name || name == best->name), "no ", name, " here");
  chosen.store(name == kAvx512.name ? &kAvx512 : best);
}

}  // namespace

TORCH_LIBRARY(headrace, m) {
  m.class_<Stack>("Stack")
      .def(torch::init<c10::List<int64_t>, double, at::Tensor, at::Tensor, bool>())
      .def("add_layer", &Stack::add_layer)
      .def("add_ends", &Stack::add_ends)
      .def("weight_bytes", &Stack::weight_bytes);
  m.def("instruction_set() -> str", instruction_set);
  m.def("use_instruction_set(str name) -> ()", use_instruction_set);
  m.def(
      "forward(__torch__.torch.classes.headrace.Stack stack, Tensor token_ids, Tensor positions, Tensor slots, Tensor "
      "query_starts, Tensor context_lens, Tensor block_tables, Tensor[] kv) -> Tensor",
      forward);
  m.def("logits(__torch__.torch.classes.headrace.Stack stack, Tensor hidden, Tensor rows) -> Tensor", logits);
}

}  // namespace headrace
