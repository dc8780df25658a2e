/* The update and the reduction for the CPU, one pass over memory each; twins of reference.py, bit for bit.
 *
 * Compiled on first use by native.py with -ffp-contract=off: every fp32 operation is rounded on its own, and sqrtf and
 * division round correctly. Lanes are independent, so the compiler may vectorise as it likes.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 64, PARTIAL = 4096, LANES = 16 };
enum dtype { FP32, BF16, FP16 };

static inline float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* To nearest even in integers; NaN stays NaN, since adding to it could carry into the sign. */
static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
}

/* Row k of the table is table[k * rows]; the order is that of reference.TABLE. */
enum { COEF, BETA1, ONE_MINUS_BETA1, BETA2, ONE_MINUS_BETA2, STEP_SIZE, INV_SQRT_C2, EPS, DECAY, L2, ACTIVE, COLUMNS };

static inline void update_block(float *restrict w, float *restrict m, float *restrict v, const float *restrict grad,
                                const float *restrict c, int l2) {
    for (int i = 0; i < BLOCK; i++) {
        float g = grad[i] * c[COEF];
        if (l2) g = g + c[L2] * w[i];
        m[i] = c[BETA1] * m[i] + c[ONE_MINUS_BETA1] * g;
        v[i] = c[BETA2] * v[i] + c[ONE_MINUS_BETA2] * (g * g);
        w[i] = w[i] * c[DECAY] - (m[i] * c[STEP_SIZE]) / (sqrtf(v[i]) * c[INV_SQRT_C2] + c[EPS]);
    }
}

/* param may be w itself (fp32, its own master). */
void zerokern_adamw(void *param, int param_dtype, float *w, float *m, float *v, const float *grad, const float *table,
                    int64_t rows, const int32_t *block_row, int64_t blocks, int threads) {
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t at = block * BLOCK;
        float c[COLUMNS];
        for (int k = 0; k < COLUMNS; k++) c[k] = table[k * rows + block_row[block]];
        if (c[ACTIVE] == 0.0f) continue;
        if (c[L2] != 0.0f)
            update_block(w + at, m + at, v + at, grad + at, c, 1);
        else
            update_block(w + at, m + at, v + at, grad + at, c, 0);
        if (param_dtype == BF16) {
            uint16_t *out = (uint16_t *)param + at;
            for (int i = 0; i < BLOCK; i++) out[i] = to_bf16(w[at + i]);
        }
#ifdef __FLT16_MANT_DIG__
        if (param_dtype == FP16) {
            _Float16 *out = (_Float16 *)param + at;
            for (int i = 0; i < BLOCK; i++) out[i] = (_Float16)w[at + i];
        }
#endif
    }
}

static inline void load_block(float *restrict out, const void *chunk, int64_t at, int dtype) {
    if (dtype == FP32) memcpy(out, (const float *)chunk + at, BLOCK * sizeof(float));
    if (dtype == BF16)
        for (int i = 0; i < BLOCK; i++) out[i] = from_bf16(((const uint16_t *)chunk)[at + i]);
#ifdef __FLT16_MANT_DIG__
    if (dtype == FP16)
        for (int i = 0; i < BLOCK; i++) out[i] = (float)((const _Float16 *)chunk)[at + i];
#endif
}

/* Squares are added in LANES interleaved sums, and these in pairs. */
static inline double reduce_part(float *shard, const void **chunks, int ranks, int dtype, int64_t start, int64_t end,
                                 float scale, int accumulate) {
    double squares[LANES] = {0};
    for (int64_t at = start; at < end; at += BLOCK) {
        float total[BLOCK], term[BLOCK];
        load_block(total, chunks[0], at, dtype);
        for (int r = 1; r < ranks; r++) {
            load_block(term, chunks[r], at, dtype);
            for (int i = 0; i < BLOCK; i++) total[i] += term[i];
        }
        for (int i = 0; i < BLOCK; i++) total[i] *= scale;
        if (accumulate)
            for (int i = 0; i < BLOCK; i++) total[i] = shard[at + i] + total[i];
        memcpy(shard + at, total, sizeof total);
        for (int i = 0; i < BLOCK; i += LANES)
            for (int k = 0; k < LANES; k++) squares[k] += (double)total[i + k] * (double)total[i + k];
    }
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int k = 0; k < width; k++) squares[k] += squares[k + width];
    return squares[0];
}

/* chunks: `ranks` pointers in rank order; one of them may be the shard. count is a multiple of BLOCK. */
void zerokern_reduce(float *shard, const void **chunks, int ranks, int dtype, double *partials, int64_t count, float scale,
                     int accumulate, int threads) {
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < (count + PARTIAL - 1) / PARTIAL; part++) {
        int64_t start = part * PARTIAL, end = start + PARTIAL < count ? start + PARTIAL : count;
        if (dtype == FP32)
            partials[part] = reduce_part(shard, chunks, ranks, FP32, start, end, scale, accumulate);
        else
            partials[part] = reduce_part(shard, chunks, ranks, dtype, start, end, scale, accumulate);
    }
}

int zerokern_has_fp16(void) {
#ifdef __FLT16_MANT_DIG__
    return 1;
#else
    return 0;
#endif
}
