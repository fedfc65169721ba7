// One row of logits: penalties, peak, filters, draw, log probabilities. Written once with the compiler's own vectors and
// compiled for each instruction set: the includer defines HEADRACE_SAMPLE_ROW. Products and sums must not be contracted:
// every number is to be that of the plain twin in Python.
//
// Nothing is sorted whole. One pass notes the highest logit of each block of 64 tokens; from then on a block is looked at
// only where that says that something in it counts.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "sampler.h"

namespace headrace {
namespace {

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Half = float __attribute__((vector_size(32)));
using Longs = int64_t __attribute__((vector_size(64)));
using Words = uint64_t __attribute__((vector_size(64)));

constexpr int64_t kLanes = 16, kBlock = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNegligible = 25;    // as NEGLIGIBLE in drawing.py
constexpr float kWeightless = -28;   // weights are 0 from here down
constexpr double kLowestLogprob = -9999;
constexpr double kHighestNoise = 37.5;  // -log(-log(1 - 2^-54)) is 37.43
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15, kFirst = 0xBF58476D1CE4E5B9, kSecond = 0x94D049BB133111EB;

struct Candidate {
  float value;
  int32_t id;
  bool operator<(const Candidate& other) const {  // goes before it: a tie is cut by id
    return value > other.value || (value == other.value && id < other.id);
  }
};

// What a thread keeps from row to row.
struct Memory {
  int64_t size = 0;
  std::unique_ptr<float[]> peaks, ranked;  // one a block
  std::unique_ptr<float[]> raw;
  std::unique_ptr<int32_t[]> counts;  // one a token; all zero between uses
  std::unique_ptr<Candidate[]> kept;  // room for a block more than there are tokens

  void fit(int64_t vocab) {
    if (vocab == size) return;
    const int64_t blocks = (vocab + kBlock - 1) / kBlock;
    peaks.reset(new float[blocks]), ranked.reset(new float[blocks]), raw.reset(new float[vocab]);
    counts.reset(new int32_t[vocab]()), kept.reset(new Candidate[vocab + kBlock]);
    size = vocab;
  }
};

bool any(Ints x) {
  int64_t lanes[8], found = 0;
  std::memcpy(lanes, &x, sizeof lanes);
  for (int64_t lane : lanes) found |= lane;
  return found != 0;
}

// e to the x for 0 >= x >= -80, by these products and sums in this order. Polynomial: Cephes, expf.
template <class F, class I>
F exponential(F x) {
  const F n = x * 1.44269504f + 12582912.f - 12582912.f;  // to the nearest whole number
  const F r = x - n * 0.693359375f - n * -2.12194440e-4f;
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  I bits, power;
  if constexpr (sizeof(F) == sizeof(float)) power = static_cast<I>(n);
  else power = __builtin_convertvector(n, I);
  std::memcpy(&bits, &p, sizeof bits);
  bits += power * (1 << 23);
  std::memcpy(&p, &bits, sizeof bits);
  return p;
}

float exponential(float x) { return exponential<float, int32_t>(x > -80.f ? x : -80.f); }
Floats exponential(Floats x) { return exponential<Floats, Ints>(x > -80.f ? x : Floats{} - 80.f); }

// A token's probability over the peak's, in units of 2^-40: whole numbers, so that a sum does not depend on its order.
int64_t weight(float x) { return static_cast<int64_t>(exponential(x) * 0x1p40f); }

template <class W>
W mix(W x) {
  x = (x ^ (x >> 30)) * kFirst;
  x = (x ^ (x >> 27)) * kSecond;
  return x ^ (x >> 31);
}

// A row on its way. A value is what a logit is below the peak, over the temperature.
class Row {
 public:
  Row(const float* logits, int64_t size, Memory& memory)
      : logits_(logits), size_(size), blocks_((size + kBlock - 1) / kBlock), memory_(memory) {}

  // Find the highest logit of each block and of all; false where that is not finite, or anything is NaN.
  bool look() {
    Ints wrong{};
    peak_ = -kInfinity;
    for (int64_t b = 0; b < blocks_; ++b) {
      Floats top = Floats{} - kInfinity;
      for (int64_t i = b * kBlock; i < (b + 1) * kBlock; i += kLanes) {
        const Floats x = load(i);
        wrong |= x != x;
        top = x > top ? x : top;
      }
      float highest = -kInfinity;
      for (int lane = 0; lane < kLanes; ++lane) highest = top[lane] > highest ? top[lane] : highest;
      memory_.peaks[b] = highest;
      peak_ = highest > peak_ ? highest : peak_;
    }
    return !any(wrong) && peak_ > -kInfinity && peak_ < kInfinity;
  }

