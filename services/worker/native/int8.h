// y = x W^T + bias with weights of at most seven bits and activations of eight.
//
// A weight is minimum + scale * q, with a scale and a minimum for each group of 32 inputs of an
// output; q is 0 .. 127. An activation is scale * a, with a scale for each group of a row; a is
// -127 .. 127. So the sum over a group is
//
//     scale_w * scale_x * sum(q * a)  +  minimum * scale_x * sum(a)
//
// whose integer sums are exact: a pair of products is at most 2 * 127 * 127 = 32,258, which fits
// the 16 bits that AVX2's maddubs adds pairs in. Where q is at most 15, as in four-bit blocks of
// GGUF files, the eight pairs of a group fit (30,480), and are widened once.

#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "linear.h"

// One instruction that adds four products to 32 bits; compiled, not yet run.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define SHOAL_VNNI 1
#else
#define SHOAL_VNNI 0
#endif

namespace shoal {

constexpr int GROUP = 32;     // inputs that share a scale
constexpr int QUAD = 4;       // inputs of an output that lie together: a 32-bit lane
constexpr int INT8_ROWS = 3;  // rows computed together: four would not fit the registers
constexpr int INT8_TILE = 256;  // rows whose inputs stay in the second-level cache

// Activations in eight bits. values: [rows, in]; scales: [rows, groups, 2]: of a group the scale,
// and the scale times the sum of its values.
struct Quantized {
  std::unique_ptr<int8_t[]> values;
  std::unique_ptr<float[]> scales;
};

inline void quantize_group(const float* x, int8_t* values, float* scales) {
  float highest = 0.0f;
  for (int i = 0; i < GROUP; ++i) highest = std::max(highest, std::fabs(x[i]));
  float sum = 0.0f;  // of what may be no number, so that the products tell of it
  for (int i = 0; i < GROUP; ++i) sum += x[i] * 0.0f;
  const bool usable = highest > 1e-30f && sum == 0.0f;
  const float scale = highest / 127.0f + sum, inverse = usable ? 127.0f / highest : 0.0f;
  int total = 0;
  for (int i = 0; i < GROUP; ++i) {
    // Adding 1.5 * 2^23 rounds to nearest and leaves the integer in the low bits.
    const float shifted = (usable ? x[i] * inverse : 0.0f) + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    const int32_t value = bits - 0x4B400000;
    values[i] = int8_t(value);
    total += value;
  }
  scales[0] = scale;
  scales[1] = scale * float(total);
}

inline Quantized quantize(const float* x, int rows, int in) {
  const int64_t groups = int64_t(rows) * (in / GROUP);
  Quantized q{buffer<int8_t>(groups * GROUP), buffer<float>(groups * 2)};
#pragma omp parallel for schedule(static) if (rows > 4)
  for (int64_t g = 0; g < groups; ++g)
    quantize_group(x + g * GROUP, q.values.get() + g * GROUP, q.scales.get() + 2 * g);
  return q;
}

// The integer sums of one group, for PANEL outputs. weights: [GROUP / QUAD, PANEL, QUAD].
template <int ROWS, bool NARROW>
inline void group_sums(vec (&low)[ROWS], vec (&high)[ROWS], const int8_t* x, int64_t in,
                       const uint8_t* weights) {
#if defined(__AVX2__)
  __m256i sum0[ROWS], sum1[ROWS];
  for (int r = 0; r < ROWS; ++r) sum0[r] = sum1[r] = _mm256_setzero_si256();
#if !SHOAL_VNNI
  const __m256i ones = _mm256_set1_epi16(1);
#endif
// Unrolled further, GCC 12 adds in another order and runs out of registers.
#pragma GCC unroll 2
  for (int k = 0; k < GROUP; k += QUAD) {
    const __m256i w0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + k * PANEL));
    const __m256i w1 =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + k * PANEL + 32));
    for (int r = 0; r < ROWS; ++r) {
      int32_t quad;
      std::memcpy(&quad, x + r * in + k, sizeof quad);
      const __m256i a = _mm256_set1_epi32(quad);
#if SHOAL_VNNI
      sum0[r] = _mm256_dpbusd_epi32(sum0[r], w0, a);
      sum1[r] = _mm256_dpbusd_epi32(sum1[r], w1, a);
#else
      const __m256i p0 = _mm256_maddubs_epi16(w0, a), p1 = _mm256_maddubs_epi16(w1, a);
      if (NARROW) {
        sum0[r] = _mm256_add_epi16(sum0[r], p0);
        sum1[r] = _mm256_add_epi16(sum1[r], p1);
      } else {
        sum0[r] = _mm256_add_epi32(sum0[r], _mm256_madd_epi16(p0, ones));
        sum1[r] = _mm256_add_epi32(sum1[r], _mm256_madd_epi16(p1, ones));
      }
#endif
    }
  }
  for (int r = 0; r < ROWS; ++r) {
#if !SHOAL_VNNI
    if (NARROW) {
      sum0[r] = _mm256_madd_epi16(sum0[r], ones);
      sum1[r] = _mm256_madd_epi16(sum1[r], ones);
    }
#endif
    low[r] = reinterpret_cast<vec>(_mm256_cvtepi32_ps(sum0[r]));
    high[r] = reinterpret_cast<vec>(_mm256_cvtepi32_ps(sum1[r]));
  }
