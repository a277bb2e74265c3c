// What is done to each token apart from products: norms, activation, rotation, storing K and V.

#pragma once

#include "vectors.h"

namespace shoal {

constexpr int SERIAL_ROWS = 16;  // so few rows are quicker on one thread

// to = row / rms(row) * weight, over `size` floats.
inline void norm_row(float* to, const float* row, const float* weight, int size, float eps) {
  vec even = vec{}, odd = vec{};
  int i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) {
    const vec a = load(row + i), b = load(row + i + LANES);
    even += a * a;
    odd += b * b;
  }
  for (; i < size; i += LANES) {
    const vec a = load_part(row + i, std::min(LANES, size - i));
    even += a * a;
  }
  const float inverse = 1.0f / std::sqrt(sum(even + odd) / float(size) + eps);
  for (i = 0; i + LANES <= size; i += LANES)
    store(to + i, load(row + i) * inverse * load(weight + i));
  for (; i < size; ++i) to[i] = row[i] * inverse * weight[i];
}

inline void rms_norm(float* out, const float* x, const float* weight, int rows, int size,
                     float eps) {
#pragma omp parallel for schedule(static) if (rows > SERIAL_ROWS)
  for (int r = 0; r < rows; ++r)
    norm_row(out + int64_t(r) * size, x + int64_t(r) * size, weight, size, eps);
}

// x += delta, and with a weight: out = x / rms(x) * weight. Rows of `size`.
inline void add_norm(float* out, float* x, const float* delta, const float* weight, int rows,
                     int size, float eps) {
#pragma omp parallel for schedule(static) if (rows > SERIAL_ROWS)
  for (int r = 0; r < rows; ++r) {
    float* row = x + int64_t(r) * size;
    for (int i = 0; i < size; ++i) row[i] += delta[int64_t(r) * size + i];
    if (weight) norm_row(out + int64_t(r) * size, row, weight, size, eps);
  }
}

// out = silu(gate) * up; gate_up: [rows, gate then up, each `size`]; out: [rows, size].
inline void silu_mul(float* out, const float* gate_up, int rows, int size) {
#pragma omp parallel for schedule(static) if (rows > SERIAL_ROWS)
  for (int r = 0; r < rows; ++r) {
    const float* gate = gate_up + int64_t(r) * 2 * size;
    const float* up = gate + size;
    float* to = out + int64_t(r) * size;
    for (int i = 0; i < size; i += LANES) {
      const int count = std::min(LANES, size - i);
      const vec g = load_part(gate + i, count);
      const vec small = exp_nonpositive(g < 0.0f ? g : -g);  // e^-|g|: never overflows
      const vec one = splat(1.0f);
      const vec sigmoid = (g < 0.0f ? small : one) / (one + small);
      store_part(to + i, g * sigmoid * load_part(up + i, count), count);
    }
  }
}

// Turns the pairs (i, i + dim / 2) of a head by the token's angles, in place.
inline void rotate(float* head, const float* cos, const float* sin, int dim) {
  const int half = dim / 2;
  for (int i = 0; i < half; ++i) {
    const float first = head[i], second = head[half + i];
    head[i] = first * cos[i] - second * sin[i];
    head[half + i] = second * cos[i] + first * sin[i];
  }
}

}  // namespace shoal
