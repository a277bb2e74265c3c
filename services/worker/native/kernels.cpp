// CPU kernels of the engine, in float32: paged attention that reads pages in
// place, and the linear, norm and activation of the deterministic mode.
//
// Plain C ABI, called through ctypes with raw pointers (which frees the GIL).
// Compiled once per instruction set; vectors are GCC's vector extensions, so
// the same source serves AVX2, AVX-512 and NEON. OpenMP's runtime is the one
// that torch has loaded, so both share one pool of threads.
//
// A row's sums run in an order that depends on its own length and on nothing
// else: not on its neighbours, nor on the number of threads. With `uniform`
// attention a token's result does not depend either on whether it was decoded
// or prefilled, in whatever chunk.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int LANES = 8;
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

constexpr int QUERY_TILE = 32;  // queries attended together in a prefill chunk
constexpr int KEY_TILE = 64;    // keys whose scores are held at once

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

// A vector of `count` numbers, zeros after them, so that a tail takes the same path.
inline vec load_part(const float* p, int count) {
  vec v = vec{};
  std::memcpy(&v, p, sizeof(float) * count);
  return v;
}

inline void store_part(float* p, vec v, int count) { std::memcpy(p, &v, sizeof(float) * count); }

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
  float highest = state.maximum;
  for (int k = 0; k < count; ++k) highest = std::max(highest, scores[k]);
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

