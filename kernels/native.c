/* The update, the reduction and the scalar table for the CPU; twins of reference.py, bit for bit.
 *
 * Compiled on first use by native.py with -ffp-contract=off: every fp32 operation is rounded on its own, and roots and
 * quotients round correctly.
 */
#include "vectors.h"

enum { BLOCK = 64, PARTIAL = 4096, LANES = 16, AHEAD = 256 };

/* How weights and moments are stored; native.py counts in the same order. MASTER is fp32 beside a 16-bit parameter. */
enum format { NONE, FP32, BF16, FP16, MASTER, SPLIT32, SPLIT24, BLOCK8 };
enum rule { ADAM, LION, SGD };

/* Entry k of a column is table[k * columns + column]; the order is that of arguments.TABLE. */
enum { COEF, BETA1, ONE_MINUS_BETA1, BETA2, ONE_MINUS_BETA2, STEP_SIZE, INV_SQRT_C2, EPS, DECAY, L2, NESTEROV, ACTIVE,
       ENTRIES };

struct moment {
    void *values;
    uint8_t *scale;
    int64_t format;
};

/* The arguments of an update, in the order of native.Update. `master` is the parameter itself if it is fp32. */
struct update {
    void *param, *master;
    const void *grad;
    int64_t param_format, weight_format, grad_format;
    struct moment first, second, largest;
    const float *table;
    const int64_t *keys, *origin;
    const int32_t *block_column;
    int64_t columns, blocks, rule, l2, threads;
};

#define LANE 0x9e3779b1u

/* ---------------------------------------------------------------- random words: codecs.py */

INLINE uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

