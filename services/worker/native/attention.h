// Paged attention that reads pages in place: what a batch's rows are cut into for the threads, and
// how the pieces come together.

#pragma once

#include "attention_span.h"

namespace shoal {

constexpr int QUERY_TILE = 32;  // positions attended together in a prefill chunk
// Rows of at most so many queries have their keys cut into spans, which come together at the end
// ("flash-decoding", Dao et al. 2023): a KV head each would leave threads unequal work.
constexpr int SHORT_ROW = 64;
constexpr int KEY_SPAN = 1024;

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

// A piece of work for one thread: a tile of a row's queries and a span of its keys, for one KV
// head. The spans of a tile stand one after the other.
struct Task {
  int32_t row;
  int32_t kv_head;
  int32_t token;   // the tile's first, in the batch
  int32_t start;   // its position
  int32_t tokens;
  int32_t begin, end;  // the keys' positions
  int32_t spans;       // from this on in the tile; 1: it is the last
  int64_t cost() const { return int64_t(tokens) * (end - begin); }
};

inline std::vector<Task> cut(const Attention& a) {
  std::vector<Task> tasks;
  for (int row = 0, token = 0; row < a.rows; token += a.query_lens[row++]) {
    const int length = a.query_lens[row];
    const bool is_short = length <= SHORT_ROW && !a.uniform;
    for (int first = 0; first < length; first += QUERY_TILE) {
      const int start = a.starts[row] + first, tokens = std::min(QUERY_TILE, length - first);
      const int end = start + tokens;
      const int spans = is_short ? (end + KEY_SPAN - 1) / KEY_SPAN : 1;
      for (int head = 0; head < a.kv_heads; ++head)
        for (int s = 0; s < spans; ++s)
          tasks.push_back({row, head, token + first, start, tokens, s * KEY_SPAN,
                           s + 1 < spans ? (s + 1) * KEY_SPAN : end, spans - s});
    }
  }
  return tasks;
}

// Writes the queries of a tile, which come together of `spans` partials. out: their first.
template <int DIM>
void join(const Partial* partials, int spans, const Queries& queries, float* out,
          int64_t out_stride) {
  for (int i = 0; i < queries.count(); ++i) {
    float highest = -INFINITY, total = 0.0f;
    for (int s = 0; s < spans; ++s) highest = std::max(highest, partials[s].state[i].maximum);
    vec acc[DIM / LANES] = {};
    for (int s = 0; s < spans; ++s) {  // what sees nothing of a span has a maximum of -infinity
      const float weight = std::exp(partials[s].state[i].maximum - highest);
      total += weight * partials[s].state[i].sum;
      for (int d = 0; d < DIM; d += LANES)
        acc[d / LANES] += weight * load(partials[s].acc.data() + size_t(i) * DIM + d);
    }
    float* to = out + (i / queries.group) * out_stride + int64_t(i % queries.group) * DIM;
    for (int d = 0; d < DIM; d += LANES) store(to + d, acc[d / LANES] * (1.0f / total));
  }
}

// query: [tokens, heads, dim], tokens `query_stride` apart; out: [tokens, heads, dim], dense.
template <int DIM>
void attend(float* out, const float* query, int64_t query_stride, const Attention& a) {
  const int group = a.heads / a.kv_heads;
  const int64_t out_stride = int64_t(a.heads) * DIM;
  const std::vector<Task> tasks = cut(a);
  std::vector<Partial> partials(tasks.size());
  // The largest first, so that no thread is left with one when the others are done.
  std::vector<int> order(tasks.size());
  for (size_t t = 0; t < tasks.size(); ++t) order[t] = int(t);
  std::stable_sort(order.begin(), order.end(),
                   [&](int one, int other) { return tasks[one].cost() > tasks[other].cost(); });
  const auto queries = [&](const Task& task) {
    return Queries{query + task.token * query_stride + int64_t(task.kv_head) * group * DIM,
                   query_stride, task.start, task.tokens, group};
  };
  const auto write = [&](int first, int spans) {
    const Task& task = tasks[first];
    join<DIM>(&partials[first], spans, queries(task),
              out + task.token * out_stride + int64_t(task.kv_head) * group * DIM, out_stride);
  };
#pragma omp parallel
  {
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < tasks.size(); ++i) {
      const int t = order[i];
      const Task& task = tasks[t];
      const Pool pool{a.keys + task.kv_head * a.head_stride, a.values + task.kv_head * a.head_stride,
                      a.page_stride, a.slot_stride, a.page_size};
      Tiles tiles(pool, a.page_tables + task.row * a.table_stride, task.begin, task.end);
      partials[t].clear(task.tokens * group, DIM);
      if (a.query_lens[task.row] == 1 && !a.uniform)
        decode<DIM>(std::move(tiles), queries(task), a.scale, partials[t]);
      else
        prefill<DIM>(std::move(tiles), queries(task), a.scale, partials[t]);
      if (task.spans == 1 && task.begin == 0) write(t, 1);
    }
#pragma omp for schedule(static)
    for (size_t t = 0; t < tasks.size(); ++t)
      if (tasks[t].spans > 1 && tasks[t].begin == 0) write(int(t), tasks[t].spans);
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
