// CPU kernels of the engine, in float32: paged attention that reads pages in
// place, and the small row-wise operations between the matrix products.
//
// Plain C ABI, called through ctypes with raw pointers (which frees the GIL).
// Compiled once per instruction set; vectors are GCC's vector extensions, so
// the same source serves AVX2, AVX-512 and NEON. OpenMP's runtime is the one
// that torch has loaded, so both share one pool of threads.
//
// A row's sums run in an order that depends on its own length and on nothing
// else: not on its neighbours, nor on the number of threads.

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

// One decode row: `group` queries of one KV head over `length` keys.
// query, out: [group, dim]. scratch: group * KEY_TILE floats.
template <int DIM>
void decode(const Pool& pool, const int32_t* pages, int length, const float* query, float* out,
            int group, float scale, float* scratch) {
  constexpr int N = DIM / LANES;
  for (int first = 0; first < group; first += 4) {
    const int heads = std::min(4, group - first);
    Running state[4];
    vec acc[4][N];
    for (int h = 0; h < heads; ++h) {
      state[h] = {-INFINITY, 0.0f};
      for (int i = 0; i < N; ++i) acc[h][i] = vec{};
    }
    for (int base = 0; base < length; base += KEY_TILE) {
      const int count = std::min(KEY_TILE, length - base);
      for (int k = 0; k < count; ++k) {
        const float* key = pool.at(pool.keys, pages, base + k);
        for (int h = 0; h < heads; ++h) {
          const float* q = query + (first + h) * DIM;
          vec dot = vec{};
          for (int i = 0; i < N; ++i) dot += load(q + i * LANES) * load(key + i * LANES);
          scratch[h * KEY_TILE + k] = sum(dot) * scale;
        }
      }
      for (int h = 0; h < heads; ++h) {
        float* s = scratch + h * KEY_TILE;
        float highest = state[h].maximum;
        for (int k = 0; k < count; ++k) highest = std::max(highest, s[k]);
        const float shrink = std::exp(state[h].maximum - highest);
        state[h].maximum = highest;
        for (int k = count; k % LANES; ++k) s[k] = -INFINITY;
        vec total = vec{};
        for (int k = 0; k < count; k += LANES) {
          vec w = exp_nonpositive(load(s + k) - highest);
          for (int lane = 0; lane < LANES; ++lane)
            if (k + lane >= count) w[lane] = 0.0f;
          store(s + k, w);
          total += w;
        }
        state[h].sum = state[h].sum * shrink + sum(total);
        for (int i = 0; i < N; ++i) acc[h][i] *= shrink;
      }
      for (int k = 0; k < count; ++k) {
        const float* value = pool.at(pool.values, pages, base + k);
        for (int h = 0; h < heads; ++h) {
          const float w = scratch[h * KEY_TILE + k];
          for (int i = 0; i < N; ++i) acc[h][i] += w * load(value + i * LANES);
        }
      }
    }
    for (int h = 0; h < heads; ++h) {
      const float inverse = 1.0f / state[h].sum;
      for (int i = 0; i < N; ++i)
        store(out + (first + h) * DIM + i * LANES, acc[h][i] * inverse);
    }
  }
}

