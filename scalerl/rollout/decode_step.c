/* A whole decode step of a small Llama in float32, in blocks of rows: one row is one token of one slot.
 *
 * Activations are kept feature by feature, [features][BLOCK], so that a vector register holds one feature of LANES rows and the weights are read
 * where the model keeps them, [outputs, inputs], one broadcast number at a time: nothing is packed, and new weights count at once. What a row
 * yields does not depend on the rows beside it. Keys are stored in tiles of 16 positions, [dim][16], so that 16 scores take one pass without sums
 * across a register; values are stored as rows.
 */
#define _DEFAULT_SOURCE
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "exp_negative.h"

#if defined(__AVX512F__)
#define LANES 16
#define OUTPUTS 8
#else
#define LANES 8
#define OUTPUTS 4
#endif
#define BLOCK (2 * LANES)
#define TILE 16 /* positions; capacities are multiples of it */
#define MLP_PART 32 /* gates, and as many ups, computed before they are multiplied; a multiple of OUTPUTS */

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef float lanes_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float tile __attribute__((vector_size(4 * TILE)));
typedef float tile_at __attribute__((vector_size(4 * TILE), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const float *input_norm, *query_key_value, *out, *mlp_norm, *gate_up, *down;
    float *keys, *values; /* [slots, kv_heads, capacity, dim]; keys in tiles */
} layer_t;

typedef struct {
    int64_t layers, width, heads, kv_heads, dim, inner, capacity;
    float eps, scale;
} shape_t;

/* `outputs` rows of weight times x [inputs][BLOCK], set or added to out [outputs][BLOCK]; `outputs` and `vectors` are constants. */
INLINE void product_tile(const float *weight, int64_t inputs, const float *x, float *out, const int outputs, const int vectors, int add) {
    lanes sum[OUTPUTS][2];
#pragma GCC unroll 16
    for (int o = 0; o < outputs; o++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) sum[o][v] = add ? (lanes)*(const lanes_at *)(out + o * BLOCK + v * LANES) : (lanes){0};
    for (int64_t k = 0; k < inputs; k++) {
        lanes in[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) in[v] = *(const lanes_at *)(x + k * BLOCK + v * LANES);
#pragma GCC unroll 16
        for (int o = 0; o < outputs; o++) {
            lanes factor = weight[o * inputs + k] + (lanes){0};
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) sum[o][v] += factor * in[v];
        }
    }
#pragma GCC unroll 16
    for (int o = 0; o < outputs; o++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) *(lanes_at *)(out + o * BLOCK + v * LANES) = sum[o][v];
}

INLINE void product_of(const float *weight, int64_t inputs, int64_t outputs, const float *x, float *out, const int vectors, int add) {
    int64_t o = 0;
    for (; o + OUTPUTS <= outputs; o += OUTPUTS) product_tile(weight + o * inputs, inputs, x, out + o * BLOCK, OUTPUTS, vectors, add);
    for (; o < outputs; o++) product_tile(weight + o * inputs, inputs, x, out + o * BLOCK, 1, vectors, add);
}

/* out [outputs][BLOCK] = or += weight [outputs, inputs] x [inputs][BLOCK]; rows beyond `rows` may be left out. */
static void product(const float *weight, int64_t inputs, int64_t outputs, const float *x, float *out, int64_t rows, int add) {
    int one = rows <= LANES;
    switch (inputs) { /* constant sizes make the weights' addresses constant offsets */
    case 64: one ? product_of(weight, 64, outputs, x, out, 1, add) : product_of(weight, 64, outputs, x, out, 2, add); break;
    case 128: one ? product_of(weight, 128, outputs, x, out, 1, add) : product_of(weight, 128, outputs, x, out, 2, add); break;
    case 256: one ? product_of(weight, 256, outputs, x, out, 1, add) : product_of(weight, 256, outputs, x, out, 2, add); break;
    default: one ? product_of(weight, inputs, outputs, x, out, 1, add) : product_of(weight, inputs, outputs, x, out, 2, add);
    }
}

