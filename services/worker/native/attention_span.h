// Attention of some queries to a span of keys: one query a head, or the queries of a prompt's tile.

#pragma once

#include "attention_tiles.h"

namespace shoal {

// Queries of one KV head: `rows` positions from `start` on, with `group` heads each. Query i is
// head i % group of position start + i / group.
struct Queries {
  const float* data;
  int64_t stride;  // floats from a position to the next; its heads lie one after the other
  int start;
  int rows;
  int group;

  int count() const { return rows * group; }
  int position(int i) const { return start + i / group; }
  const float* at(int i, int dim) const {
    return data + (i / group) * stride + int64_t(i % group) * dim;
  }
};

// What queries have of a span: sums that are not yet divided, [queries, dim], and their state.
struct Partial {
  std::vector<float> acc;
  std::vector<Running> state;

  void clear(int queries, int dim) {
    acc.assign(size_t(queries) * dim, 0.0f);
    state.assign(queries, Running{-INFINITY, 0.0f});
  }
};

// The sums of eight vectors, as one vector: three rounds of adding neighbours.
inline vec sums(const vec (&v)[LANES]) {
  const auto add = [](vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  };
  const auto add2 = [](vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  };
  const vec low = add2(add(v[0], v[1]), add(v[2], v[3]));
  const vec high = add2(add(v[4], v[5]), add(v[6], v[7]));
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}

// Weighs a tile's scores of QUERIES queries, each of which sees `seen` keys, and adds the values.
template <int DIM, int QUERIES>
void take(float* scores, const int (&seen)[QUERIES], const Tile& tile, const Tile* next,
          float* acc, Running* state) {
  float shrink[QUERIES];
  for (int q = 0; q < QUERIES; ++q) shrink[q] = weigh(scores + q * KEY_TILE, seen[q], state[q]);
  mix<DIM, QUERIES>(acc, scores, shrink, tile, seen[QUERIES - 1], next);
}

// Heads of one position against a tile: each key is read once for all of them.
template <int DIM, int HEADS>
void decode_block(const Tile& tile, const Tile& next, int count, const float* query, float scale,
                  float* acc, Running* state) {
  constexpr int KEYS = HEADS == 1 ? 8 : 4;  // at a time: as many sums as registers hold
  alignas(64) float scores[HEADS * KEY_TILE];
  for (int first = 0; first < count; first += LANES) {
    vec dots[HEADS][LANES];
    for (int k = 0; k < LANES; k += KEYS) {
      vec dot[HEADS][KEYS] = {};
      for (int j = 0; j < KEYS; ++j) prefetch(next.keys[first + k + j], DIM);
      for (int d = 0; d < DIM; d += LANES)
        for (int j = 0; j < KEYS; ++j) {
          const vec key = load(tile.keys[first + k + j] + d);
          for (int h = 0; h < HEADS; ++h) dot[h][j] += load(query + h * DIM + d) * key;
        }
      for (int h = 0; h < HEADS; ++h)
        for (int j = 0; j < KEYS; ++j) dots[h][k + j] = dot[h][j];
    }
    for (int h = 0; h < HEADS; ++h) store(scores + h * KEY_TILE + first, sums(dots[h]) * scale);
  }
  int seen[HEADS];
  for (int h = 0; h < HEADS; ++h) seen[h] = count;
  take<DIM, HEADS>(scores, seen, tile, &next, acc, state);
}

// One position's heads over the keys of a span.
template <int DIM>
void decode(Tiles&& tiles, const Queries& queries, float scale, Partial& partial) {
  using Kernel = decltype(&decode_block<DIM, 1>);
  constexpr Kernel kernels[] = {decode_block<DIM, 1>, decode_block<DIM, 2>, decode_block<DIM, BLOCK>};
  for (; !tiles.done(); tiles.advance()) {
    int blocks = (queries.group + BLOCK - 1) / BLOCK;
    for (int h = 0; h < queries.group; --blocks) {
      const int heads = (queries.group - h + blocks - 1) / blocks;
      kernels[heads - 1](tiles.tile(), tiles.next(), tiles.count(), queries.at(h, DIM), scale,
                         partial.acc.data() + h * DIM, partial.state.data() + h);
      h += heads;
    }
  }
}

// The keys of a tile as columns: [dim, key]. Asks for those of the next.
template <int DIM>
void turn(float* columns, const Tile& tile, const Tile& next) {
  for (int k = 0; k < KEY_TILE; k += LANES)
    for (int d = 0; d < DIM; d += LANES) {
      vec block[LANES];
      for (int i = 0; i < LANES; ++i) {
        block[i] = load(tile.keys[k + i] + d);
        prefetch(next.keys[k + i] + d, LANES);
        prefetch(next.values[k + i] + d, LANES);
      }
      transpose(block);
      for (int i = 0; i < LANES; ++i) store(columns + (d + i) * KEY_TILE + k, block[i]);
    }
}

// The queries from `first` on against a tile whose keys are columns. Each query's sums run in one
// order, whatever it is computed with.
template <int DIM, int QUERIES>
void prefill_block(const float* columns, const Tile& tile, int base, int count,
                   const Queries& queries, int first, float scale, Partial& partial) {
  constexpr int N = 4;  // vectors of keys at a time
  alignas(64) float scores[QUERIES * KEY_TILE];
  const float* query[QUERIES];
  int seen[QUERIES];
  for (int q = 0; q < QUERIES; ++q) {
    query[q] = queries.at(first + q, DIM);
    seen[q] = std::min(queries.position(first + q) + 1 - base, count);
  }
  for (int part = 0; part < KEY_TILE; part += N * LANES) {
    vec dots[QUERIES][N] = {};
    for (int d = 0; d < DIM; ++d)
      for (int i = 0; i < N; ++i) {
        const vec key = load(columns + d * KEY_TILE + part + i * LANES);
        for (int q = 0; q < QUERIES; ++q) dots[q][i] += query[q][d] * key;
      }
    for (int q = 0; q < QUERIES; ++q)
      for (int i = 0; i < N; ++i)
        store(scores + q * KEY_TILE + part + i * LANES, dots[q][i] * scale);
  }
  take<DIM, QUERIES>(scores, seen, tile, nullptr, partial.acc.data() + size_t(first) * DIM,
                     partial.state.data() + first);
}

// Consecutive positions' heads over the keys of a span, each up to its own position.
template <int DIM>
void prefill(Tiles&& tiles, const Queries& queries, float scale, Partial& partial) {
  using Kernel = decltype(&prefill_block<DIM, 1>);
  constexpr Kernel kernels[] = {prefill_block<DIM, 1>, prefill_block<DIM, 2>,
                                prefill_block<DIM, BLOCK>};
  alignas(64) float columns[DIM * KEY_TILE];
  for (; !tiles.done(); tiles.advance()) {
    turn<DIM>(columns, tiles.tile(), tiles.next());
    // Positions before the tile's first key see none of it.
    int first = std::max(0, tiles.base() - queries.start) * queries.group;
    while (first < queries.count()) {
      const int size = std::min(BLOCK, queries.count() - first);
      kernels[size - 1](columns, tiles.tile(), tiles.base(), tiles.count(), queries, first, scale,
                        partial);
      first += size;
    }
  }
}

}  // namespace shoal
