// CPU kernels of the engine: the C interface to the headers beside this file.
//
// Called through ctypes with raw pointers (which frees the GIL); the structures are mirrored in
// structures.py. Compiled once per instruction set; vectors are GCC's vector extensions, so the
// same source serves AVX2, AVX-512 and NEON. OpenMP's runtime is the one that torch has loaded,
// so both share one pool of threads.
//
// A row's sums run in an order that depends on its own length and on nothing else: not on its
// neighbours, nor on the number of threads. With `uniform` attention a token's result does not
// depend either on whether it was decoded or prefilled, in whatever chunk.

#include "layers.h"
#include "sampling.h"

#define SHOAL_API extern "C" __attribute__((visibility("default")))

// Attends each row's queries to its pages, causally. out, query: [tokens, heads, dim], the rows'
// tokens one after the other. Returns 0, or 1 if there is no kernel for this head size.
SHOAL_API int shoal_paged_attention(float* out, const float* query, const shoal::Attention* a) {
  return shoal::attend_any(out, query, int64_t(a->heads) * a->dim, *a) ? 0 : 1;
}

// Copies each token's k and v into its KV slot.
//
// k, v: [tokens, kv_heads, dim], tokens `token_stride` floats apart (k and v may be
// parts of a wider projection); pages, slots: [tokens].
SHOAL_API void shoal_kv_write(float* keys, float* values, const float* k, const float* v,
                              int64_t k_token_stride, int64_t v_token_stride,
                              const int32_t* pages, const int32_t* slots, int tokens, int kv_heads,
                              int dim, int64_t page_stride, int64_t slot_stride,
                              int64_t head_stride) {
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

// y = x W^T + bias. x: [rows, in]; out: [rows, outputs].
SHOAL_API void shoal_linear(float* out, const float* x, int rows, const shoal::Weight* weight) {
  shoal::product(out, x, rows, *weight);
}

// out = x / rms(x) * weight over rows of `size`.
SHOAL_API void shoal_rms_norm(float* out, const float* x, const float* weight, int rows, int size,
                              float eps) {
  shoal::rms_norm(out, x, weight, rows, size, eps);
}

// out = silu(gate) * up; gate_up: [rows, gate then up, each `size`]; out: [rows, size].
SHOAL_API void shoal_silu_mul(float* out, const float* gate_up, int rows, int size) {
  shoal::silu_mul(out, gate_up, rows, size);
}

// Every layer of a dense decoder. x: [tokens, hidden], in place.
// Returns 0, or 1 if there is no attention kernel for this head size.
SHOAL_API int shoal_layers(float* x, const shoal::Layer* layers, int num_layers,
                           const shoal::Tokens* tokens, const shoal::Attention* attention) {
  return shoal::run_layers(x, layers, num_layers, *tokens, *attention) ? 0 : 1;
}

// A token for each row. logits: [rows, vocab], rows `stride` apart; draws, ids: [rows].
SHOAL_API void shoal_choose(int64_t* ids, const float* logits, int64_t stride,
                            const shoal::Draw* draws, int rows, int vocab) {
#pragma omp parallel for schedule(dynamic) if (rows > 1)
  for (int r = 0; r < rows; ++r) ids[r] = shoal::choose(logits + r * stride, vocab, draws[r]);
}

// Penalises some rows of logits in place. outputs: how often each id was chosen, in_prompt: 1 where
// it is in the prompt, both [counts rows, vocab].
SHOAL_API void shoal_penalize(float* logits, int64_t stride, const int32_t* outputs,
                              const uint8_t* in_prompt, const shoal::Penalty* penalties, int count,
                              int vocab) {
#pragma omp parallel for schedule(static) if (count > 1)
  for (int i = 0; i < count; ++i) {
    const shoal::Penalty& penalty = penalties[i];
    const int64_t counts = int64_t(penalty.counts_row) * vocab;
    shoal::penalize(logits + penalty.row * stride, outputs + counts, in_prompt + counts, vocab,
                    penalty);
  }
}