  int32_t most_likely() const {
    int64_t place = 0;
    while (memory_.peaks[place] != peak_) ++place;
    for (place *= kBlock; logits_[place] != peak_;) ++place;
    return static_cast<int32_t>(place);
  }

  void set_temperature(float temperature) { temperature_ = temperature; }

  int64_t size() const { return size_; }
  float peak() const { return peak_; }
  float value(int64_t id) const { return (logits_[id] - peak_) / temperature_; }
  Floats values(int64_t first) const { return (load(first) - peak_) / temperature_; }
  float highest_value(int64_t first) const { return (memory_.peaks[first / kBlock] - peak_) / temperature_; }

  // Call with the first id of each block in which a value is >= floor.
  template <class Visit>
  void each_block(float floor, Visit&& visit) const {
    for (int64_t first = 0; first < size_; first += kBlock)
      if (highest_value(first) >= floor) visit(first);
  }

  // Write every token with floor <= value < ceiling to `out`, which has room for a block more; how many there are.
  int64_t collect(float floor, float ceiling, Candidate* out) const {
    int64_t count = 0;
    each_block(floor, [&](int64_t first) {
      const int64_t end = std::min(first + kBlock, size_);
      for (int64_t id = first; id < end; ++id) {
        const float x = value(id);
        out[count] = {x, static_cast<int32_t>(id)};
        count += x >= floor && x < ceiling;
      }
    });
    return count;
  }

  // The same with the `most` most likely tokens of value >= floor, in any order.
  int64_t collect_most(int64_t most, float floor, Candidate* out) const {
    if (most <= blocks_) {  // as many tokens have at least the value that so many blocks have
      float* ranked = memory_.ranked.get();
      std::memcpy(ranked, memory_.peaks.get(), blocks_ * sizeof(float));
      std::nth_element(ranked, ranked + most - 1, ranked + blocks_, [](float a, float b) { return a > b; });
      floor = std::max(floor, (ranked[most - 1] - peak_) / temperature_);
    }
    const int64_t count = collect(floor, kInfinity, out);
    if (count <= most) return count;
    std::nth_element(out, out + most - 1, out + count);
    return most;
  }

  // Sum of the weights of tokens with value >= floor.
  int64_t mass(float floor) const {
    Longs sum{};
    each_block(floor, [&](int64_t first) {
      for (int64_t i = first; i < first + kBlock; i += kLanes) {
        const Floats x = values(i), e = x >= floor ? exponential(x) * 0x1p40f : Floats{};
        Half halves[2];
        std::memcpy(halves, &e, sizeof e);
        for (const Half& half : halves) sum += __builtin_convertvector(half, Longs);
      }
    });
    int64_t total = 0;
    for (int lane = 0; lane < 8; ++lane) total += sum[lane];
    return total;
  }

 private:
  // Sixteen logits; -inf beyond the end.
  Floats load(int64_t first) const {
    Floats out = Floats{} - kInfinity;
    if (first + kLanes <= size_) std::memcpy(&out, logits_ + first, sizeof out);
    else if (first < size_) std::memcpy(&out, logits_ + first, (size_ - first) * sizeof(float));
    return out;
  }

  const float* logits_;
  int64_t size_, blocks_;
  Memory& memory_;
  float peak_ = 0, temperature_ = 1;
};

// The draw: each token has noise of its own, and the highest sum of value and noise wins.
class Race {
 public:
  Race(int64_t seed, int64_t position)
      : key_(mix((mix(static_cast<uint64_t>(seed) + kGolden) ^ static_cast<uint64_t>(position)) + kGolden)) {}