INLINE words mix32(words x) {
    x = (x ^ upper(x)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ upper(x);
}

/* Two random words for each element of a group: its index in the block times LANE, hashed with the block's key. */
INLINE void draw(words *random, words *second, uint64_t key, uint32_t first_lane, int both) {
    words lanes = ORDER * LANE + ((uint32_t)key + first_lane * LANE);
    FOUR(random[k] = mix32(lanes + (PAIRED ? k / 2 * 16u + k % 2u : k * 8u) * LANE);)
    if (both) FOUR(second[k] = (random[k] ^ (uint32_t)(key >> 32)) * LANE; second[k] ^= upper(second[k]);)
}

/* ---------------------------------------------------------------- 16 and 24 bits: codecs.py */

INLINE words quiet(words bits, floats x) { return choose(x == x, bits, fill(0x7fc00000)); }

/* From the largest number of so many bits on nothing is added: what is finite stays finite, and infinity infinity. */
INLINE words stochastic(floats x, words random, int32_t largest) {
    words bits = (words)x;
    return quiet(bits + (random & (words)((ints)(bits & 0x7fffffffu) < largest)), x);
}

/* To nearest even, in the upper halves. */
INLINE words nearest_bf16(floats x) { return quiet((words)x + 0x7fffu + (((words)x >> 16) & 1u), x); }

INLINE void store_bf16(uint16_t *out, const floats *x) {
    words bits[4];
    FOUR(bits[k] = nearest_bf16(x[k]);)
    store_halves(out, NULL, bits);
}

/* `random`: 16 bits each. */
INLINE void store_bf16_stochastic(uint16_t *out, const floats *x, const words *random) {
    words bits[4];
    FOUR(bits[k] = stochastic(x[k], random[k], 0x7f7f0000);)
    store_halves(out, NULL, bits);
}

/* As int16 the low half is the distance from a bf16: from the one above where it is negative. A tie at an even bf16
 * rounds down, to a distance that int16 lacks by one. */
INLINE void store_split32(uint16_t *high, int16_t *low, const floats *x) {
    words bits[4];
    FOUR(bits[k] = (words)x[k] + (words)(((words)x[k] & 0x1ffffu) == 0x8000u); bits[k] = quiet(bits[k], x[k]) + 0x8000u;)
    store_halves(high, low, bits);
}

INLINE void load_split24(words *x, const uint16_t *high, const int8_t *low) {
    words distance[4];
    load_halves(x, high, NULL);
    load_bytes(distance, low);
    FOUR(distance[k] = shift(distance[k] ^ 0x80808080u, 8 - (PAIRED ? 8 * k : 0)) & 0xff00u;
         x[k] = x[k] + distance[k] - 0x8000u;)
}

INLINE void store_split24(uint16_t *high, int8_t *low, const floats *x, const words *random) {
    words bits[4], distance[4];
    FOUR(bits[k] = stochastic(x[k], random[k] & 0xffu, 0x7f7fff00) & 0xffffff00u;
         words step = ((random[k] & 0x100u) << 1) - 0x100u;
         bits[k] += (step & (words)((bits[k] & 0x1ffffu) == 0x8000u)) + 0x8000u;
         distance[k] = bits[k] << 16;)
    store_halves(high, NULL, bits);
    store_bytes(low, pack(distance, 24) ^ 0x80);
}

/* ---------------------------------------------------------------- 8-bit blocks: codecs.py */

enum { FIRST = 4, ROOT = 5 }; /* bits of mantissa */

/* An addition places exponent and mantissa. A subnormal code has the steps of the binade above it: read as a number of
 * that binade less the binade's start, it is the lesser of two readings. Other codes are the lesser read as they are. */
INLINE void load8(floats *x, const uint8_t *codes, uint32_t scale, int mantissa) {
    words least = fill((scale - 6) << 23), code[4];
    load_bytes(code, codes);
    FOUR(const int place = PAIRED ? 8 * k : 0;
         words above = (shift(code[k], 23 - mantissa - place) & ((8u << 23) - (1u << (23 - mantissa)))) + least;
         words bits = lesser(above - (1u << 23), (words)((floats)above - (floats)least));
         if (mantissa == FIRST) bits |= shift(code[k], 24 - place) & 0x80000000u;
         x[k] = (floats)bits;)
}

/* Replaces what has no code even at the largest scale by what has; returns the largest pattern of a magnitude. */
static uint32_t clamp8(words *x, uint32_t most) {
    uint32_t largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits = x[i / EIGHT][i % EIGHT], magnitude = bits & 0x7fffffff;
        uint32_t sign = magnitude > 0x7f800000 ? 0 : bits - magnitude;
        magnitude = magnitude < most ? magnitude : most;
        largest = largest > magnitude ? largest : magnitude;
        x[i / EIGHT][i % EIGHT] = magnitude | sign;
    }
    return largest;
}

/* The scale is the least for which the largest magnitude has a code. */
INLINE uint32_t store_scale(const struct moment *moment, int64_t block, words *x, words maxima, int mantissa) {
    const int cut = 23 - mantissa;
    const uint32_t most = 0x7f800000 - (1u << cut), floor = mantissa == FIRST ? 16 : 75;
    uint32_t largest = largest_of(maxima);
    if (largest > most) largest = clamp8(x, most);
    uint32_t scale = (largest + (1u << cut) - 1) >> 23;
    scale = scale < floor ? floor : scale;
    moment->scale[block] = (uint8_t)scale;
    return scale;
}

/* Numbers are scaled so that the least normal binade starts at 4: what lies above the mantissa then ends in the code's
 * exponent. Adding 4 gives subnormals the even steps of the binade from 4 on; as in load8, of two readings one is right,
 * here the greater. */