/* out = x / sqrt(mean(x^2) + eps) * weight for each row of [width][BLOCK]. */
static void norm(const float *restrict x, const float *restrict weight, float *restrict out, int64_t width, float eps) {
    float scale[BLOCK] = {0};
    for (int64_t i = 0; i < width; i++)
        for (int r = 0; r < BLOCK; r++) scale[r] += x[i * BLOCK + r] * x[i * BLOCK + r];
    for (int r = 0; r < BLOCK; r++) scale[r] = 1.0f / sqrtf(scale[r] / width + eps);
    for (int64_t i = 0; i < width; i++)
        for (int r = 0; r < BLOCK; r++) out[i * BLOCK + r] = x[i * BLOCK + r] * scale[r] * weight[i];
}

/* rotate_half convention: the first half pairs with the second. x, cos, sin [dim][BLOCK]. */
static void rotate(float *restrict x, const float *restrict cos, const float *restrict sin, int64_t dim) {
    int64_t half = dim / 2 * BLOCK;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

/* One head: softmax(query . keys) . values over `length` positions; keys in tiles, values in rows. Caches are larger than the processor's own,
 * so values are asked for while keys are read, and the next keys while values are. */
INLINE void attend(const float *query, const float *keys, const float *values, const float *next_keys, int64_t length, int64_t dim,
                   float *scores, float *out) {
    int64_t tiles = (length + TILE - 1) / TILE;
    float largest = -INFINITY;
    for (int64_t j = 0; j < tiles; j++) {
        const float *rows = keys + j * TILE * dim;
        tile even = {0}, odd = {0};
        int64_t i = 0;
        for (; i + 1 < dim; i += 2) {
            __builtin_prefetch(values + (j * dim + i) * TILE, 0, 2);
            __builtin_prefetch(values + (j * dim + i + 1) * TILE, 0, 2);
            even += query[i] * *(const tile_at *)(rows + i * TILE);
            odd += query[i + 1] * *(const tile_at *)(rows + (i + 1) * TILE);
        }
        if (i < dim) even += query[i] * *(const tile_at *)(rows + i * TILE);
        *(tile_at *)(scores + j * TILE) = even + odd;
    }
    for (int64_t t = length; t < tiles * TILE; t++) scores[t] = -INFINITY; /* whatever is stored there */
    for (int64_t t = 0; t < tiles * TILE; t++) largest = scores[t] > largest ? scores[t] : largest;
    float total = 0.0f;
    for (int64_t t = 0; t < tiles * TILE; t++) {
        scores[t] = exp_negative(scores[t] - largest);
        total += t < length ? scores[t] : 0.0f;
    }
    int64_t first = 0;
    for (; first + TILE <= dim; first += TILE) { /* four sums in registers, so that none waits for another */
        const float *column = values + first;
        tile a = {0}, b = {0}, c = {0}, d = {0};
        int64_t t = 0;
        for (; t + 4 <= length; t += 4) {
            for (int64_t i = 0; first == 0 && i < 4; i++) __builtin_prefetch(next_keys + (t + i) * dim, 0, 2);
            a += scores[t] * *(const tile_at *)(column + t * dim);
            b += scores[t + 1] * *(const tile_at *)(column + (t + 1) * dim);
            c += scores[t + 2] * *(const tile_at *)(column + (t + 2) * dim);
            d += scores[t + 3] * *(const tile_at *)(column + (t + 3) * dim);
        }
        for (; t < length; t++) a += scores[t] * *(const tile_at *)(column + t * dim);
        *(tile_at *)(out + first) = ((a + b) + (c + d)) / total;
    }
    for (int64_t i = first; i < dim; i++) {
        float sum = 0.0f;
        for (int64_t t = 0; t < length; t++) sum += scores[t] * values[t * dim + i];
        out[i] = sum / total;
    }
}

/* Rows of fused hold rotated queries (scaled), keys and values [rows][heads + 2 * kv_heads, dim]: store the new keys and values, then attend. */
static void attention(const shape_t *s, const layer_t *layer, float *fused, const int64_t *slots, const int64_t *positions, int64_t rows,
                      float *scores, float *attended) {
    int64_t dim = s->dim, stride = (s->heads + 2 * s->kv_heads) * dim, store = s->capacity * dim, groups = s->heads / s->kv_heads;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < s->kv_heads; h++) {
            int64_t head = (slots[r] * s->kv_heads + h) * store, at = positions[r];
            const float *key = fused + r * stride + (s->heads + h) * dim;
            float *column = layer->keys + head + at / TILE * TILE * dim + at % TILE;
            for (int64_t i = 0; i < dim; i++) column[i * TILE] = key[i];
            memcpy(layer->values + head + at * dim, key + s->kv_heads * dim, sizeof(float) * dim);
        }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < s->heads; h++) {
            int64_t head = (slots[r] * s->kv_heads + h / groups) * store, length = positions[r] + 1;
            int64_t next = h + 1 < s->heads ? (slots[r] * s->kv_heads + (h + 1) / groups) * store : r + 1 < rows ? slots[r + 1] * s->kv_heads * store : head;
            const float *query = fused + r * stride + h * dim, *keys = layer->keys + head, *values = layer->values + head;
            float *out = attended + (r * s->heads + h) * dim;
            switch (dim) { /* constant sizes let the compiler keep a row in registers */
            case 16: attend(query, keys, values, layer->keys + next, length, 16, scores, out); break;
            case 32: attend(query, keys, values, layer->keys + next, length, 32, scores, out); break;
            case 64: attend(query, keys, values, layer->keys + next, length, 64, scores, out); break;
            default: attend(query, keys, values, layer->keys + next, length, dim, scores, out);
            }
        }
}

