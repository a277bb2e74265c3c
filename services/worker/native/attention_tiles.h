// What the attention kernels share: keys and values as they lie in pages, taken in tiles, and the
// online softmax over them.

#pragma once

#include "vectors.h"

namespace shoal {

constexpr int KEY_TILE = 64;  // keys whose scores are held at once
constexpr int BLOCK = 3;      // queries computed together at most: their sums stay in registers

// Where the keys and values of one KV head are.
struct Pool {
  const float* keys;
  const float* values;
  int64_t page_stride;  // floats from a page to the next
  int64_t slot_stride;  // floats from a token to the next inside a page
  int page_size;
};

// Where the keys and values of a tile are: `count` of them from position `base` on. Past the end
// stands the last again, which is never weighed.
struct Tile {
  const float* keys[KEY_TILE];
  const float* values[KEY_TILE];

  void locate(const Pool& pool, const int32_t* pages, int base, int count) {
    int page = base / pool.page_size, slot = base % pool.page_size;
    int64_t at = pages[page] * pool.page_stride + slot * pool.slot_stride;
    for (int k = 0; k < KEY_TILE; ++k) {
      keys[k] = pool.keys + at;
      values[k] = pool.values + at;
      if (k + 1 >= count) continue;
      at += pool.slot_stride;
      if (++slot == pool.page_size) {
        slot = 0;
        at = pages[++page] * pool.page_stride;
      }
    }
  }
};

// Two tiles, so that the next is fetched from memory while one is computed: pages lie anywhere.
// After the last the next is the last again.
class Tiles {
 public:
  // The keys from position `begin` to before `end`.
  Tiles(const Pool& pool, const int32_t* pages, int begin, int end)
      : pool_(pool), pages_(pages), base_(begin), end_(end) {
    tile().locate(pool_, pages_, base_, count());
    fetch();
  }

  bool done() const { return base_ >= end_; }
  int base() const { return base_; }
  int count() const { return std::min(KEY_TILE, end_ - base_); }
  const Tile& next() const { return tiles_[1 - now_]; }
  Tile& tile() { return tiles_[now_]; }

  void advance() {
    base_ += KEY_TILE;
    now_ = 1 - now_;
    fetch();
  }

 private:
  void fetch() {
    const int following = base_ + KEY_TILE;
    if (following < end_)
      tiles_[1 - now_].locate(pool_, pages_, following, std::min(KEY_TILE, end_ - following));
    else
      tiles_[1 - now_] = tiles_[now_];
  }

  const Pool& pool_;
  const int32_t* pages_;
  int base_, end_, now_ = 0;
  Tile tiles_[2];
};

// Asks for `size` floats, for the second-level cache.
inline void prefetch(const float* data, int size) {
  constexpr int LINE = 16;  // floats in a line of the cache
  for (int d = 0; d < size; d += LINE) __builtin_prefetch(data + d, 0, 2);
}

// Online softmax (Milakov and Gimelshein, 2018): the running maximum, the running sum, and an
// output scaled by e^-maximum.
struct Running {
  float maximum;
  float sum;
};

// Turns the first `count` scores of a tile into weights e^(score - maximum), the
// others into zeros, and returns the factor that older sums shrink by.
inline float weigh(float* scores, int count, Running& state) {
  vec most = splat(state.maximum);
  int whole = 0;
  for (; whole + LANES <= count; whole += LANES) {
    const vec w = load(scores + whole);
    most = most < w ? w : most;
  }
  float highest = state.maximum;
  for (int lane = 0; lane < LANES; ++lane) highest = std::max(highest, most[lane]);
  for (; whole < count; ++whole) highest = std::max(highest, scores[whole]);
  const float shrink = std::exp(state.maximum - highest);
  vec total = vec{};
  for (int k = 0; k < KEY_TILE; k += LANES) {
    vec w = vec{};
    if (k < count) {
      w = exp_nonpositive(load(scores + k) - highest);
      for (int lane = count - k; lane < LANES; ++lane) w[lane] = 0.0f;
    }
    store(scores + k, w);
    total += w;
  }
  state = {highest, state.sum * shrink + sum(total)};
  return shrink;
}

// Vectors of a head that are summed together for so many queries.
constexpr int together(int queries, int vectors) {
  if (queries == 1 && vectors % 8 == 0) return 8;
  return vectors % 4 == 0 ? 4 : vectors % 2 == 0 ? 2 : 1;
}

// acc[q] = acc[q] * shrink[q] + weights[q] . values, for QUERIES queries whose acc are DIM apart
// and whose weights are KEY_TILE apart. With `next`, asks for its values meanwhile.
template <int DIM, int QUERIES>
void mix(float* acc, const float* weights, const float* shrink, const Tile& tile, int count,
         const Tile* next) {
  constexpr int N = together(QUERIES, DIM / LANES);
  for (int d = 0; d < DIM; d += N * LANES) {
    vec sums[QUERIES][N];
    for (int q = 0; q < QUERIES; ++q)
      for (int i = 0; i < N; ++i) sums[q][i] = load(acc + q * DIM + d + i * LANES) * shrink[q];
    for (int k = 0; k < count; ++k) {
      if (next) prefetch(next->values[k] + d, N * LANES);
      for (int i = 0; i < N; ++i) {
        const vec value = load(tile.values[k] + d + i * LANES);
        for (int q = 0; q < QUERIES; ++q) sums[q][i] += weights[q * KEY_TILE + k] * value;
      }
    }
    for (int q = 0; q < QUERIES; ++q)
      for (int i = 0; i < N; ++i) store(acc + q * DIM + d + i * LANES, sums[q][i]);
  }
}

}  // namespace shoal