  void enter(float value, int32_t id) {
    const uint64_t bits = mix(static_cast<uint64_t>(id) * kGolden ^ key_) >> 11;
    if (static_cast<float>(0xffffff - static_cast<int32_t>(bits >> 29)) * 0x1p-24f >= exponential(value) * bound_) return;
    const double uniform = (static_cast<double>(bits) + 0.5) / 0x1p53;
    const double sum = static_cast<double>(value) - std::log(-std::log(uniform));
    if (sum < best_ || (sum == best_ && id > winner_)) return;
    best_ = sum, winner_ = id;
    bound_ = static_cast<float>(std::exp(-best_) * 1.001);
  }

  // The same for every token of the row with value >= floor.
  void enter_all(const Row& row, float floor) {
    enter(0, row.most_likely());
    row.each_block(floor, [&](int64_t first) {
      if (row.highest_value(first) + kHighestNoise < best_) return;
      Ints hit{};
      for (int64_t i = first; i < first + kBlock; i += kLanes) {
        const Floats x = row.values(i);
        hit |= (x >= floor) & (left_over(i) < exponential(x) * bound_);
      }
      if (!any(hit)) return;
      for (int64_t id = first; id < std::min(first + kBlock, row.size()); ++id)
        if (row.value(id) >= floor) enter(row.value(id), static_cast<int32_t>(id));
    });
  }

  int32_t winner() const { return winner_; }

 private:
  // Lower bounds of 1 - uniform for sixteen tokens, and so of -log(uniform), which must be below exp(value - best) for
  // one of them to win; `enter` has the same for one token.
  Floats left_over(int64_t first) const {
    Half halves[2];
    for (int half = 0; half < 2; ++half) {
      const Words ids = Words{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<uint64_t>(first + 8 * half);
      const Words bits = mix(ids * kGolden ^ key_) >> 40;
      halves[half] = __builtin_convertvector(0xffffff - (Longs)bits, Half) * 0x1p-24f;
    }
    Floats out;
    std::memcpy(&out, halves, sizeof out);
    return out;
  }

  uint64_t key_;
  double best_ = -std::numeric_limits<double>::infinity();
  float bound_ = kInfinity;  // exp(-best), and a little more than its rounding
  int32_t winner_ = -1;
};

// Of kept[begin, end) leave the fewest, most likely first, that bring `mass` to the goal; returns the new end.
int64_t cut(Candidate* kept, int64_t begin, int64_t end, int64_t mass, double goal) {
  while (end - begin > 16) {
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(kept + begin, kept + middle, kept + end);
    int64_t upper = mass;
    for (int64_t i = begin; i < middle; ++i) upper += weight(kept[i].value);
    if (static_cast<double>(upper) >= goal) end = middle;
    else mass = upper, begin = middle;
  }
  std::sort(kept + begin, kept + end);
  while (begin < end && static_cast<double>(mass) < goal) mass += weight(kept[begin++].value);
  return begin;
}

int64_t mass_of(const Candidate* kept, int64_t begin, int64_t end) {
  int64_t mass = 0;
  for (int64_t i = begin; i < end; ++i) mass += weight(kept[i].value);
  return mass;
}

// What min_p, top_k and top_p leave of the row; how many.
int64_t filter(const Draw& draw, const Row& row, float floor, Candidate* kept) {
  if (draw.top_k > 0 && draw.top_k < row.size()) {
    const int64_t count = row.collect_most(draw.top_k, floor, kept);
    if (draw.top_p >= 1) return count;
    return cut(kept, 0, count, 0, draw.top_p * static_cast<double>(mass_of(kept, 0, count)));
  }
  // In bands from the peak downwards, until there is enough.
  const double goal = draw.top_p * static_cast<double>(row.mass(floor));
  int64_t count = 0, mass = 0;
  for (float ceiling = kInfinity, below = -1;; ceiling = below, below -= 2) {
    const int64_t begin = count;
    count += row.collect(std::max(floor, below), ceiling, kept + begin);
    const int64_t with = mass + mass_of(kept, begin, count);
    if (static_cast<double>(with) >= goal || below <= floor) return cut(kept, begin, count, mass, goal);
    mass = with;
  }
}

int32_t drawn(const Draw& draw, Row& row, Candidate* kept) {
  row.set_temperature(static_cast<float>(draw.temperature));
  float floor = std::nextafter(-kNegligible, 0.f);
  if (draw.lowest > floor) {
    floor = static_cast<float>(draw.lowest);
    if (floor < draw.lowest) floor = std::nextafter(floor, kInfinity);
  }
  Race race(draw.seed, draw.position);
  if (draw.top_p >= 1 && (draw.top_k <= 0 || draw.top_k >= row.size())) {
    race.enter_all(row, floor);
  } else {
    const int64_t count = filter(draw, row, floor, kept);
    for (int64_t i = 0; i < count; ++i) race.enter(kept[i].value, kept[i].id);
  }
  return race.winner();
}

// Bias, allowed, banned, penalties.
void shape(const Draw& draw, int64_t vocab, int32_t* counts) {
  float* x = draw.logits;
  for (int64_t i = 0; i < draw.biased_count; ++i) x[draw.biased[i]] += draw.biases[i];
  if (draw.only_allowed) {
    std::unique_ptr<float[]> values(new float[draw.allowed_count]);
    for (int64_t i = 0; i < draw.allowed_count; ++i) values[i] = x[draw.allowed[i]];
    for (int64_t id = 0; id < vocab; ++id) x[id] = -kInfinity;
    for (int64_t i = 0; i < draw.allowed_count; ++i) x[draw.allowed[i]] = values[i];
  }
  for (int64_t i = 0; i < draw.banned_count; ++i) x[draw.banned[i]] = -kInfinity;
  if (draw.repetition != 1) {
    for (int64_t i = 0; i < draw.token_count; ++i) {
      float& logit = x[draw.tokens[i]];
      if (!counts[draw.tokens[i]]++) logit = logit > 0 ? logit / draw.repetition : logit * draw.repetition;
    }
    for (int64_t i = 0; i < draw.token_count; ++i) counts[draw.tokens[i]] = 0;
  }
  if (draw.presence == 0 && draw.frequency == 0) return;
  for (int64_t i = draw.prompt_count; i < draw.token_count; ++i) ++counts[draw.tokens[i]];
  for (int64_t i = draw.prompt_count; i < draw.token_count; ++i) {
    int32_t& count = counts[draw.tokens[i]];
    if (count) x[draw.tokens[i]] -= static_cast<float>(count) * draw.frequency + draw.presence;
    count = 0;
  }
}

bool changes(const Draw& draw) {
  return draw.biased_count || draw.only_allowed || draw.banned_count || draw.repetition != 1 || draw.presence != 0 ||
         draw.frequency != 0;
}

bool inside(const int32_t* ids, int64_t count, int64_t vocab) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= vocab) return false;
  return true;
}

}  // namespace

