/* A whole decode step of a small Llama in float32, in blocks of rows: one row is one token of one slot.
 *
 * Activations are kept feature by feature, [features][BLOCK], so that a vector register holds one feature of LANES rows and the weights are read
 * where the model keeps them, [outputs, inputs], one broadcast number at a time: nothing is packed, and new weights count at once. What a row
 * yields does not depend on the rows beside it.
 *
 * The caches of many slots are larger than the processor's own, and every step walks through all that counts of them. So they are kept in tiles of
 * 16 positions: per head the keys, [dim][16], from which 16 scores come without sums across a register, then the values, [16][dim]. A slot's tiles
 * lie one after another and are read once, in order, for all heads (the processor's own prefetching works on long runs only), and while the matrix
 * products compute they ask for the tiles that attention will want next, so that memory does not idle.
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
#define RUN 64 /* cache lines asked for at a time, one after another */
#define LINE 16 /* floats of a cache line */
#define ROOM 32.0f /* how far scores may pass the one that weights are relative to: e^32 times any count stays far below float's end */
#define MLP_PART 32 /* gates, and as many ups, computed before they are multiplied; a multiple of OUTPUTS */

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef float lanes_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float tile __attribute__((vector_size(4 * TILE)));
typedef float tile_at __attribute__((vector_size(4 * TILE), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const float *input_norm, *query_key_value, *out, *mlp_norm, *gate_up, *down;
    float *store; /* [slots, capacity / TILE, kv_heads, keys and values, TILE * dim] */
} layer_t;

typedef struct {
    int64_t layers, width, heads, kv_heads, dim, inner, capacity;
    float eps, scale;
} shape_t;

INLINE int64_t tile_floats(const shape_t *s) { return 2 * TILE * s->dim * s->kv_heads; }
INLINE int64_t slot_floats(const shape_t *s) { return s->capacity / TILE * tile_floats(s); }

/* What to ask for: the tiles in use of the slots of `rows` rows in one layer, from `at` on. */
typedef struct {
    const float *at, *end, *store;
    const int64_t *slots, *positions;
    int64_t rows, slot_floats, tile_floats;
} ahead_t;

static ahead_t ahead_of(const shape_t *s, const layer_t *layer, const int64_t *slots, const int64_t *positions, int64_t rows) {
    return (ahead_t){.store = layer->store, .slots = slots, .positions = positions, .rows = rows, .slot_floats = slot_floats(s), .tile_floats = tile_floats(s)};
}

/* The start of the next run of up to `lines` cache lines, or `hot` when all has been asked for. */
INLINE const float *next_run(ahead_t *ahead, int64_t lines, const float *hot) {
    if (ahead->at >= ahead->end) {
        if (!ahead->rows) return hot;
        ahead->at = ahead->store + *ahead->slots++ * ahead->slot_floats;
        ahead->end = ahead->at + (*ahead->positions++ / TILE + 1) * ahead->tile_floats;
        ahead->rows--;
    }
    const float *run = ahead->at;
    ahead->at += lines * LINE;
    return run;
}

/* `outputs` rows of weight times x [inputs][BLOCK], set or added to out [outputs][BLOCK]; `outputs` and `vectors` are constants. Asks for one cache
 * line per input. */
INLINE void product_tile(const float *weight, int64_t inputs, const float *x, float *out, const int outputs, const int vectors, int add, ahead_t *ahead) {
    const float *run = x;
    lanes sum[OUTPUTS][2];
#pragma GCC unroll 16
    for (int o = 0; o < outputs; o++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) sum[o][v] = add ? (lanes)*(const lanes_at *)(out + o * BLOCK + v * LANES) : (lanes){0};
    for (int64_t k = 0; k < inputs; k++) {
        if (k % RUN == 0) run = next_run(ahead, inputs - k < RUN ? inputs - k : RUN, x);
        __builtin_prefetch(run + k % RUN * LINE, 0, 2);
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

INLINE void product_of(const float *weight, int64_t inputs, int64_t outputs, const float *x, float *out, const int vectors, int add, ahead_t *ahead) {
    int64_t o = 0;
    for (; o + OUTPUTS <= outputs; o += OUTPUTS) product_tile(weight + o * inputs, inputs, x, out + o * BLOCK, OUTPUTS, vectors, add, ahead);
    for (; o < outputs; o++) product_tile(weight + o * inputs, inputs, x, out + o * BLOCK, 1, vectors, add, ahead);
}

/* out [outputs][BLOCK] = or += weight [outputs, inputs] x [inputs][BLOCK]; rows beyond `rows` may be left out. */
static void product(const float *weight, int64_t inputs, int64_t outputs, const float *x, float *out, int64_t rows, int add, ahead_t *ahead) {
    int one = rows <= LANES;
    switch (inputs) { /* constant sizes make the weights' addresses constant offsets */
    case 64: one ? product_of(weight, 64, outputs, x, out, 1, add, ahead) : product_of(weight, 64, outputs, x, out, 2, add, ahead); break;
    case 128: one ? product_of(weight, 128, outputs, x, out, 1, add, ahead) : product_of(weight, 128, outputs, x, out, 2, add, ahead); break;
    case 256: one ? product_of(weight, 256, outputs, x, out, 1, add, ahead) : product_of(weight, 256, outputs, x, out, 2, add, ahead); break;
    default: one ? product_of(weight, inputs, outputs, x, out, 1, add, ahead) : product_of(weight, inputs, outputs, x, out, 2, add, ahead);
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

/* What one head has seen of its positions: TILE partial sums of weights, the score that weights are relative to, then the weighted values, [dim]. */
#define STATE_FLOATS(dim) (2 * TILE + (dim))

/* weights[t] = exp(query . key t - a score of this head), 0 from `count` on; the sums in `state` follow. The score is that of position 0 until one
 * passes it by more than ROOM, so the branch is nearly never taken. */
INLINE void weigh(const float *query, const float *keys, int64_t count, int first, int64_t dim, float *weights, float *state) {
    tile even = {0}, odd = {0};
    int64_t i = 0;
    for (; i + 1 < dim; i += 2) {
        even += query[i] * *(const tile_at *)(keys + i * TILE);
        odd += query[i + 1] * *(const tile_at *)(keys + (i + 1) * TILE);
    }
    if (i < dim) even += query[i] * *(const tile_at *)(keys + i * TILE);
    *(tile *)weights = even + odd;
    if (count < TILE) /* whatever is stored there */
        for (int64_t t = 0; t < TILE; t++) weights[t] = t < count ? weights[t] : -INFINITY;
    if (first) {
        memset(state, 0, sizeof(float) * STATE_FLOATS(dim));
        state[TILE] = weights[0];
    }
    int over = 0;
    for (int64_t t = 0; t < TILE; t++) over |= weights[t] > state[TILE] + ROOM;
    if (__builtin_expect(over, 0)) {
        float largest = state[TILE];
        for (int64_t t = 0; t < TILE; t++) largest = weights[t] > largest ? weights[t] : largest;
        float factor = exp_negative(state[TILE] - largest);
        for (int64_t i = 0; i < STATE_FLOATS(dim); i++) state[i] *= factor;
        state[TILE] = largest;
    }
    float reference = state[TILE];
    for (int64_t t = 0; t < TILE; t++) weights[t] = exp_negative(weights[t] - reference);
    if (count < TILE)
        for (int64_t t = 0; t < TILE; t++) weights[t] = t < count ? weights[t] : 0.0f;
    *(tile_at *)state += *(tile *)weights;
}

/* TILE features of the weighted values of `count` positions, added to `sum`; values are rows of `dim`. */
INLINE void add_values(const float *weights, const float *values, int64_t count, int64_t dim, float *sum) {
    tile even = {0}, odd = {0};
    int64_t t = 0;
#pragma GCC unroll 8
    for (; t + 1 < count; t += 2) {
        even += weights[t] * *(const tile_at *)(values + t * dim);
        odd += weights[t + 1] * *(const tile_at *)(values + (t + 1) * dim);
    }
    if (t < count) even += weights[t] * *(const tile_at *)(values + t * dim);
    *(tile_at *)sum += even + odd;
}

/* One tile of one head: its keys, then its values, into `state`. */
INLINE void attend_tile(const float *query, const float *keys, int64_t count, int first, int64_t dim, float *state) {
    const float *values = keys + TILE * dim;
    float weights[TILE] __attribute__((aligned(4 * TILE))), *weighted = state + 2 * TILE;
    weigh(query, keys, count, first, dim, weights, state);
    int64_t i = 0;
    for (; i + TILE <= dim; i += TILE) {
        if (count == TILE) /* a constant unrolls the loop */
            add_values(weights, values + i, TILE, dim, weighted + i);
        else
            add_values(weights, values + i, count, dim, weighted + i);
    }
    for (; i < dim; i++) {
        float sum = 0.0f;
        for (int64_t t = 0; t < count; t++) sum += weights[t] * values[t * dim + i];
        weighted[i] += sum;
    }
}

/* All heads of one row: softmax(query . keys) . values over `length` positions. */
INLINE void attend(const shape_t *s, const float *query, const float *tiles, int64_t length, int64_t dim, float *states, float *out) {
    int64_t groups = s->heads / s->kv_heads, size = STATE_FLOATS(dim);
    for (int64_t t = 0; t < length; t += TILE) {
        int64_t count = length - t < TILE ? length - t : TILE;
        for (int64_t h = 0; h < s->heads; h++) {
            const float *keys = tiles + h / groups * 2 * TILE * dim;
            attend_tile(query + h * dim, keys, count, t == 0, dim, states + h * size);
        }
        tiles += tile_floats(s);
    }
    for (int64_t h = 0; h < s->heads; h++, states += size, out += dim) {
        float total = 0.0f;
        for (int64_t t = 0; t < TILE; t++) total += states[t];
        for (int64_t i = 0; i < dim; i++) out[i] = states[2 * TILE + i] / total;
    }
}

/* Store the key and then the value of one position, each [kv_heads, dim], in its slot. */
static void keep(const shape_t *s, const float *key, float *slot, int64_t position) {
    int64_t dim = s->dim, at = position % TILE;
    const float *value = key + s->kv_heads * dim;
    float *tiles = slot + position / TILE * tile_floats(s);
    for (int64_t h = 0; h < s->kv_heads; h++, key += dim, value += dim, tiles += 2 * TILE * dim) {
        for (int64_t i = 0; i < dim; i++) tiles[i * TILE + at] = key[i];
        for (int64_t i = 0; i < dim; i++) tiles[(TILE + at) * dim + i] = value[i];
    }
}

/* Rows of fused hold rotated queries (scaled), keys and values [rows][heads + 2 * kv_heads, dim]: store the new keys and values, then attend. */
static void attention(const shape_t *s, const layer_t *layer, const float *fused, const int64_t *slots, const int64_t *positions, int64_t rows,
                      float *states, float *attended) {
    int64_t dim = s->dim, stride = (s->heads + 2 * s->kv_heads) * dim, store = slot_floats(s);
    for (int64_t r = 0; r < rows; r++) keep(s, fused + r * stride + s->heads * dim, layer->store + slots[r] * store, positions[r]);
    for (int64_t r = 0; r < rows; r++) {
        const float *query = fused + r * stride, *tiles = layer->store + slots[r] * store;
        float *out = attended + r * s->heads * dim;
        switch (dim) { /* constant sizes let the compiler keep a row in registers */
        case 16: attend(s, query, tiles, positions[r] + 1, 16, states, out); break;
        case 32: attend(s, query, tiles, positions[r] + 1, 32, states, out); break;
        case 64: attend(s, query, tiles, positions[r] + 1, 64, states, out); break;
        default: attend(s, query, tiles, positions[r] + 1, dim, states, out);
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
static void feed_forward(const shape_t *s, const layer_t *layer, const float *y, float *x, float *inner, int64_t rows, ahead_t *ahead) {
    float gate[MLP_PART * BLOCK], up[MLP_PART * BLOCK];
    for (int64_t start = 0; start < s->inner; start += MLP_PART) {
        int64_t part = s->inner - start < MLP_PART ? s->inner - start : MLP_PART;
        product(layer->gate_up + start * s->width, s->width, part, y, gate, rows, 0, ahead);
        product(layer->gate_up + (s->inner + start) * s->width, s->width, part, y, up, rows, 0, ahead);
        float *target = inner + start * BLOCK;
        for (int64_t i = 0; i < part * BLOCK; i++) {
            float small = exp_negative(-fabsf(gate[i]));
            target[i] = gate[i] * ((gate[i] >= 0.0f ? 1.0f : small) / (1.0f + small)) * up[i];
        }
    }
    product(layer->down, s->inner, s->width, inner, x, rows, 1, ahead);
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
    return BLOCK * (2 * s->width + 2 * fused + 2 * attended + s->inner + 2 * s->dim) + s->heads * STATE_FLOATS(s->dim);
}

/* Read one token per row, int64 [n], into its slot's cache at its position; write hidden states [n, width] unless `hidden` is null.
 * Rows of one slot must stand in order of their positions. cos, sin [positions, dim]. */
void read_tokens(const shape_t *s, const layer_t *layers, const float *embedding, const float *last_norm, const float *cos, const float *sin,
                 const int64_t *tokens, const int64_t *slots, const int64_t *positions, int64_t n, float *scratch, float *hidden) {
    int64_t fused_size = (s->heads + 2 * s->kv_heads) * s->dim, attended_size = s->heads * s->dim;
    float *x = scratch, *y = x + BLOCK * s->width, *fused = y + BLOCK * s->width, *by_row = fused + BLOCK * fused_size;
    float *attended = by_row + BLOCK * fused_size, *attended_rows = attended + BLOCK * attended_size;
    float *inner = attended_rows + BLOCK * attended_size, *cosines = inner + BLOCK * s->inner, *sines = cosines + BLOCK * s->dim;
    float *states = sines + BLOCK * s->dim;
    memset(scratch, 0, sizeof(float) * (size_t)(states - scratch)); /* rows that a block lacks are finite */
    ahead_t ahead = ahead_of(s, layers, slots, positions, n < BLOCK ? n : BLOCK);
    for (int64_t start = 0; start < n; start += BLOCK, tokens += BLOCK, slots += BLOCK, positions += BLOCK) {
        int64_t rows = n - start < BLOCK ? n - start : BLOCK, later = n - start - rows < BLOCK ? n - start - rows : BLOCK;
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
            product(layer->query_key_value, s->width, fused_size, y, fused, rows, 0, &ahead);
            for (int64_t h = 0; h < s->heads + s->kv_heads; h++) rotate(fused + h * s->dim * BLOCK, cosines, sines, s->dim);
            for (int64_t i = 0; i < attended_size * BLOCK; i++) fused[i] *= s->scale;
            to_rows(fused, by_row, fused_size, rows);
            attention(s, layer, by_row, slots, positions, rows, states, attended_rows);
            ahead = l + 1 < s->layers ? ahead_of(s, layer + 1, slots, positions, rows) : ahead_of(s, layers, slots + rows, positions + rows, later);
            if (l + 1 == s->layers && !hidden) break; /* the cache is all that was asked for */
            to_features(attended_rows, attended, attended_size, rows);
            product(layer->out, attended_size, s->width, attended, x, rows, 1, &ahead);
            norm(x, layer->mlp_norm, y, s->width, s->eps);
            feed_forward(s, layer, y, x, inner, rows, &ahead);
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
