// The draw of a token over the whole vocabulary in one pass: hash, Gumbel noise, score, maximum.
// The same rule as engine/draw.py, where the hash is told of.

#pragma once

#include "vectors.h"

namespace shoal {

typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

// A bijection of 32-bit values.
inline uvec mix(uvec x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0x735A2D97u;
  return x ^ (x >> 15);
}

// ln x to about 1 ulp for normal x > 0, after the Cephes library (Moshier, netlib.org/cephes):
// x = 2^e m with m near 1, ln m by a polynomial.
inline vec log_positive(vec x) {
  ivec bits;
  std::memcpy(&bits, &x, sizeof bits);
  vec e = __builtin_convertvector((bits >> 23) - 126, vec);
  bits = (bits & 0x7FFFFF) | 0x3F000000;
  vec m;
  std::memcpy(&m, &bits, sizeof m);
  const auto low = m < 0.707106781186547524f;
  e = low ? e - 1.0f : e;
  m = low ? m + m - 1.0f : m - 1.0f;
  const vec z = m * m;
  vec p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = p * m * z - e * 2.12194440e-4f - 0.5f * z;
  return m + p + e * 0.693359375f;
}

// Standard Gumbel noise of eight ids under a row's key.
inline vec gumbel(uvec ids, uint32_t low, uint32_t high) {
  const uvec mixed = mix(mix((ids * 0x1E3779B1u) ^ low) ^ high);
  vec v = (__builtin_convertvector(mixed, vec) + 0.5f) * 0x1p-32f;
  const vec most = splat(1.0f - 0x1p-24f);
  v = v < most ? v : most;
  // ln(1 - v), exact also where 1 - v rounds to 1 (Kahan): what was rounded away is divided out.
  const vec kept = 1.0f - v, lost = 1.0f - kept;
  const auto none = lost == 0.0f;
  const vec ratio = v / (none ? splat(1.0f) : lost);
  const vec exponential = none ? v : -log_positive(kept) * ratio;
  return -log_positive(exponential);
}

// tokens[r] = argmax over ids of logits[r] / temperature[r] + noise; the least id of equals.
// logits: [rows, vocab]; temperature: [rows]; low, high: [rows], 32-bit halves of the keys.
inline void draw(int64_t* tokens, const float* logits, int rows, int vocab,
                 const float* temperature, const int64_t* low, const int64_t* high) {
#pragma omp parallel for schedule(static)
  for (int r = 0; r < rows; ++r) {
    const float* row = logits + int64_t(r) * vocab;
    vec best = splat(-INFINITY);
    ivec where = {}, ids = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int i = 0; i < vocab; i += LANES, ids += LANES) {
      const int count = std::min(LANES, vocab - i);
      vec score = load_part(row + i, count) / temperature[r];
      score += gumbel(reinterpret_cast<uvec>(ids), uint32_t(low[r]), uint32_t(high[r]));
      const auto better = (score > best) & (ids < vocab);
      best = better ? score : best;
      where = better ? ids : where;
    }
    int winner = 0;
    for (int lane = 1; lane < LANES; ++lane)
      if (best[lane] > best[winner] ||
          (best[lane] == best[winner] && where[lane] < where[winner]))
        winner = lane;
    tokens[r] = where[winner];
  }
}

}  // namespace shoal