INLINE void store8(const struct moment *moment, int64_t block, const words *x, const words *random, uint32_t scale,
                   int mantissa) {
    uint8_t *codes = (uint8_t *)moment->values + block * BLOCK;
    const int cut = 23 - mantissa;
    floats factor = (floats)fill((262 - scale) << 23);
    for (int i = 0; i < BLOCK; i += GROUP, x += 4, random += 4) {
        words code[4];
        FOUR(floats scaled = (floats)(x[k] & 0x7fffffffu) * factor;
             words drawn = mantissa == FIRST ? random[k] << (cut - 16) : random[k] >> (32 - cut);
             drawn &= (1u << cut) - (1u << (cut - 16));
             code[k] = greater((words)scaled, (words)(scaled + 4.0f) - (1u << 23)) + drawn;)
        bytes packed = pack(code, cut), signs = pack_signed(x);
        if (mantissa == FIRST)
            packed |= signs & 0x80;
        else /* a root is not 0 unless the moment is */
            packed -= (bytes)(packed == 0) & (bytes)(signs != 0);
        store_bytes(codes + i, packed);
    }
}

/* ---------------------------------------------------------------- streams: storage.py */

/* `plain`: everything is fp32, so the order of elements in a group is that of memory. */
INLINE void load(floats *x, const void *values, int64_t format, int64_t at, int plain) {
    const uint16_t *in = (const uint16_t *)values + at;
    if (format == BF16) {
        load_halves((words *)x, in, NULL);
        return;
    }
    if (format == FP32)
        FOUR(x[k] = (floats)load_vector((const float *)values + at + k * EIGHT);)
    else
        FOUR(x[k] = load_fp16(in + k * EIGHT);)
    if (!plain) from_memory(x);
}

INLINE void store(void *values, int64_t format, int64_t at, const floats *x, int plain) {
    uint16_t *out = (uint16_t *)values + at;
    if (format == BF16) {
        store_bf16(out, x);
        return;
    }
    floats y[4] = {x[0], x[1], x[2], x[3]};
    if (!plain) to_memory(y);
    if (format == FP32)
        FOUR(store_vector((float *)values + at + k * EIGHT, (words)y[k]);)
    else
        FOUR(store_fp16(out + k * EIGHT, y[k]);)
}

/* The master where it rounds to the parameter, which else somebody has written to, and which is the weight then. */
INLINE void load_master(floats *w, const struct update *u, int64_t at) {
    const int is_bf16 = u->param_format == BF16;
    floats written[4];
    load(w, u->master, FP32, at, 0);
    load(written, u->param, is_bf16 ? BF16 : FP16, at, 0);
    FOUR(floats rounded = is_bf16 ? (floats)(nearest_bf16(w[k]) & 0xffff0000u) : round_fp16(w[k]);
         w[k] = (floats)choose(rounded == written[k], (words)w[k], (words)written[k]);)
}

INLINE void load_weights(floats *w, const struct update *u, int format, int64_t at, int plain) {
    const uint16_t *high = (const uint16_t *)u->param + at;
    if (format == SPLIT24)
        load_split24((words *)w, high, (const int8_t *)u->master + at);
    else if (format == SPLIT32)
        load_halves((words *)w, high, (const int16_t *)u->master + at);
    else if (format == MASTER)
        load_master(w, u, at);
    else
        load(w, u->master, format == BF16 ? BF16 : FP32, at, plain);
}

INLINE void store_weights(const struct update *u, int format, int64_t at, const floats *w, const words *random,
                          int plain) {
    uint16_t *high = (uint16_t *)u->param + at;
    words upper[4];
    FOUR(upper[k] = random[k] >> 16;)
    if (format == FP32 || format == MASTER) store(u->master, FP32, at, w, plain);
    if (format == MASTER) store(u->param, u->param_format, at, w, 0);
    if (format == BF16) store_bf16_stochastic(high, w, upper);
    if (format == SPLIT32) store_split32(high, (int16_t *)u->master + at, w);
    if (format == SPLIT24) store_split24(high, (int8_t *)u->master + at, w, upper);
}

INLINE void load_moment(floats *x, const struct moment *moment, int format, int64_t at, int mantissa, int plain) {
    if (format == BLOCK8)
        load8(x, (const uint8_t *)moment->values + at, moment->scale[at / BLOCK], mantissa);
    else
        load(x, moment->values, format == FP32 ? FP32 : BF16, at, plain);
}

