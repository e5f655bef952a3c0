/* The parts of a decode step between its matrix products, each in one pass over memory.
 *
 * decode_attention serves one new token per slot, over that slot's own length, for float32 caches [slots, kv_heads, capacity, dim]: rotate the new queries and keys, store the new key and value at the slot's position, attend to positions 0..position.
 * Batched matrix products would read every slot up to the longest one's length; this reads each cache line that counts once.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "exp_negative.h"

#define MAX_DIM 256

/* rotate_half convention: the first half pairs with the second. cos and sin hold one angle per dimension. */
static inline void rotate(float *x, const float *cos, const float *sin, int64_t dim) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

/* One head: softmax(scale * query . keys) . values over `length` rows of `dim`. Caches are larger than the processor's own, so values are
 * asked for while keys are read, and the next head's keys while values are. */
static inline __attribute__((always_inline)) void attend(const float *query, const float *keys, const float *values, const float *next_keys,
                                                         int64_t length, int64_t dim, float scale, float *scores, float *out) {
    float largest = -INFINITY, total = 0.0f, sum[MAX_DIM];
    for (int64_t t = 0; t < length; t++) {
        float dot = 0.0f;
        __builtin_prefetch(values + t * dim);
        for (int64_t i = 0; i < dim; i++) dot += query[i] * keys[t * dim + i];
        scores[t] = dot * scale;
    }
    for (int64_t t = 0; t < length; t++) largest = scores[t] > largest ? scores[t] : largest;
    for (int64_t t = 0; t < length; t++) {
        scores[t] = exp_negative(scores[t] - largest);
        total += scores[t];
    }
    memset(sum, 0, sizeof(float) * dim);
    for (int64_t t = 0; t < length; t++) {
        __builtin_prefetch(next_keys + t * dim);
        for (int64_t i = 0; i < dim; i++) sum[i] += scores[t] * values[t * dim + i];
    }
    for (int64_t i = 0; i < dim; i++) out[i] = sum[i] / total;
}

/* fused: rows of queries, keys, values [rows, heads + 2 * kv_heads, dim], rotated in place; cos, sin [positions, dim];
 * position [rows]; scores: room for capacity floats; out [rows, heads, dim]. */
void decode_attention(float *fused, const float *cos, const float *sin, float *keys, float *values, const int64_t *position, float *scores,
                      float *out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t capacity, float scale) {
    int64_t groups = heads / kv_heads;
    for (int64_t row = 0; row < rows; row++) {
        float *q = fused + row * (heads + 2 * kv_heads) * dim, *k = q + heads * dim, *v = k + kv_heads * dim;
        int64_t at = position[row];
        for (int64_t head = 0; head < heads + kv_heads; head++) rotate(q + head * dim, cos + at * dim, sin + at * dim, dim);
        for (int64_t head = 0; head < kv_heads; head++) {
            float *slot_keys = keys + (row * kv_heads + head) * capacity * dim;
            const float *next_keys = slot_keys + capacity * dim; /* of the next head or slot; only ever prefetched */
            float *slot_values = values + (row * kv_heads + head) * capacity * dim;
            memcpy(slot_keys + at * dim, k + head * dim, sizeof(float) * dim);
            memcpy(slot_values + at * dim, v + head * dim, sizeof(float) * dim);
            for (int64_t group = 0; group < groups; group++) {
                const float *query = q + (head * groups + group) * dim;
                float *target = out + ((row * heads) + head * groups + group) * dim;
                switch (dim) { /* constant sizes let the compiler keep a row in registers */
                case 16: attend(query, slot_keys, slot_values, next_keys, at + 1, 16, scale, scores, target); break;
                case 32: attend(query, slot_keys, slot_values, next_keys, at + 1, 32, scale, scores, target); break;
                case 64: attend(query, slot_keys, slot_values, next_keys, at + 1, 64, scale, scores, target); break;
                case 128: attend(query, slot_keys, slot_values, next_keys, at + 1, 128, scale, scores, target); break;
                default: attend(query, slot_keys, slot_values, next_keys, at + 1, dim, scale, scores, target);
                }
            }
        }
    }
}

/* out = x / sqrt(mean(x^2) + eps) * weight, row by row; x, out [rows, width]. */
void rms_norm(const float *x, const float *weight, float *restrict out, int64_t rows, int64_t width, float eps) {
    for (int64_t row = 0; row < rows; row++, x += width, out += width) {
        float squares = 0.0f;
        for (int64_t i = 0; i < width; i++) squares += x[i] * x[i];
        float scale = 1.0f / sqrtf(squares / width + eps);
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
    }
}

/* out = silu(gate) * up; each row of gate_up holds `width` gates and then as many ups; out [rows, width]. */
void swiglu(const float *gate_up, float *restrict out, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++, gate_up += 2 * width, out += width)
        for (int64_t i = 0; i < width; i++) {
            float gate = gate_up[i], small = exp_negative(-fabsf(gate));
            float sigmoid = (gate >= 0.0f ? 1.0f : small) / (1.0f + small);
            out[i] = gate * sigmoid * gate_up[width + i];
        }
}