#else
  for (int r = 0; r < ROWS; ++r) {
    int32_t totals[PANEL] = {};
    for (int k = 0; k < GROUP; k += QUAD)
      for (int n = 0; n < PANEL; ++n)
        for (int i = 0; i < QUAD; ++i)
          totals[n] += int32_t(weights[k * PANEL + n * QUAD + i]) * x[r * in + k + i];
    for (int n = 0; n < LANES; ++n) {
      low[r][n] = float(totals[n]);
      high[r][n] = float(totals[LANES + n]);
    }
  }
#endif
}

// x: [ROWS, in], x_scales: [ROWS, groups, 2]; weights: [groups, GROUP / QUAD, PANEL, QUAD];
// scales: [groups, 2, PANEL], scales and then minima; out: rows `stride` floats apart.
template <int ROWS, bool NARROW>
void int8_rows(const int8_t* x, const float* x_scales, const uint8_t* weights, const float* scales,
               const float* bias, int groups, float* out, int64_t stride, int width) {
  const int64_t in = int64_t(groups) * GROUP;
  vec low[ROWS] = {}, high[ROWS] = {};
  for (int g = 0; g < groups; ++g) {
    vec sum0[ROWS], sum1[ROWS];
    group_sums<ROWS, NARROW>(sum0, sum1, x + g * GROUP, in, weights + int64_t(g) * GROUP * PANEL);
    const float* s = scales + int64_t(g) * 2 * PANEL;
    const vec scale0 = load(s), scale1 = load(s + LANES);
    const vec minimum0 = load(s + PANEL), minimum1 = load(s + PANEL + LANES);
    for (int r = 0; r < ROWS; ++r) {
      const float* own = x_scales + (int64_t(r) * groups + g) * 2;
      low[r] += sum0[r] * (scale0 * own[0]);
      high[r] += sum1[r] * (scale1 * own[0]);
      low[r] += minimum0 * own[1];
      high[r] += minimum1 * own[1];
    }
  }
  for (int r = 0; r < ROWS; ++r) finish(out + r * stride, low[r], high[r], bias, width);
}

template <bool NARROW>
void int8_tile(const int8_t* x, const float* x_scales, const uint8_t* weights, const float* scales,
               const float* bias, int rows, int groups, float* out, int64_t stride, int width) {
  using Kernel = decltype(&int8_rows<1, NARROW>);
  constexpr Kernel kernels[] = {int8_rows<1, NARROW>, int8_rows<2, NARROW>,
                                int8_rows<INT8_ROWS, NARROW>};
  int blocks = (rows + INT8_ROWS - 1) / INT8_ROWS;
  for (int r = 0; r < rows; --blocks) {
    const int height = (rows - r + blocks - 1) / blocks;
    kernels[height - 1](x + int64_t(r) * groups * GROUP, x_scales + int64_t(r) * groups * 2,
                        weights, scales, bias, groups, out + r * stride, stride, width);
    r += height;
  }
}

// x: [rows, in], `in` a multiple of GROUP; weights: [outputs / PANEL, in / QUAD, PANEL, QUAD];
// scales: [outputs / PANEL, in / GROUP, 2, PANEL]; narrow: no q is above 15.
inline void int8_linear(float* out, const float* x, const uint8_t* weights, const float* scales,
                        const float* bias, int rows, int in, int outputs, bool narrow) {
  const Quantized q = quantize(x, rows, in);
  const int panels = (outputs + PANEL - 1) / PANEL, groups = in / GROUP;
  const int tiles = (rows + INT8_TILE - 1) / INT8_TILE;
  const auto tile = narrow ? int8_tile<true> : int8_tile<false>;
#pragma omp parallel for collapse(2) schedule(static)
  for (int t = 0; t < tiles; ++t)
    for (int p = 0; p < panels; ++p) {
      const auto [first, count] = tile_rows(rows, tiles, t);
      const int column = p * PANEL;
      tile(q.values.get() + int64_t(first) * in, q.scales.get() + int64_t(first) * groups * 2,
           weights + int64_t(p) * in * PANEL, scales + int64_t(p) * groups * 2 * PANEL,
           bias ? bias + column : nullptr, count, groups,
           out + int64_t(first) * outputs + column, outputs, std::min(PANEL, outputs - column));
    }
}

}  // namespace shoal