/* [features][BLOCK] to [rows][features] and back. */
static void to_rows(const float *restrict x, float *restrict out, int64_t features, int64_t rows) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < features; i++) out[r * features + i] = x[i * BLOCK + r];
}
static void to_features(const float *restrict x, float *restrict out, int64_t features, int64_t rows) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < features; i++) out[i * BLOCK + r] = x[r * features + i];
}

/* x += down(silu(gate(y)) * up(y)), a part of the inner features at a time. */
static void feed_forward(const shape_t *s, const layer_t *layer, const float *y, float *x, float *inner, int64_t rows) {
    float gate[MLP_PART * BLOCK], up[MLP_PART * BLOCK];
    for (int64_t start = 0; start < s->inner; start += MLP_PART) {
        int64_t part = s->inner - start < MLP_PART ? s->inner - start : MLP_PART;
        product(layer->gate_up + start * s->width, s->width, part, y, gate, rows, 0);
        product(layer->gate_up + (s->inner + start) * s->width, s->width, part, y, up, rows, 0);
        float *target = inner + start * BLOCK;
        for (int64_t i = 0; i < part * BLOCK; i++) {
            float small = exp_negative(-fabsf(gate[i]));
            target[i] = gate[i] * ((gate[i] >= 0.0f ? 1.0f : small) / (1.0f + small)) * up[i];
        }
    }
    product(layer->down, s->inner, s->width, inner, x, rows, 1);
}

/* Ask for huge pages under fresh memory: attention walks all of a store in every step, and small pages cost it address translations. */
void use_huge_pages(void *start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    uintptr_t page = (uintptr_t)1 << 21, first = ((uintptr_t)start + page - 1) & ~(page - 1), end = ((uintptr_t)start + bytes) & ~(page - 1);
    if (first < end) madvise((void *)first, end - first, MADV_HUGEPAGE); /* a refusal changes nothing */
#else
    (void)start, (void)bytes;
#endif
}

/* Floats of scratch memory that read_tokens needs. */
int64_t scratch_floats(const shape_t *s) {
    int64_t fused = (s->heads + 2 * s->kv_heads) * s->dim, attended = s->heads * s->dim;
    return BLOCK * (2 * s->width + 2 * fused + 2 * attended + s->inner + 2 * s->dim) + s->capacity;
}

/* Read one token per row, int64 [n], into its slot's cache at its position; write hidden states [n, width] unless `hidden` is null.
 * Rows of one slot must stand in order of their positions. cos, sin [positions, dim]. */