/* Of one block, what waits until its largest number is known. */
struct kept {
    words first[8], root[8], random[8];
};

INLINE void store_moment(const struct moment *moment, int format, int64_t at, const floats *x, const words *random,
                         int high, words *kept, int plain) {
    words half[4];
    FOUR(half[k] = high ? random[k] >> 16 : random[k] & 0xffffu;)
    if (format == FP32) store(moment->values, FP32, at, x, plain);
    if (format == BF16) store_bf16_stochastic((uint16_t *)moment->values + at, x, half);
    if (format == BLOCK8) FOUR(kept[k] = (words)x[k];)
}

/* ---------------------------------------------------------------- the update: rules.py */

INLINE void root_of_largest(floats *root, const struct moment *moment, int format, int64_t at, const floats *v,
                            const words *random, int plain) {
    floats largest[4];
    load_moment(largest, moment, format, at, ROOT, plain);
    FOUR(largest[k] = (floats)choose(v[k] > largest[k], (words)v[k], (words)largest[k]);)
    store_moment(moment, format, at, largest, random, 0, NULL, plain);
    FOUR(root[k] = root_of(largest[k]);)
}

/* Zero and NaN stay what they are. */
INLINE floats sign_of(floats x) {
    words one = ((words)x & 0x80000000u) | 0x3f800000u;
    return (floats)choose((x > 0.0f) | (x < 0.0f), one, (words)x);
}

INLINE int bytes_of(int format) {
    if (format == NONE) return 0;
    return format == FP32 || format == MASTER ? 4 : format == SPLIT24 || format == BLOCK8 ? 1 : 2;
}

/* Asks for what is needed AHEAD elements further on: the hardware does not follow so many streams at a time. */
INLINE void fetch(const void *stream, int64_t at, int format, int written) {
    const char *address = (const char *)stream + (at + AHEAD) * bytes_of(format);
    for (int line = 0; line < GROUP * bytes_of(format); line += 64)
        if (written)
            __builtin_prefetch(address + line, 1);
        else
            __builtin_prefetch(address + line, 0);
}

