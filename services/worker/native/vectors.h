// Vectors of floats for whatever instruction set the compiler targets, and what all kernels
// share: loads, sums in a fixed order, and the exponential.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace shoal {

constexpr int LANES = 8;
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<vec*>(p) = v; }
inline vec splat(float x) { return vec{} + x; }

inline float sum(vec v) {
  // Pairwise, so that the order is fixed whatever the compiler does.
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// e^x to about 1 ulp for x <= 0, after the Cephes library's range reduction
// (Moshier, netlib.org/cephes): x = n ln 2 + r, e^r by a polynomial of degree 6.
inline vec exp_nonpositive(vec x) {
  const vec low = splat(-87.0f);
  x = x < low ? low : x;
  const vec shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23 rounds to nearest
  const vec n = shifted - 12582912.0f;
  vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const ivec exponent = (__builtin_convertvector(n, ivec) + 127) << 23;
  vec scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return p * scale;
}

// Turns eight rows of eight into columns: neighbours, then pairs, then halves change places.
inline void transpose(vec (&m)[LANES]) {
  vec t[LANES];
  for (int i = 0; i < LANES; i += 2) {
    t[i] = __builtin_shufflevector(m[i], m[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[i + 1] = __builtin_shufflevector(m[i], m[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < LANES; i += 4) {
    m[i] = __builtin_shufflevector(t[i], t[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    m[i + 1] = __builtin_shufflevector(t[i], t[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    m[i + 2] = __builtin_shufflevector(t[i + 1], t[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    m[i + 3] = __builtin_shufflevector(t[i + 1], t[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int i = 0; i < LANES / 2; ++i) {
    const vec low = m[i], high = m[i + LANES / 2];
    m[i] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11);
    m[i + LANES / 2] = __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// A vector of `count` numbers, zeros after them, so that a tail takes the same path.
inline vec load_part(const float* p, int count) {
  if (count == LANES) return load(p);
  vec v = vec{};
  std::memcpy(&v, p, sizeof(float) * count);
  return v;
}

inline void store_part(float* p, vec v, int count) {
  if (count == LANES) return store(p, v);
  std::memcpy(p, &v, sizeof(float) * count);
}

// Memory for a kernel's own use; not cleared.
template <typename T>
std::unique_ptr<T[]> buffer(int64_t size) {
  return std::unique_ptr<T[]>(new T[size]);
}

}  // namespace shoal