// A tile of `rows` consecutive queries of one head of a prefill chunk; query i
// sits at position start + i and sees the keys up to its own. query, out: row i
// begins at i * stride.
template <int DIM>
void prefill(const Pool& pool, const int32_t* pages, int start, int rows, const float* query,
             float* out, int64_t stride, float scale) {
  constexpr int N = DIM / LANES;
  alignas(64) float keys[DIM * KEY_TILE];  // transposed: [dim, key]
  alignas(64) float scores[QUERY_TILE * KEY_TILE];
  alignas(64) float acc[QUERY_TILE * DIM] = {};
  Running state[QUERY_TILE];
  for (int r = 0; r < rows; ++r) state[r] = {-INFINITY, 0.0f};
  const int length = start + rows;
  for (int base = 0; base < length; base += KEY_TILE) {
    const int count = std::min(KEY_TILE, length - base);
    for (int k = 0; k < KEY_TILE; ++k) {
      if (k < count) {
        const float* key = pool.at(pool.keys, pages, base + k);
        for (int d = 0; d < DIM; ++d) keys[d * KEY_TILE + k] = key[d];
      } else {
        for (int d = 0; d < DIM; ++d) keys[d * KEY_TILE + k] = 0.0f;
      }
    }
    for (int r = 0; r < rows; ++r) {
      const float* q = query + r * stride;
      for (int half = 0; half < KEY_TILE; half += 4 * LANES) {
        vec s0 = vec{}, s1 = vec{}, s2 = vec{}, s3 = vec{};
        for (int d = 0; d < DIM; ++d) {
          const float x = q[d];
          const float* line = keys + d * KEY_TILE + half;
          s0 += x * load(line);
          s1 += x * load(line + LANES);
          s2 += x * load(line + 2 * LANES);
          s3 += x * load(line + 3 * LANES);
        }
        float* s = scores + r * KEY_TILE + half;
        store(s, s0 * scale);
        store(s + LANES, s1 * scale);
        store(s + 2 * LANES, s2 * scale);
        store(s + 3 * LANES, s3 * scale);
      }
    }
    for (int r = 0; r < rows; ++r) {
      float* s = scores + r * KEY_TILE;
      const int visible = std::min(count, start + r + 1 - base);
      for (int k = std::max(0, visible); k < KEY_TILE; ++k) s[k] = -INFINITY;
      if (visible <= 0) {
        std::memset(s, 0, KEY_TILE * sizeof(float));
        continue;
      }
      float highest = state[r].maximum;
      for (int k = 0; k < visible; ++k) highest = std::max(highest, s[k]);
      const float shrink = std::exp(state[r].maximum - highest);
      state[r].maximum = highest;
      vec total = vec{};
      for (int k = 0; k < KEY_TILE; k += LANES) {
        vec w = exp_nonpositive(load(s + k) - highest);
        for (int lane = 0; lane < LANES; ++lane)
          if (k + lane >= visible) w[lane] = 0.0f;
        store(s + k, w);
        total += w;
      }
      state[r].sum = state[r].sum * shrink + sum(total);
      for (int d = 0; d < DIM; d += LANES)
        store(acc + r * DIM + d, load(acc + r * DIM + d) * shrink);
    }
    // Two queries share each value they load.
    for (int r = 0; r < rows; r += 2) {
      const bool pair = r + 1 < rows;
      const float* s0 = scores + r * KEY_TILE;
      const float* s1 = pair ? s0 + KEY_TILE : s0;
      vec a0[N], a1[N];
      for (int i = 0; i < N; ++i) {
        a0[i] = load(acc + r * DIM + i * LANES);
        a1[i] = pair ? load(acc + (r + 1) * DIM + i * LANES) : vec{};
      }
      for (int k = 0; k < count; ++k) {
        const float* value = pool.at(pool.values, pages, base + k);
        const float w0 = s0[k], w1 = s1[k];
        for (int i = 0; i < N; ++i) {
          const vec v = load(value + i * LANES);
          a0[i] += w0 * v;
          a1[i] += w1 * v;
        }
      }
      for (int i = 0; i < N; ++i) {
        store(acc + r * DIM + i * LANES, a0[i]);
        if (pair) store(acc + (r + 1) * DIM + i * LANES, a1[i]);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    const float inverse = 1.0f / state[r].sum;
    for (int d = 0; d < DIM; d += LANES)
      store(out + r * stride + d, load(acc + r * DIM + d) * inverse);
  }
}

// A piece of work for one thread.
struct Task {
  int32_t row;
  int32_t head;   // KV head of a decode row, query head of a prefill tile
  int32_t first;  // first query of a prefill tile; -1 for decode
};

template <int DIM>
void attend(float* out, const float* query, const float* keys, const float* values,
            const int32_t* page_tables, int64_t table_stride, const int32_t* starts,
            const int32_t* query_lens, int rows, int heads, int kv_heads, int page_size,
            int64_t page_stride, int64_t slot_stride, int64_t head_stride, float scale) {
  const int group = heads / kv_heads;
  std::vector<Task> tasks;
  std::vector<int64_t> offsets(rows);
  int64_t tokens = 0;
  for (int r = 0; r < rows; ++r) {
    offsets[r] = tokens;
    tokens += query_lens[r];
    if (query_lens[r] == 1) {
      for (int h = 0; h < kv_heads; ++h) tasks.push_back({r, h, -1});
    } else {
      for (int q = 0; q < query_lens[r]; q += QUERY_TILE)
        for (int h = 0; h < heads; ++h) tasks.push_back({r, h, q});
    }
  }
  const int64_t token_stride = int64_t(heads) * DIM;
#pragma omp parallel for schedule(dynamic)
  for (size_t t = 0; t < tasks.size(); ++t) {
    const Task task = tasks[t];
    const int kv_head = task.first < 0 ? task.head : task.head / group;
    const Pool pool{keys + kv_head * head_stride, values + kv_head * head_stride, page_stride,
                    slot_stride, page_size};
    const int32_t* pages = page_tables + task.row * table_stride;
    if (task.first < 0) {
      alignas(64) float scratch[4 * KEY_TILE];
      const int64_t at = offsets[task.row] * token_stride + int64_t(task.head) * group * DIM;
      decode<DIM>(pool, pages, starts[task.row] + 1, query + at, out + at, group, scale, scratch);
    } else {
      const int count = std::min(QUERY_TILE, query_lens[task.row] - task.first);
      const int64_t at = (offsets[task.row] + task.first) * token_stride + int64_t(task.head) * DIM;
      prefill<DIM>(pool, pages, starts[task.row] + task.first, count, query + at, out + at,
                   token_stride, scale);
    }
  }
}

}  // namespace

extern "C" {

// Attends each row's queries to its pages, causally.
//
// out, query: [tokens, heads, dim], the rows' tokens one after the other.
// keys, values: pools whose strides are given in floats; dim is contiguous.
// page_tables: [rows, table_stride]; starts, query_lens: [rows].
// Returns 0, or 1 if there is no kernel for this head size.
int shoal_paged_attention(float* out, const float* query, const float* keys, const float* values,
                          const int32_t* page_tables, int64_t table_stride, const int32_t* starts,
                          const int32_t* query_lens, int rows, int heads, int kv_heads, int dim,
                          int page_size, int64_t page_stride, int64_t slot_stride,
                          int64_t head_stride, float scale) {
#define SHOAL_DIM(D)                                                                            \
  case D:                                                                                       \
    attend<D>(out, query, keys, values, page_tables, table_stride, starts, query_lens, rows,    \
              heads, kv_heads, page_size, page_stride, slot_stride, head_stride, scale);        \
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

// Rotates q and k in place (rotate-half form: Su et al., 2021, as Llama lays it
// out) and writes k and v into their KV slots.
//
// qkv: [tokens, (heads + 2 kv_heads) * dim], a row's q, k and v side by side;
// query: [tokens, heads, dim] receives the rotated q. cos_sin: [positions, dim],
// the first half of a row cosines, the second half sines. pages, slots: [tokens].
void shoal_rope_kv_write(float* query, const float* qkv, const float* cos_sin,
                         const int32_t* positions, const int32_t* pages, const int32_t* slots,
                         float* keys, float* values, int tokens, int heads, int kv_heads, int dim,
                         int64_t page_stride, int64_t slot_stride, int64_t head_stride) {
  const int half = dim / 2;
  const int64_t width = int64_t(heads + 2 * kv_heads) * dim;
#pragma omp parallel for schedule(static) if (tokens > 16)
  for (int t = 0; t < tokens; ++t) {
    const float* row = qkv + t * width;
    const float* cosine = cos_sin + int64_t(positions[t]) * dim;
    const float* sine = cosine + half;
    const int64_t where = pages[t] * page_stride + slots[t] * slot_stride;
    for (int h = 0; h < heads + kv_heads; ++h) {
      const float* x = row + int64_t(h) * dim;
      float* y = h < heads ? query + (int64_t(t) * heads + h) * dim
                           : keys + where + (h - heads) * head_stride;
      for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        y[i] = a * cosine[i] - b * sine[i];
        y[i + half] = b * cosine[i] + a * sine[i];
      }
    }
    for (int h = 0; h < kv_heads; ++h)
      std::memcpy(values + where + h * head_stride, row + int64_t(heads + kv_heads + h) * dim,
                  dim * sizeof(float));
  }
}

// residual += x (if x is given), then out = residual / rms(residual) * weight
// (Zhang and Sennrich, 2019). All [rows, width] but weight, [width].
void shoal_add_rms_norm(float* out, float* residual, const float* x, const float* weight, int rows,
                        int width, float epsilon) {
#pragma omp parallel for schedule(static) if (rows > 16)
  for (int r = 0; r < rows; ++r) {
    float* line = residual + int64_t(r) * width;
    float* y = out + int64_t(r) * width;
    vec squares = vec{};
    float tail = 0.0f;
    int i = 0;
    for (; i + LANES <= width; i += LANES) {
      vec v = load(line + i);
      if (x) {
        v += load(x + int64_t(r) * width + i);
        store(line + i, v);
      }
      squares += v * v;
    }
    for (; i < width; ++i) {
      if (x) line[i] += x[int64_t(r) * width + i];
      tail += line[i] * line[i];
    }
    const float inverse = 1.0f / std::sqrt((sum(squares) + tail) / width + epsilon);
    for (int j = 0; j < width; ++j) y[j] = line[j] * inverse * weight[j];
  }
}

// out = silu(gate) * up, where a row of gate_up is gate then up (Shazeer, 2020).
// gate_up: [rows, 2 * width]; out: [rows, width].
void shoal_silu_mul(float* out, const float* gate_up, int rows, int width) {
#pragma omp parallel for schedule(static) if (rows > 4)
  for (int r = 0; r < rows; ++r) {
    const float* gate = gate_up + int64_t(r) * 2 * width;
    const float* up = gate + width;
    float* y = out + int64_t(r) * width;
    int i = 0;
    for (; i + LANES <= width; i += LANES) {
      const vec g = load(gate + i);
      const vec magnitude = g < 0.0f ? -g : g;
      const vec e = exp_nonpositive(-magnitude);
      // 1 / (1 + e^-g), from e^-|g| so that nothing overflows.
      const vec sigmoid = (g < 0.0f ? e : splat(1.0f)) / (1.0f + e);
      store(y + i, g * sigmoid * load(up + i));
    }
    for (; i < width; ++i) y[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
  }
}

}  // extern "C"
