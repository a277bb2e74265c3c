// Paged attention that reads pages in place: decode rows one by one, prompts in tiles.

#pragma once

#include "vectors.h"

namespace shoal {

constexpr int QUERY_TILE = 32;  // queries attended together in a prefill chunk
constexpr int KEY_TILE = 64;    // keys whose scores are held at once

// Where the keys and values of one KV head are.
struct Pool {
  const float* keys;
  const float* values;
  int64_t page_stride;  // floats from a page to the next
  int64_t slot_stride;  // floats from a token to the next inside a page
  int page_size;

  const float* at(const float* base, const int32_t* pages, int position) const {
    return base + pages[position / page_size] * page_stride +
           (position % page_size) * slot_stride;
  }
};

// Online softmax (Milakov and Gimelshein, 2018): the running maximum, the
// running sum, and an output scaled by e^-maximum.
struct Running {
  float maximum;
  float sum;
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

// Where the keys and values of a tile are: `count` of them from position `base` on. Past the end
// stands the last again, which is never weighed.
struct Tile {
  const float* keys[KEY_TILE];
  const float* values[KEY_TILE];

  void locate(const Pool& pool, const int32_t* pages, int base, int count) {
    for (int k = 0; k < KEY_TILE; ++k) {
      const int position = base + std::min(k, count - 1);
      keys[k] = pool.at(pool.keys, pages, position);
      values[k] = pool.at(pool.values, pages, position);
    }
  }
};

// Asks for part `part` of `parts` of a token's key and value, for the second-level cache.
template <int DIM>
void prefetch(const float* key, const float* value, int part, int parts) {
  constexpr int LINE = 16;  // floats in a line of the cache
  for (int d = part * LINE; d < DIM; d += parts * LINE) {
    __builtin_prefetch(key + d, 0, 2);
    __builtin_prefetch(value + d, 0, 2);
  }
}

// One decode row: `group` queries of one KV head over `length` keys.
// query, out: [group, dim].
template <int DIM>
void decode(const Pool& pool, const int32_t* pages, int length, const float* query, float* out,
            int group, float scale) {
  constexpr int N = DIM / LANES;
  alignas(64) float scores[KEY_TILE];
  Tile tiles[2];  // this one and the next, which is fetched from memory meanwhile: pages lie anywhere
  Tile *tile = &tiles[0], *next = &tiles[1];
  std::vector<Running> state(group, Running{-INFINITY, 0.0f});
  std::memset(out, 0, sizeof(float) * group * DIM);
  tile->locate(pool, pages, 0, std::min(KEY_TILE, length));
  for (int base = 0; base < length; base += KEY_TILE) {
    const int count = std::min(KEY_TILE, length - base);
    const int following = std::min(KEY_TILE, length - base - count);
    if (following) next->locate(pool, pages, base + KEY_TILE, following);
    for (int h = 0; h < group; ++h) {  // the tile is in the first-level cache after one head
      const float* q = query + h * DIM;
      for (int first = 0; first < count; first += LANES) {
        vec dots[LANES];
        for (int k = 0; k < LANES; ++k) {
          const float* key = tile->keys[first + k];
          if (first + k < following)
            prefetch<DIM>(next->keys[first + k], next->values[first + k], h, group);
          vec even = load(q) * load(key), odd = vec{};
          for (int i = 1; i < N; ++i) {
            vec& dot = i % 2 ? odd : even;
            dot += load(q + i * LANES) * load(key + i * LANES);
          }
          dots[k] = even + odd;
        }
        store(scores + first, sums(dots) * scale);
      }
      const float shrink = weigh(scores, count, state[h]);
      vec acc[N];
      for (int i = 0; i < N; ++i) acc[i] = load(out + h * DIM + i * LANES) * shrink;
      for (int k = 0; k < count; ++k)
        for (int i = 0; i < N; ++i) acc[i] += scores[k] * load(tile->values[k] + i * LANES);
      for (int i = 0; i < N; ++i) store(out + h * DIM + i * LANES, acc[i]);
    }
    std::swap(tile, next);
  }
  for (int h = 0; h < group; ++h)
    for (int i = 0; i < N; ++i)
      store(out + h * DIM + i * LANES, load(out + h * DIM + i * LANES) * (1.0f / state[h].sum));
}

// scores[r, k] = query[r] . keys[:, k] * scale, for two rows at a time: eight
// independent sums hide the latency of a multiply-add.
template <int DIM>
void score_pair(float* scores, const float* q0, const float* q1, const float* keys, float scale) {
  for (int half = 0; half < KEY_TILE; half += 4 * LANES) {
    vec a[4] = {}, b[4] = {};
    for (int d = 0; d < DIM; ++d) {
      const float* line = keys + d * KEY_TILE + half;
      for (int i = 0; i < 4; ++i) {
        const vec key = load(line + i * LANES);
        a[i] += q0[d] * key;
        b[i] += q1[d] * key;
      }
    }
    for (int i = 0; i < 4; ++i) {
      store(scores + half + i * LANES, a[i] * scale);
      store(scores + KEY_TILE + half + i * LANES, b[i] * scale);
    }
  }
}

// acc[r] = acc[r] * shrink[r] + weights[r] . values, for two rows at a time and
// half a head at a time, so that the sums stay in registers.
template <int DIM>
void mix_pair(float* acc, const float* weights, const float* shrink, const float* const* values,
              int count) {
  constexpr int BLOCK = DIM % (4 * LANES) == 0 ? 4 : 1;
  for (int d = 0; d < DIM; d += BLOCK * LANES) {
    vec a[BLOCK], b[BLOCK];
    for (int i = 0; i < BLOCK; ++i) {
      a[i] = load(acc + d + i * LANES) * shrink[0];
      b[i] = load(acc + DIM + d + i * LANES) * shrink[1];
    }
    for (int k = 0; k < count; ++k) {
      const float w0 = weights[k], w1 = weights[KEY_TILE + k];
      for (int i = 0; i < BLOCK; ++i) {
        const vec value = load(values[k] + d + i * LANES);
        a[i] += w0 * value;
        b[i] += w1 * value;
      }
    }
    for (int i = 0; i < BLOCK; ++i) {
      store(acc + d + i * LANES, a[i]);
      store(acc + DIM + d + i * LANES, b[i]);
    }
  }
}

// A tile of `rows` consecutive queries of a prefill chunk, for all heads of one KV
// head; query i sits at position start + i and sees the keys up to its own.
// query, out: [rows, group, dim], rows `query_stride` and `out_stride` floats apart.
template <int DIM>
void prefill(const Pool& pool, const int32_t* pages, int start, int rows, const float* query,
             int64_t query_stride, float* out, int64_t out_stride, int group, float scale) {
  alignas(64) float keys[DIM * KEY_TILE];  // transposed: [dim, key]
  alignas(64) float scores[2 * KEY_TILE];
  Tile tile;
  const int padded = rows + rows % 2;  // an odd last row is computed twice
  std::vector<float> acc(size_t(group) * padded * DIM, 0.0f);
  std::vector<Running> state(size_t(group) * padded, Running{-INFINITY, 0.0f});
  for (int base = 0; base < start + rows; base += KEY_TILE) {
    const int count = std::min(KEY_TILE, start + rows - base);
    tile.locate(pool, pages, base, count);
    for (int k = 0; k < KEY_TILE; k += LANES)
      for (int d = 0; d < DIM; d += LANES) {
        vec block[LANES];
        for (int i = 0; i < LANES; ++i) block[i] = load(tile.keys[k + i] + d);
        transpose(block);
        for (int i = 0; i < LANES; ++i) store(keys + (d + i) * KEY_TILE + k, block[i]);
      }
    for (int h = 0; h < group; ++h) {
      // Rows before the tile's first key see none of it.
      for (int r = std::max(0, base - start) / 2 * 2; r < rows; r += 2) {
        const int next = std::min(r + 1, rows - 1);
        score_pair<DIM>(scores, query + r * query_stride + h * DIM,
                        query + next * query_stride + h * DIM, keys, scale);
        float shrink[2];
        int visible = 0;
        for (int i = 0; i < 2; ++i) {
          const int seen = std::clamp(start + r + i + 1 - base, 0, count);
          Running& row = state[h * padded + r + i];
          if (seen) {
            shrink[i] = weigh(scores + i * KEY_TILE, seen, row);
          } else {
            std::memset(scores + i * KEY_TILE, 0, KEY_TILE * sizeof(float));
            shrink[i] = 1.0f;
          }
          visible = std::max(visible, seen);
        }
        mix_pair<DIM>(acc.data() + size_t(h * padded + r) * DIM, scores, shrink, tile.values, visible);
      }
    }
  }
  for (int h = 0; h < group; ++h)
    for (int r = 0; r < rows; ++r) {
      const float inverse = 1.0f / state[h * padded + r].sum;
      const float* from = acc.data() + size_t(h * padded + r) * DIM;
      for (int d = 0; d < DIM; d += LANES)
        store(out + r * out_stride + h * DIM + d, load(from + d) * inverse);
    }
}

// A piece of work for one thread: a tile of a row's queries, for one KV head.
struct Task {
  int32_t row;
  int32_t kv_head;
  int32_t first;  // the tile's first query
  int64_t cost;   // pairs of a query and a key
};

// A batch's rows and where their keys and values are, for one layer.
struct Attention {
  float* keys;    // pools whose strides are given in floats; dim is contiguous
  float* values;
  const int32_t* page_tables;  // [rows, table_stride]
  const int32_t* starts;       // [rows]
  const int32_t* query_lens;   // [rows]
  int64_t table_stride;
  int64_t page_stride;
  int64_t slot_stride;
  int64_t head_stride;
  int32_t rows;
  int32_t page_size;
  int32_t heads;
  int32_t kv_heads;
  int32_t dim;
  int32_t uniform;  // one order of sums for decoded and prefilled tokens, which is slower
  float scale;
};

// query: [tokens, heads, dim], tokens `query_stride` apart; out: [tokens, heads, dim], dense.
template <int DIM>
void attend(float* out, const float* query, int64_t query_stride, const Attention& a) {
  const int group = a.heads / a.kv_heads, kv_heads = a.kv_heads, rows = a.rows;
  const int32_t* query_lens = a.query_lens;
  const int64_t out_stride = int64_t(a.heads) * DIM;
  std::vector<Task> tasks;
  std::vector<int64_t> offsets(rows);
  int64_t tokens = 0;
  for (int r = 0; r < rows; ++r) {
    offsets[r] = tokens;
    tokens += query_lens[r];
    for (int q = 0; q < query_lens[r]; q += QUERY_TILE) {
      const int end = std::min(q + QUERY_TILE, query_lens[r]);
      const int64_t cost = int64_t(end - q) * (a.starts[r] + end);
      for (int h = 0; h < kv_heads; ++h) tasks.push_back({r, h, q, cost});
    }
  }
  // The largest first, so that no thread is left with one when the others are done.
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const Task& one, const Task& other) { return one.cost > other.cost; });
#pragma omp parallel for schedule(dynamic)
  for (size_t t = 0; t < tasks.size(); ++t) {
    const auto [row, kv_head, first, cost] = tasks[t];
    const Pool pool{a.keys + kv_head * a.head_stride, a.values + kv_head * a.head_stride,
                    a.page_stride, a.slot_stride, a.page_size};
    const int32_t* pages = a.page_tables + row * a.table_stride;
    const int64_t token = offsets[row] + first, head = int64_t(kv_head) * group * DIM;
    const float* from = query + token * query_stride + head;
    float* to = out + token * out_stride + head;
    if (query_lens[row] == 1 && !a.uniform)
      decode<DIM>(pool, pages, a.starts[row] + 1, from, to, group, a.scale);
    else
      prefill<DIM>(pool, pages, a.starts[row] + first,
                   std::min(QUERY_TILE, query_lens[row] - first), from, query_stride, to,
                   out_stride, group, a.scale);
  }
}

// The same for a head size known at run time. Returns false if there is no kernel for it.
inline bool attend_any(float* out, const float* query, int64_t query_stride, const Attention& a) {
  switch (a.dim) {
    case 8: attend<8>(out, query, query_stride, a); return true;
    case 16: attend<16>(out, query, query_stride, a); return true;
    case 32: attend<32>(out, query, query_stride, a); return true;
    case 64: attend<64>(out, query, query_stride, a); return true;
    case 80: attend<80>(out, query, query_stride, a); return true;
    case 96: attend<96>(out, query, query_stride, a); return true;
    case 128: attend<128>(out, query, query_stride, a); return true;
    default: return false;
  }
}

}  // namespace shoal