void read_tokens(const shape_t *s, const layer_t *layers, const float *embedding, const float *last_norm, const float *cos, const float *sin,
                 const int64_t *tokens, const int64_t *slots, const int64_t *positions, int64_t n, float *scratch, float *hidden) {
    int64_t fused_size = (s->heads + 2 * s->kv_heads) * s->dim, attended_size = s->heads * s->dim;
    float *x = scratch, *y = x + BLOCK * s->width, *fused = y + BLOCK * s->width, *by_row = fused + BLOCK * fused_size;
    float *attended = by_row + BLOCK * fused_size, *attended_rows = attended + BLOCK * attended_size;
    float *inner = attended_rows + BLOCK * attended_size, *cosines = inner + BLOCK * s->inner, *sines = cosines + BLOCK * s->dim;
    float *scores = sines + BLOCK * s->dim;
    memset(scratch, 0, sizeof(float) * (size_t)(scores - scratch)); /* rows that a block lacks are finite */
    for (int64_t start = 0; start < n; start += BLOCK, tokens += BLOCK, slots += BLOCK, positions += BLOCK) {
        int64_t rows = n - start < BLOCK ? n - start : BLOCK;
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t i = 0; i < s->width; i++) x[i * BLOCK + r] = embedding[tokens[r] * s->width + i];
            for (int64_t i = 0; i < s->dim; i++) {
                cosines[i * BLOCK + r] = cos[positions[r] * s->dim + i];
                sines[i * BLOCK + r] = sin[positions[r] * s->dim + i];
            }
        }
        for (int64_t l = 0; l < s->layers; l++) {
            const layer_t *layer = layers + l;
            norm(x, layer->input_norm, y, s->width, s->eps);
            product(layer->query_key_value, s->width, fused_size, y, fused, rows, 0);
            for (int64_t h = 0; h < s->heads + s->kv_heads; h++) rotate(fused + h * s->dim * BLOCK, cosines, sines, s->dim);
            for (int64_t i = 0; i < attended_size * BLOCK; i++) fused[i] *= s->scale;
            to_rows(fused, by_row, fused_size, rows);
            attention(s, layer, by_row, slots, positions, rows, scores, attended_rows);
            if (l + 1 == s->layers && !hidden) break; /* the cache is all that was asked for */
            to_features(attended_rows, attended, attended_size, rows);
            product(layer->out, attended_size, s->width, attended, x, rows, 1);
            norm(x, layer->mlp_norm, y, s->width, s->eps);
            feed_forward(s, layer, y, x, inner, rows);
        }
        if (!hidden) continue;
        norm(x, last_norm, y, s->width, s->eps);
        to_rows(y, hidden + start * s->width, s->width, rows);
    }
}

/* Draw one token per row of logits [rows, vocabulary] by the inverse CDF at its uniform number; write its log-probability and, unless
 * `entropies` is null, the distribution's entropy in nats. The sum runs in float64 in order of token ids. scratch: 2 * vocabulary doubles.
 * Logits that are not finite make the log-probability NaN. */
void draw(const float *logits, const double *uniforms, int64_t rows, int64_t vocabulary, float temperature, double *scratch, int64_t *tokens,
          float *logprobs, float *entropies) {
    double *cumulative = scratch;
    float *scaled = (float *)(scratch + vocabulary), *p = scaled + vocabulary;
    for (int64_t row = 0; row < rows; row++, logits += vocabulary) {
        float largest = -INFINITY;
        for (int64_t i = 0; i < vocabulary; i++) scaled[i] = logits[i] / temperature;
        for (int64_t i = 0; i < vocabulary; i++) largest = scaled[i] > largest ? scaled[i] : largest;
        for (int64_t i = 0; i < vocabulary; i++) {
            scaled[i] -= largest;
            float e = exp_negative(scaled[i]);
            p[i] = scaled[i] < -87.0f ? 0.0f : e;
        }
        double total = 0.0;
        for (int64_t i = 0; i < vocabulary; i++) cumulative[i] = total += p[i];
        double target = uniforms[row] * total, most = nextafter(total, 0.0);
        target = target < most ? target : most; /* u * total may round up to total itself, which no token covers */
        int64_t token = 0;
        while (token < vocabulary - 1 && !(cumulative[token] > target)) token++;
        double log_total = log(total);
        tokens[row] = token;
        logprobs[row] = (float)(scaled[token] - log_total);
        if (!entropies) continue;
        double weighted = 0.0;
        for (int64_t i = 0; i < vocabulary; i++) weighted += p[i] > 0.0f ? (double)p[i] * scaled[i] : 0.0;
        entropies[row] = (float)(log_total - weighted / total);
    }
}
