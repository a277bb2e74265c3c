// All layers of a dense decoder in one call: what is between two products is done in one pass
// over the tokens, and nothing goes back to Python.

#pragma once

#include "attention.h"
#include "elementwise.h"
#include "int8.h"

namespace shoal {

// A packed weight (`PackedWeight` in packing.py), in float32 or, with scales, in eight bits.
struct Weight {
  const void* data;
  const float* scales;  // null: float32
  const float* bias;    // null: none
  int32_t in;
  int32_t out;
  int32_t narrow;  // no integer is above 15
};

inline void product(float* out, const float* x, int rows, const Weight& w) {
  if (w.scales)
    int8_linear(out, x, static_cast<const uint8_t*>(w.data), w.scales, w.bias, rows, w.in, w.out,
                w.narrow != 0);
  else
    linear(out, x, static_cast<const float*>(w.data), w.bias, rows, w.in, w.out);
}

struct Layer {
  const float* input_norm;  // [hidden]
  const float* q_norm;      // [dim], or null
  const float* k_norm;      // [dim], or null
  const float* post_norm;   // [hidden]
  Weight qkv, output, gate_up, down;
};

// What the tokens of a step need beside their rows' attention.
struct Tokens {
  const float* cos;       // [tokens, dim / 2]
  const float* sin;       // [tokens, dim / 2]
  const int32_t* pages;   // [tokens]: where K and V go
  const int32_t* slots;   // [tokens]
  int64_t angle_stride;   // floats from a token's angles to the next's
  int64_t layer_stride;   // floats from a layer's pool to the next's
  int32_t count;
  float eps;
};

// Normalises and rotates q and k in place, and stores k and v. qkv: [tokens, q + k + v, dim]
inline void place(float* qkv, const Layer& layer, const Tokens& tokens, const Attention& a) {
  const int dim = a.dim, rotated = a.heads + a.kv_heads;
  const int64_t stride = int64_t(rotated + a.kv_heads) * dim;
#pragma omp parallel for schedule(static) if (tokens.count > SERIAL_ROWS)
  for (int t = 0; t < tokens.count; ++t) {
    float* token = qkv + t * stride;
    for (int h = 0; h < rotated; ++h) {
      float* head = token + int64_t(h) * dim;
      const float* norm = h < a.heads ? layer.q_norm : layer.k_norm;
      if (norm) norm_row(head, head, norm, dim, tokens.eps);
      rotate(head, tokens.cos + t * tokens.angle_stride, tokens.sin + t * tokens.angle_stride,
             dim);
    }
    const int64_t where = tokens.pages[t] * a.page_stride + tokens.slots[t] * a.slot_stride;
    for (int h = 0; h < a.kv_heads; ++h) {
      const float* key = token + int64_t(a.heads + h) * dim;
      std::memcpy(a.keys + where + h * a.head_stride, key, dim * sizeof(float));
      std::memcpy(a.values + where + h * a.head_stride, key + int64_t(a.kv_heads) * dim,
                  dim * sizeof(float));
    }
  }
}

// x: [tokens, hidden], in place. `a` holds the pools of layer 0. Returns false if there is no
// attention kernel for the head size.
inline bool run_layers(float* x, const Layer* layers, int num_layers, const Tokens& tokens,
                       Attention a) {
  if (num_layers == 0) return true;
  const int rows = tokens.count, hidden = layers[0].qkv.in, size = layers[0].down.in;
  const auto normed = buffer<float>(int64_t(rows) * hidden);
  const auto delta = buffer<float>(int64_t(rows) * hidden);
  const auto qkv = buffer<float>(int64_t(rows) * layers[0].qkv.out);
  const auto attended = buffer<float>(int64_t(rows) * layers[0].output.in);
  const auto gate_up = buffer<float>(int64_t(rows) * 2 * size);
  const auto active = buffer<float>(int64_t(rows) * size);
  rms_norm(normed.get(), x, layers[0].input_norm, rows, hidden, tokens.eps);
  for (int i = 0; i < num_layers; ++i) {
    const Layer& layer = layers[i];
    product(qkv.get(), normed.get(), rows, layer.qkv);
    place(qkv.get(), layer, tokens, a);
    if (!attend_any(attended.get(), qkv.get(), layer.qkv.out, a)) return false;
    product(delta.get(), attended.get(), rows, layer.output);
    add_norm(normed.get(), x, delta.get(), layer.post_norm, rows, hidden, tokens.eps);
    product(gate_up.get(), normed.get(), rows, layer.gate_up);
    silu_mul(active.get(), gate_up.get(), rows, size);
    product(delta.get(), active.get(), rows, layer.down);
    const float* next = i + 1 < num_layers ? layers[i + 1].input_norm : nullptr;
    add_norm(normed.get(), x, delta.get(), next, rows, hidden, tokens.eps);
    a.keys += tokens.layer_stride;
    a.values += tokens.layer_stride;
  }
  return true;
}

}  // namespace shoal