void HEADRACE_SAMPLE_ROW(const Draw& draw, int64_t vocab, const Choice& choice) {
  static thread_local Memory memory;
  memory.fit(vocab);
  int32_t& token = *choice.token;
  token = kOutside;
  if (!inside(draw.biased, draw.biased_count, vocab) || !inside(draw.allowed, draw.allowed_count, vocab) ||
      !inside(draw.banned, draw.banned_count, vocab) || !inside(draw.tokens, draw.token_count, vocab))
    return;
  Row row(draw.logits, vocab, memory);
  token = kNotFinite;
  if (!row.look()) return;
  const bool shaped = changes(draw);
  const float *raw = draw.logits, peak = row.peak();
  double log_total = 0;
  auto logprob = [&](float logit) {
    return static_cast<float>(std::clamp<double>(static_cast<double>(logit - peak) - log_total, kLowestLogprob, 0));
  };
  if (draw.explained >= 0) {
    log_total = std::log(static_cast<double>(row.mass(kWeightless)) / 0x1p40);
    Candidate* top = memory.kept.get();
    const int64_t count = draw.explained ? row.collect_most(draw.explained, -kInfinity, top) : 0;
    std::sort(top, top + count);
    for (int64_t i = 0; i < count; ++i) choice.top_ids[i] = top[i].id, choice.top_logprobs[i] = logprob(raw[top[i].id]);
    if (shaped) raw = static_cast<float*>(std::memcpy(memory.raw.get(), raw, vocab * sizeof(float)));
  }
  if (shaped) {
    shape(draw, vocab, memory.counts.get());
    token = kNothingLeft;
    if (!row.look()) return;
  }
  token = draw.temperature == 0 ? row.most_likely() : drawn(draw, row, memory.kept.get());
  if (draw.explained >= 0) *choice.logprob = logprob(raw[token]);
}

}  // namespace headrace