/* One block with formats that are constants, where it pays, or read from u. c: the scalars of its column, eight times. */
INLINE void update_block(const struct update *u, int64_t block, uint64_t key, const floats *c, int rule, int weights,
                         int first, int second, int most, int plain) {
    const int for_weights = weights == BF16 || weights == SPLIT24 || most == BF16;
    const int for_moments = for_weights || first > FP32 || second > FP32;
    struct kept kept;
    words largest_first = {0}, largest_root = {0};
    for (int i = 0; i < BLOCK; i += GROUP) {
        int64_t at = block * BLOCK + i;
        floats g[4], w[4], m[4] = {{0}}, v[4] = {{0}}, step[4] = {{0}};
        words *random = kept.random + i / EIGHT, drawn[4] = {{0}};
        fetch(u->grad, at, plain ? FP32 : (int)u->grad_format, 0);
        fetch(u->master, at, weights, 1);
        if (weights >= MASTER) fetch(u->param, at, BF16, 1);
        fetch(u->first.values, at, first, 1);
        fetch(u->second.values, at, second, 1);
        load(g, u->grad, plain ? FP32 : u->grad_format, at, plain);
        FOUR(g[k] *= c[COEF];)
        if (u->l2 && c[L2][0] != 0.0f) {
            load_weights(w, u, weights, at, plain);
            FOUR(g[k] = g[k] + c[L2] * w[k];)
        }
        if (rule == ADAM) {
            load_moment(v, &u->second, second, at, ROOT, plain);
            if (second == BLOCK8) FOUR(v[k] = v[k] * v[k];)
            FOUR(v[k] = c[BETA2] * v[k] + c[ONE_MINUS_BETA2] * (g[k] * g[k]);)
        }
        if (first) load_moment(m, &u->first, first, at, FIRST, plain);
        if (rule == LION) {
            FOUR(step[k] = sign_of(c[BETA1] * m[k] + c[ONE_MINUS_BETA1] * g[k]) * c[STEP_SIZE];)
            FOUR(m[k] = c[BETA2] * m[k] + c[ONE_MINUS_BETA2] * g[k];)
        } else if (first && (rule != SGD || c[BETA1][0] != 0.0f))
            FOUR(m[k] = c[BETA1] * m[k] + c[ONE_MINUS_BETA1] * g[k];)
        FOUR(if (first == BLOCK8) largest_first = greater(largest_first, (words)m[k] & 0x7fffffffu);)
        if (for_moments) draw(random, drawn, key, (uint32_t)i, for_weights);
        if (first) store_moment(&u->first, first, at, m, random, 0, kept.first + i / EIGHT, plain);
        if (rule == ADAM) {
            floats root[4];
            FOUR(root[k] = root_of(v[k]); largest_root = greater(largest_root, (words)root[k]);)
            store_moment(&u->second, second, at, second == BLOCK8 ? root : v, random, 1, kept.root + i / EIGHT, plain);
            if (most) root_of_largest(root, &u->largest, most, at, v, drawn, plain);
            FOUR(step[k] = (m[k] * c[STEP_SIZE]) / (root[k] * c[INV_SQRT_C2] + c[EPS]);)
        }
        if (rule == SGD) {
            const int has_momentum = first && c[BETA1][0] != 0.0f;
            if (has_momentum && c[NESTEROV][0] != 0.0f)
                FOUR(m[k] = g[k] + c[BETA1] * m[k];)
            FOUR(step[k] = (has_momentum ? m[k] : g[k]) * c[STEP_SIZE];)
        }
        load_weights(w, u, weights, at, plain);
        FOUR(w[k] = w[k] * c[DECAY] - step[k];)
        store_weights(u, weights, at, w, drawn, plain);
    }
    uint32_t first_scale = 0, root_scale = 0;
    if (first == BLOCK8) first_scale = store_scale(&u->first, block, kept.first, largest_first, FIRST);
    if (second == BLOCK8) root_scale = store_scale(&u->second, block, kept.root, largest_root, ROOT);
    if (first == BLOCK8) store8(&u->first, block, kept.first, kept.random, first_scale, FIRST);
    if (second == BLOCK8) store8(&u->second, block, kept.root, kept.random, root_scale, ROOT);
}

/* The scalars of a parameter are spread over vectors when it begins, not at each of its blocks. */
INLINE void update_blocks(const struct update *u, int64_t block, int64_t end, int rule, int weights, int first,
                          int second, int most, int plain) {
    floats c[ENTRIES] = {{0}};
    for (int32_t column = -1; block < end; block++) {
        if (u->block_column[block] != column) {
            column = u->block_column[block];
            for (int k = 0; k < ENTRIES; k++) c[k] = fill_floats(u->table[k * u->columns + column]);
        }
        if (c[ACTIVE][0] == 0.0f) continue;
        uint64_t key = mix64((uint64_t)u->keys[column] + (uint64_t)(block + u->origin[column]) * 0x9e3779b97f4a7c15u);
        update_block(u, block, key, c, rule, weights, first, second, most, plain);
    }
}

INLINE void adam(const struct update *u, int64_t block, int64_t end, int weights) {
    if (u->first.format == FP32)
        update_blocks(u, block, end, ADAM, weights, FP32, FP32, NONE, 0);
    else if (u->first.format == BF16)
        update_blocks(u, block, end, ADAM, weights, BF16, BF16, NONE, 0);
    else
        update_blocks(u, block, end, ADAM, weights, BLOCK8, BLOCK8, NONE, 0);
}

