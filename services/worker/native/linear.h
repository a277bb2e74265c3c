// y = x W^T + bias in float32.

#pragma once

#include "vectors.h"

namespace shoal {

constexpr int PANEL = 2 * LANES;  // outputs computed together
constexpr int ROW_BLOCK = 6;      // rows computed together: 12 sums, in registers
constexpr int ROW_TILE = 96;      // rows whose inputs stay in the second-level cache

// Writes a row's sums for `width` outputs of a panel.
inline void finish(float* out, vec low, vec high, const float* bias, int width) {
  const int second = width - LANES;
  if (bias) {
    low += load_part(bias, std::min(width, LANES));
    if (second > 0) high += load_part(bias + LANES, second);
  }
  store_part(out, low, std::min(width, LANES));
  if (second > 0) store_part(out + LANES, high, second);
}

// Each output is one chain of multiply-adds over its inputs in order, whatever rows it is
// computed with. panel: [in, PANEL]; x: rows `in` apart; out: rows `stride` apart.
template <int ROWS>
void linear_rows(const float* x, const float* panel, const float* bias, int in, float* out,
                 int64_t stride, int width) {
  vec low[ROWS] = {}, high[ROWS] = {};
  for (int k = 0; k < in; ++k) {
    const vec w0 = load(panel + int64_t(k) * PANEL), w1 = load(panel + int64_t(k) * PANEL + LANES);
    for (int r = 0; r < ROWS; ++r) {
      const float value = x[int64_t(r) * in + k];
      low[r] += value * w0;
      high[r] += value * w1;
    }
  }
  for (int r = 0; r < ROWS; ++r) finish(out + r * stride, low[r], high[r], bias, width);
}

// One panel of outputs for a tile of rows, in blocks of nearly equal height: a block of one or
// two rows would wait for its own sums.
inline void linear_tile(const float* x, const float* panel, const float* bias, int rows, int in,
                        float* out, int64_t stride, int width) {
  using Kernel = decltype(&linear_rows<1>);
  constexpr Kernel kernels[] = {linear_rows<1>, linear_rows<2>, linear_rows<3>,
                                linear_rows<4>, linear_rows<5>, linear_rows<ROW_BLOCK>};
  int blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
  for (int r = 0; r < rows; --blocks) {
    const int height = (rows - r + blocks - 1) / blocks;
    kernels[height - 1](x + int64_t(r) * in, panel, bias, in, out + r * stride, stride, width);
    r += height;
  }
}

// The rows of tile t of `tiles`: all of nearly equal height, so that threads get equal shares.
struct Span {
  int first, count;
};

inline Span tile_rows(int rows, int tiles, int t) {
  const int first = int(int64_t(rows) * t / tiles);
  return {first, int(int64_t(rows) * (t + 1) / tiles) - first};
}

// x: [rows, in]; packed: [outputs / PANEL, in, PANEL], zeros past the last output;
// bias: [outputs] or null; out: [rows, outputs].
inline void linear(float* out, const float* x, const float* packed, const float* bias, int rows,
                   int in, int outputs) {
  const int panels = (outputs + PANEL - 1) / PANEL;
  const int tiles = (rows + ROW_TILE - 1) / ROW_TILE;
#pragma omp parallel for collapse(2) schedule(static)
  for (int t = 0; t < tiles; ++t)
    for (int p = 0; p < panels; ++p) {
      const auto [first, count] = tile_rows(rows, tiles, t);
      const int column = p * PANEL;
      linear_tile(x + int64_t(first) * in, packed + int64_t(p) * in * PANEL,
                  bias ? bias + column : nullptr, count, in, out + int64_t(first) * outputs + column,
                  outputs, std::min(PANEL, outputs - column));
    }
}

}  // namespace shoal