// One decode row: `group` queries of one KV head over `length` keys.
// query, out: [group, dim].
template <int DIM>
void decode(const Pool& pool, const int32_t* pages, int length, const float* query, float* out,
            int group, float scale) {
  constexpr int N = DIM / LANES;
  alignas(64) float scores[KEY_TILE];
  const float* keys[KEY_TILE];
  const float* values[KEY_TILE];
  std::vector<Running> state(group, Running{-INFINITY, 0.0f});
  std::memset(out, 0, sizeof(float) * group * DIM);
  for (int base = 0; base < length; base += KEY_TILE) {
    const int count = std::min(KEY_TILE, length - base);
    for (int k = 0; k < KEY_TILE; ++k) {  // past the end, the last key again: never weighed
      const int position = base + std::min(k, count - 1);
      keys[k] = pool.at(pool.keys, pages, position);
      values[k] = pool.at(pool.values, pages, position);
    }
    for (int h = 0; h < group; ++h) {  // the tile is in the first-level cache after one head
      const float* q = query + h * DIM;
      for (int first = 0; first < count; first += LANES) {
        vec dots[LANES];
        for (int k = 0; k < LANES; ++k) {
          const float* key = keys[first + k];
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
        for (int i = 0; i < N; ++i) acc[i] += scores[k] * load(values[k] + i * LANES);
      for (int i = 0; i < N; ++i) store(out + h * DIM + i * LANES, acc[i]);
    }
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
// query, out: [rows, group, dim], rows `stride` floats apart.
template <int DIM>
void prefill(const Pool& pool, const int32_t* pages, int start, int rows, const float* query,
             float* out, int64_t stride, int group, float scale) {
  alignas(64) float keys[DIM * KEY_TILE];  // transposed: [dim, key]
  alignas(64) float scores[2 * KEY_TILE];
  const float* values[KEY_TILE];
  const int padded = rows + rows % 2;  // an odd last row is computed twice
  std::vector<float> acc(size_t(group) * padded * DIM, 0.0f);
  std::vector<Running> state(size_t(group) * padded, Running{-INFINITY, 0.0f});
  for (int base = 0; base < start + rows; base += KEY_TILE) {
    const int count = std::min(KEY_TILE, start + rows - base);
    for (int k = 0; k < KEY_TILE; ++k) {
      const int position = base + std::min(k, count - 1);
      const float* key = pool.at(pool.keys, pages, position);
      values[k] = pool.at(pool.values, pages, position);
      for (int d = 0; d < DIM; ++d) keys[d * KEY_TILE + k] = key[d];
    }
    for (int h = 0; h < group; ++h) {
      // Rows before the tile's first key see none of it.
      for (int r = std::max(0, base - start) / 2 * 2; r < rows; r += 2) {
        const int next = std::min(r + 1, rows - 1);
        score_pair<DIM>(scores, query + r * stride + h * DIM, query + next * stride + h * DIM,
                        keys, scale);
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
        mix_pair<DIM>(acc.data() + size_t(h * padded + r) * DIM, scores, shrink, values, visible);
      }
    }
  }
  for (int h = 0; h < group; ++h)
    for (int r = 0; r < rows; ++r) {
      const float inverse = 1.0f / state[h * padded + r].sum;
      const float* from = acc.data() + size_t(h * padded + r) * DIM;
      for (int d = 0; d < DIM; d += LANES)
        store(out + r * stride + h * DIM + d, load(from + d) * inverse);
    }
}

// A piece of work for one thread: a tile of a row's queries, for one KV head.
struct Task {
  int32_t row;
  int32_t kv_head;
  int32_t first;  // the tile's first query
};

template <int DIM>
void attend(float* out, const float* query, const float* keys, const float* values,
            const int32_t* page_tables, int64_t table_stride, const int32_t* starts,
            const int32_t* query_lens, int rows, int heads, int kv_heads, int page_size,
            int64_t page_stride, int64_t slot_stride, int64_t head_stride, float scale,
            bool uniform) {
  const int group = heads / kv_heads;
  const int64_t token_stride = int64_t(heads) * DIM;
  std::vector<Task> tasks;
  std::vector<int64_t> offsets(rows);
  int64_t tokens = 0;
  for (int r = 0; r < rows; ++r) {
    offsets[r] = tokens;
    tokens += query_lens[r];
    for (int q = 0; q < query_lens[r]; q += QUERY_TILE)
      for (int h = 0; h < kv_heads; ++h) tasks.push_back({r, h, q});
  }
#pragma omp parallel for schedule(dynamic)
  for (size_t t = 0; t < tasks.size(); ++t) {
    const auto [row, kv_head, first] = tasks[t];
    const Pool pool{keys + kv_head * head_stride, values + kv_head * head_stride, page_stride,
                    slot_stride, page_size};
    const int32_t* pages = page_tables + row * table_stride;
    const int64_t at = (offsets[row] + first) * token_stride + int64_t(kv_head) * group * DIM;
    if (query_lens[row] == 1 && !uniform)
      decode<DIM>(pool, pages, starts[row] + 1, query + at, out + at, group, scale);
    else
      prefill<DIM>(pool, pages, starts[row] + first, std::min(QUERY_TILE, query_lens[row] - first),
                   query + at, out + at, token_stride, group, scale);
  }
}

// --- linear ---

constexpr int PANEL = 2 * LANES;  // outputs computed together
constexpr int ROW_BLOCK = 6;      // rows computed together: 12 sums, in registers
constexpr int ROW_TILE = 96;      // rows whose inputs stay in the second-level cache

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
  for (int r = 0; r < ROWS; ++r) {
    alignas(64) float sums[PANEL];
    store(sums, low[r]);
    store(sums + LANES, high[r]);
    for (int n = 0; n < width; ++n) out[r * stride + n] = bias ? sums[n] + bias[n] : sums[n];
  }
}

void linear_tile(const float* x, const float* panel, const float* bias, int rows, int in,
                 float* out, int64_t stride, int width) {
  using Kernel = decltype(&linear_rows<1>);
  constexpr Kernel kernels[] = {linear_rows<1>, linear_rows<2>, linear_rows<3>,
                                linear_rows<4>, linear_rows<5>, linear_rows<ROW_BLOCK>};
  for (int r = 0; r < rows; r += ROW_BLOCK)
    kernels[std::min(rows - r, ROW_BLOCK) - 1](x + int64_t(r) * in, panel, bias, in,
                                               out + r * stride, stride, width);
}

}  // namespace

extern "C" {

// Attends each row's queries to its pages, causally.
//
// out, query: [tokens, heads, dim], the rows' tokens one after the other.
// keys, values: pools whose strides are given in floats; dim is contiguous.
// page_tables: [rows, table_stride]; starts, query_lens: [rows].
// uniform: one order of sums for decoded and prefilled tokens, which is slower.
// Returns 0, or 1 if there is no kernel for this head size.
int shoal_paged_attention(float* out, const float* query, const float* keys, const float* values,
                          const int32_t* page_tables, int64_t table_stride, const int32_t* starts,
                          const int32_t* query_lens, int rows, int heads, int kv_heads, int dim,
                          int page_size, int64_t page_stride, int64_t slot_stride,
                          int64_t head_stride, float scale, int uniform) {
#define SHOAL_DIM(D)                                                                            \
  case D:                                                                                       \
    attend<D>(out, query, keys, values, page_tables, table_stride, starts, query_lens, rows,    \
              heads, kv_heads, page_size, page_stride, slot_stride, head_stride, scale,         \
              uniform != 0);                                                                    \
    return 0;
  switch (dim) {
    SHOAL_DIM(8)
    SHOAL_DIM(16)
    SHOAL_DIM(32)
    SHOAL_DIM(64)
    SHOAL_DIM(80)
    SHOAL_DIM(96)
    SHOAL_DIM(128)
    default:
      return 1;
  }
#undef SHOAL_DIM
}

// Copies each token's k and v into its KV slot.
//
// k, v: [tokens, kv_heads, dim], tokens `token_stride` floats apart (k and v may be
// parts of a wider projection); pages, slots: [tokens].
void shoal_kv_write(float* keys, float* values, const float* k, const float* v,
                    int64_t k_token_stride, int64_t v_token_stride, const int32_t* pages,
                    const int32_t* slots, int tokens, int kv_heads, int dim, int64_t page_stride,
                    int64_t slot_stride, int64_t head_stride) {
  for (int t = 0; t < tokens; ++t) {
    const int64_t where = pages[t] * page_stride + slots[t] * slot_stride;
    for (int h = 0; h < kv_heads; ++h) {
      std::memcpy(keys + where + h * head_stride, k + t * k_token_stride + int64_t(h) * dim,
                  dim * sizeof(float));
      std::memcpy(values + where + h * head_stride, v + t * v_token_stride + int64_t(h) * dim,
                  dim * sizeof(float));
    }
  }
}

// y = x W^T + bias.
//
// x: [rows, in]; packed: [outputs / PANEL, in, PANEL], zeros past the last output;
// bias: [outputs] or null; out: [rows, outputs].
void shoal_linear(float* out, const float* x, const float* packed, const float* bias, int rows,
                  int in, int outputs) {
  const int panels = (outputs + PANEL - 1) / PANEL;
  const int tiles = (rows + ROW_TILE - 1) / ROW_TILE;
#pragma omp parallel for collapse(2) schedule(static)
  for (int t = 0; t < tiles; ++t)
    for (int p = 0; p < panels; ++p) {
      const int first = t * ROW_TILE, column = p * PANEL;
      linear_tile(x + int64_t(first) * in, packed + int64_t(p) * in * PANEL,
                  bias ? bias + column : nullptr, std::min(ROW_TILE, rows - first), in,
                  out + int64_t(first) * outputs + column, outputs,
                  std::min(PANEL, outputs - column));
    }
}

// out = x / rms(x) * weight over rows of `size`.
void shoal_rms_norm(float* out, const float* x, const float* weight, int rows, int size,
                    float eps) {
#pragma omp parallel for schedule(static) if (rows > 16)
  for (int r = 0; r < rows; ++r) {
    const float* row = x + int64_t(r) * size;
    float* to = out + int64_t(r) * size;
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
}

// out = silu(gate) * up; gate_up: [rows, gate then up, each `size`]; out: [rows, size].
void shoal_silu_mul(float* out, const float* gate_up, int rows, int size) {
#pragma omp parallel for schedule(static) if (rows > 16)
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

}  // extern "C"