static void adam_fp32(const struct update *u, int64_t block, int64_t end) { adam(u, block, end, FP32); }
static void adam_master(const struct update *u, int64_t block, int64_t end) { adam(u, block, end, MASTER); }
static void adam_bf16(const struct update *u, int64_t block, int64_t end) { adam(u, block, end, BF16); }
static void adam_split32(const struct update *u, int64_t block, int64_t end) { adam(u, block, end, SPLIT32); }
static void adam_split24(const struct update *u, int64_t block, int64_t end) { adam(u, block, end, SPLIT24); }

static void adam_plain(const struct update *u, int64_t block, int64_t end) {
    update_blocks(u, block, end, ADAM, FP32, FP32, FP32, NONE, 1);
}

static void any_plain(const struct update *u, int64_t block, int64_t end) {
    update_blocks(u, block, end, (int)u->rule, FP32, u->first.format ? FP32 : NONE, FP32,
                  u->largest.format ? FP32 : NONE, 1);
}

static void any(const struct update *u, int64_t block, int64_t end) {
    update_blocks(u, block, end, (int)u->rule, (int)u->weight_format, (int)u->first.format, (int)u->second.format,
                  (int)u->largest.format, 0);
}

void zerokern_update(const struct update *u) {
    typedef void range(const struct update *, int64_t, int64_t);
    range *const adams[] = {[FP32] = adam_fp32,
                            [MASTER] = adam_master,
                            [BF16] = adam_bf16,
                            [SPLIT32] = adam_split32,
                            [SPLIT24] = adam_split24};
    int common = u->rule == ADAM && u->first.format == u->second.format && u->largest.format == NONE;
    int plain = u->weight_format == FP32 && u->grad_format == FP32 && u->first.format <= FP32 &&
                u->second.format <= FP32 && u->largest.format <= FP32;
    range *const update = plain ? (common ? adam_plain : any_plain) : common ? adams[u->weight_format] : any;
#pragma omp parallel for schedule(static) num_threads((int)u->threads) if (u->threads > 1)
    for (int64_t block = 0; block < u->blocks; block += BLOCK)
        update(u, block, block + BLOCK < u->blocks ? block + BLOCK : u->blocks);
}

/* ---------------------------------------------------------------- reduction */

/* Squares are added in LANES interleaved sums, and these in pairs. */
INLINE double reduce_part(void *shard, int64_t shard_format, const void **chunks, int ranks, int64_t format, int64_t start,
                          int64_t end, float scale, int accumulate, int plain) {
    double squares[LANES] = {0};
    for (int64_t at = start; at < end; at += GROUP) {
        floats total[4], term[4];
        float stored[GROUP];
        load(total, chunks[0], format, at, plain);
        for (int r = 1; r < ranks; r++) {
            load(term, chunks[r], format, at, plain);
            FOUR(total[k] += term[k];)
        }
        FOUR(total[k] *= scale;)
        if (accumulate) {
            load(term, shard, shard_format, at, plain);
            FOUR(total[k] = term[k] + total[k];)
        }
        store(shard, shard_format, at, total, plain);
        load(total, shard, shard_format, at, plain);
        memcpy(stored, total, sizeof stored);
        for (int i = 0; i < GROUP; i += LANES)
            for (int k = 0; k < LANES; k++) squares[k] += (double)stored[i + k] * (double)stored[i + k];
    }
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int k = 0; k < width; k++) squares[k] += squares[k + width];
    return squares[0];
}

/* chunks: `ranks` pointers in rank order; one of them may be the shard. count is a multiple of BLOCK. */
void zerokern_reduce(void *shard, int shard_format, const void **chunks, int ranks, int format, double *partials,
                     int64_t count, float scale, int accumulate, int threads) {
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < (count + PARTIAL - 1) / PARTIAL; part++) {
        int64_t start = part * PARTIAL, end = start + PARTIAL < count ? start + PARTIAL : count;
        if (shard_format == FP32 && format == FP32)
            partials[part] = reduce_part(shard, FP32, chunks, ranks, FP32, start, end, scale, accumulate, 1);
        else
            partials[part] = reduce_part(shard, shard_format, chunks, ranks, format, start, end, scale, accumulate, 0);
    }
}

