// The choice of a token from a row of logits, as draw.py and filters.py have it, in two passes
// over the row; and penalties.

#pragma once

#include "vectors.h"

namespace shoal {

// How a row is drawn; temperature 0 takes the likeliest. Mirrored in structures.py.
struct Draw {
  float temperature;
  float top_p;
  float log_min_p;  // -infinity where off
  int32_t top_k;    // the vocabulary's size where off
  uint32_t key_low, key_high;
};

typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

constexpr uint32_t SPREAD = 0x1E3779B1;
constexpr float LN_2 = 0.69314718056f;

template <typename T>  // uint32_t or uvec
inline T finalize(T x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0x735A2D97u;
  return x ^ (x >> 15);
}

template <typename T>
inline T mixed(T id, const Draw& draw) {
  return finalize(finalize((id * SPREAD) ^ draw.key_low) ^ draw.key_high);
}

// Standard Gumbel noise of an id, as draw.py computes it.
inline float gumbel(uint32_t id, const Draw& draw) {
  const float v = (float(mixed(id, draw)) + 0.5f) * 0x1p-32f;
  return -std::log(-std::log1p(-std::min(v, 1.0f - 0x1p-24f)));
}

// No less than the noise of eight ids from `first` on. Noise is at most -ln v, and the bits of a
// float are a lower bound of its binary logarithm, since log2(1 + m) >= m.
inline vec gumbel_bound(uint32_t first, const Draw& draw) {
  uvec id;
  for (int i = 0; i < LANES; ++i) id[i] = first + i;
  const ivec half = (ivec)(mixed(id, draw) >> 1);  // signed numbers convert in one instruction
  const vec v = __builtin_convertvector(half, vec) + 0.25f;  // v * 2^31, rounded
  ivec bits;
  std::memcpy(&bits, &v, sizeof bits);
  return (127.0f + 31.0f - __builtin_convertvector(bits, vec) * 0x1p-23f) * LN_2 + 1e-3f;
}

inline float largest(vec v) {
  float most = v[0];
  for (int i = 1; i < LANES; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

inline vec larger(vec a, vec b) { return b > a ? b : a; }  // NaN in b is passed over

// The first of the largest.
inline int argmax(const float* row, int size) {
  vec most = splat(-INFINITY);
  int i = 0;
  for (; i + LANES <= size; i += LANES) most = larger(most, load(row + i));
  float top = largest(most);
  for (; i < size; ++i) top = row[i] > top ? row[i] : top;
  for (i = 0; i < size; ++i)
    if (row[i] == top) return i;
  return 0;  // nothing but NaN
}

// The best so far, of scores with their noise; an earlier one wins a tie.
struct Best {
  int id;
  float value;

  void see(int id_seen, float score, const Draw& draw) {
    const float noisy = score + gumbel(uint32_t(id_seen), draw);
    if (noisy > value || (noisy == value && id_seen < id)) *this = {id_seen, noisy};
  }
};

// The noise of nearly every id is too small to win whatever it is exactly, so its logarithms are
// taken for the few whose bound beats the best so far.
inline int draw_any(const float* logits, int size, int likeliest, const Draw& draw) {
  constexpr int BLOCK = 8 * LANES;
  const float t = draw.temperature;
  Best best{likeliest, -INFINITY};
  best.see(likeliest, logits[likeliest] / t, draw);
  int start = 0;
  for (; start + BLOCK <= size; start += BLOCK) {
    vec bound = splat(-INFINITY);
    for (int i = start; i < start + BLOCK; i += LANES)
      bound = larger(bound, load(logits + i) / t + gumbel_bound(uint32_t(i), draw));
    if (largest(bound) < best.value) continue;
    for (int i = start; i < start + BLOCK; i += LANES) {
      const vec score = load(logits + i) / t;
      const vec most = score + gumbel_bound(uint32_t(i), draw);
      for (int k = 0; k < LANES; ++k)
        if (most[k] >= best.value) best.see(i + k, score[k], draw);
    }
  }
  for (; start < size; ++start) best.see(start, logits[start] / t, draw);
  return best.id;
}

struct Candidate {
  float score;
  int32_t id;
};

// Scores by their distance from the largest, in steps of 1/32; the last takes all that are farther.
struct Histogram {
  static constexpr int STEPS = 1024;
  static constexpr float PER_NAT = 32.0f;
  int32_t count[STEPS] = {};
  double mass[STEPS] = {};  // e^(score - largest), summed
  double total = 0.0;

  static vec step(vec distance) {
    const vec step = distance * PER_NAT;
    return step < float(STEPS - 1) ? step : splat(STEPS - 1);
  }

  Histogram(const float* logits, int size, float top, float t) {
    for (int i = 0; i < size; i += LANES) {
      const int n = std::min(LANES, size - i);
      const vec distance = top - load_part(logits + i, n) / t;
      const ivec at = __builtin_convertvector(step(distance), ivec);
      const vec weight = exp_nonpositive(-distance);
      for (int k = 0; k < n; ++k) {
        ++count[at[k]];
        mass[at[k]] += weight[k];
      }
    }
    for (const double m : mass) total += m;
  }

  // The last step that a filter may leave something of. Where top-k is on it alone decides, since
  // top-p's share is then one of the mass of all k.
  int last_kept(const Draw& draw, int size) const {
    int64_t before = 0;
    double mass_before = 0.0;
    for (int i = 0; i < STEPS; ++i) {
      const bool in_top_p = draw.top_p >= 1.0f || mass_before < draw.top_p * total * (1.0 + 1e-6);
      const bool in_min_p = -float(i) / PER_NAT >= draw.log_min_p - 1e-4f;
      const bool kept = draw.top_k < size ? before < draw.top_k : in_top_p && in_min_p;
      if (i && !kept) return i - 1;
      before += count[i];
      mass_before += mass[i];
    }
    return STEPS - 1;
  }
};

// Those that the filters may keep, sorted: the likeliest first.
inline std::vector<Candidate> candidates(const float* logits, int size, float top, float t,
                                         int last) {
  std::vector<Candidate> found;
  for (int i = 0; i < size; i += LANES) {
    const int n = std::min(LANES, size - i);
    const vec score = load_part(logits + i, n) / t;
    const ivec at = __builtin_convertvector(Histogram::step(top - score), ivec);
    for (int k = 0; k < n; ++k)
      if (at[k] <= last && score[k] == score[k]) found.push_back({score[k], i + k});  // no NaN
  }
  std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
    return a.score > b.score || (a.score == b.score && a.id < b.id);
  });
  return found;
}

// Draws from what the filters leave: top-k first, then top-p of the rest, then min-p.
inline int draw_filtered(const float* logits, int size, int likeliest, const Draw& draw) {
  const float t = draw.temperature, top = logits[likeliest] / t;
  const Histogram histogram(logits, size, top, t);
  const std::vector<Candidate> sorted =
      candidates(logits, size, top, t, histogram.last_kept(draw, size));
  double limit = histogram.total;
  if (draw.top_k < size) {
    limit = 0.0;
    const size_t k = std::min(size_t(draw.top_k), sorted.size());
    for (size_t i = 0; i < k; ++i) limit += std::exp(double(sorted[i].score - top));
  }
  Best best{likeliest, -INFINITY};
  double mass_before = 0.0;
  for (size_t i = 0; i < sorted.size(); ++i) {
    const auto [score, id] = sorted[i];
    const bool kept = int64_t(i) < draw.top_k &&
                      (draw.top_p >= 1.0f || mass_before < draw.top_p * limit) &&
                      score >= top + draw.log_min_p;
    if (i && !kept) break;
    best.see(id, score, draw);
    mass_before += std::exp(double(score - top));
  }
  return best.id;
}

inline int choose(const float* logits, int size, const Draw& draw) {
  const int likeliest = argmax(logits, size);
  if (draw.temperature == 0.0f || logits[likeliest] == -INFINITY) return likeliest;
  if (draw.top_k >= size && draw.top_p >= 1.0f && draw.log_min_p == -INFINITY)
    return draw_any(logits, size, likeliest, draw);
  return draw_filtered(logits, size, likeliest, draw);
}

// What a request's penalties are, and where its counts are.
struct Penalty {
  int32_t row;         // of the logits
  int32_t counts_row;  // of the counts
  float presence, frequency, repetition;
};

// Penalises a row of logits in place; most ids have been seen nowhere.
inline void penalize(float* logits, const int32_t* outputs, const uint8_t* in_prompt, int size,
                     const Penalty& penalty) {
  for (int start = 0; start < size; start += LANES) {
    const int n = std::min(LANES, size - start);
    int32_t seen = 0;
    for (int i = start; i < start + n; ++i) seen |= outputs[i] | in_prompt[i];
    if (!seen) continue;
    for (int i = start; i < start + n; ++i) {
      if (outputs[i] || in_prompt[i])
        logits[i] = logits[i] > 0 ? logits[i] / penalty.repetition : logits[i] * penalty.repetition;
      if (outputs[i]) logits[i] -= penalty.frequency * float(outputs[i]) + penalty.presence;
    }
  }
}

}  // namespace shoal