int zerokern_has_fp16(void) { return HAS_FP16; }

/* ---------------------------------------------------------------- the scalar table */

/* The order of arguments.HYPER. */
enum { LR, HYPER_BETA1, HYPER_BETA2, HYPER_EPS, WEIGHT_DECAY, SIGN, DECOUPLED, HYPER_NESTEROV, HYPERS };

/* The arguments, in the order of native._Scalars. */
struct scalars {
    float *table;
    int64_t *keys, *steps;
    double *report;
    const double *hyper;
    const int64_t *group_of_column, *seeds, *gathered;
    const double *limits;
    int64_t columns, words, ranks, rule;
};

/* By squaring, from the low bit up: only products, so the same bits everywhere. */
static double integer_power(double base, int64_t exponent) {
    double power = 1.0;
    for (; exponent; exponent >>= 1, base *= base)
        if (exponent & 1) power *= base;
    return power;
}

void zerokern_scalars(const struct scalars *s) {
    double square_sum = 0.0;
    for (int64_t rank = 0; rank < s->ranks; rank++) {
        double of_rank;
        memcpy(&of_rank, s->gathered + rank * s->words, sizeof of_rank);
        square_sum = rank ? square_sum + of_rank : of_rank;
    }
    const double norm = sqrt(square_sum) / s->limits[1], ratio = s->limits[0] / (norm + 1e-6);
    const double clip = ratio > 1.0 ? 1.0 : ratio; /* NaN stays */
    const int finite = square_sum - square_sum == 0.0;
    for (int64_t c = 0; c < s->columns; c++) {
        int64_t used = 0;
        for (int64_t rank = 0; rank < s->ranks; rank++) used |= s->gathered[rank * s->words + 1 + c / 32] >> c % 32;
        const int active = (used & 1) && finite;
        const int64_t t = s->steps[c] += active;
        s->keys[c] = (int64_t)mix64((uint64_t)s->seeds[c] + (uint64_t)t * 0x9e3779b97f4a7c15u);
        const double *h = s->hyper + s->group_of_column[c] * HYPERS;
        double step_size = h[LR], inv_sqrt_c2 = 1.0, one_minus_beta1 = 1.0 - h[HYPER_BETA1];
        if (s->rule == ADAM) {
            step_size = h[LR] / (1.0 - integer_power(h[HYPER_BETA1], t));
            inv_sqrt_c2 = 1.0 / sqrt(1.0 - integer_power(h[HYPER_BETA2], t));
        }
        /* The first momentum is the gradient itself. */
        if (s->rule == SGD) one_minus_beta1 = t > 1 ? 1.0 - h[HYPER_BETA2] : 1.0;
        const double entries[ENTRIES] = {
            [COEF] = h[SIGN] * (clip / s->limits[1]),
            [BETA1] = h[HYPER_BETA1],
            [ONE_MINUS_BETA1] = one_minus_beta1,
            [BETA2] = h[HYPER_BETA2],
            [ONE_MINUS_BETA2] = 1.0 - h[HYPER_BETA2],
            [STEP_SIZE] = step_size,
            [INV_SQRT_C2] = inv_sqrt_c2,
            [EPS] = h[HYPER_EPS],
            [DECAY] = 1.0 - h[DECOUPLED] * (h[LR] * h[WEIGHT_DECAY]),
            [L2] = (1.0 - h[DECOUPLED]) * h[WEIGHT_DECAY],
            [NESTEROV] = h[HYPER_NESTEROV],
            [ACTIVE] = active,
        };
        for (int k = 0; k < ENTRIES; k++) s->table[k * s->columns + c] = (float)entries[k];
    }
    s->report[0] = norm;
    s->report[1] = clip;
    s->report[2] += !finite;
}
