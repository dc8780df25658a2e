/* What the update computes on: a group of 32 elements in four vectors of eight, and the operations that C lacks.
 *
 * Loops over elements of several widths would leave most of their time to moving numbers between vectors. Everything has
 * a version in C; AVX2 has one of its own where compilers do not find it.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { EIGHT = 8, GROUP = 32 };

typedef float floats __attribute__((vector_size(32)));
typedef uint32_t words __attribute__((vector_size(32)));
typedef int32_t ints __attribute__((vector_size(32)));
typedef uint8_t bytes __attribute__((vector_size(32)));

/* Four chains of operations side by side hide the latency of each. */
#define WITH(K, ...) { enum { k = K }; __VA_ARGS__ }
#define FOUR(...) { WITH(0, __VA_ARGS__) WITH(1, __VA_ARGS__) WITH(2, __VA_ARGS__) WITH(3, __VA_ARGS__) }

INLINE words fill(uint32_t word) { return (words){0} + word; }
INLINE floats fill_floats(float x) { return (floats){x, x, x, x, x, x, x, x}; }
INLINE words shift(words x, int left) { return left < 0 ? x >> -left : x << left; }

INLINE words load_vector(const void *in) {
    words x;
    memcpy(&x, in, sizeof x);
    return x;
}

INLINE void store_vector(void *out, words x) { memcpy(out, &x, sizeof x); }

/* What C's operators on vectors lack, in AVX2 and in C. Lane j of vector k is element 16 (k / 2) + 2 j + k % 2 of its group
 * if PAIRED: neighbours of 16 bits share a word, and one operation takes them out or puts them back, where the order of
 * memory, 8 k + j, needs moves across lanes, which are slow. */
#ifdef __AVX2__
#include <immintrin.h>
enum { PAIRED = 1 };
#define ORDER ((words){0, 2, 4, 6, 8, 10, 12, 14})
INLINE floats root_of(floats x) { return _mm256_sqrt_ps(x); }
INLINE words choose(ints where, words x, words y) {
    return (words)_mm256_blendv_ps((__m256)y, (__m256)x, (__m256)where);
}
INLINE words lesser(words x, words y) { return (words)_mm256_min_epu32((__m256i)x, (__m256i)y); }
INLINE words greater(words x, words y) { return (words)_mm256_max_epu32((__m256i)x, (__m256i)y); }

/* x >> 16: shifts all wait for one unit, which stores need too, and shuffles have another. */
INLINE words upper(words x) {
    const words places = {0x80800302, 0x80800706, 0x80800b0a, 0x80800f0e, 0x80800302, 0x80800706, 0x80800b0a, 0x80800f0e};
    return (words)_mm256_shuffle_epi8((__m256i)x, (__m256i)places);
}
INLINE words halves(words low, words high) { return (words)_mm256_blend_epi16((__m256i)low, (__m256i)high, 0xaa); }

INLINE void from_memory(floats *x) {
    for (int k = 0; k < 4; k += 2) {
        __m256d even = (__m256d)_mm256_shuffle_ps(x[k], x[k + 1], 0x88);
        __m256d odd = (__m256d)_mm256_shuffle_ps(x[k], x[k + 1], 0xdd);
        x[k] = (floats)_mm256_permute4x64_pd(even, 0xd8), x[k + 1] = (floats)_mm256_permute4x64_pd(odd, 0xd8);
    }
}
INLINE void to_memory(floats *x) {
    for (int k = 0; k < 4; k += 2) {
        floats low = _mm256_unpacklo_ps(x[k], x[k + 1]), high = _mm256_unpackhi_ps(x[k], x[k + 1]);
        x[k] = _mm256_permute2f128_ps(low, high, 0x20), x[k + 1] = _mm256_permute2f128_ps(low, high, 0x31);
    }
}

/* The high halves of words, to which `low` is added, signed. What is stored is 0x8000 above: its high half is right then,
 * and its low half needs one bit turned. */
INLINE void load_halves(words *x, const uint16_t *high, const int16_t *low) {
    for (int k = 0; k < 4; k += 2) {
        words both = load_vector(high + k * EIGHT), distance = {0};
        if (low) distance = load_vector(low + k * EIGHT) ^ 0x80008000u;
        x[k] = low ? halves(distance, both << 16) - 0x8000u : both << 16;
        x[k + 1] = low ? halves(upper(distance), both) - 0x8000u : both & 0xffff0000u;
    }
}
INLINE void store_halves(uint16_t *high, int16_t *low, const words *x) {
    for (int k = 0; k < 4; k += 2) {
        store_vector(high + k * EIGHT, halves(upper(x[k]), x[k + 1]));
        if (low) store_vector(low + k * EIGHT, halves(x[k], x[k + 1] << 16) ^ 0x80008000u);
    }
}
/* Byte k of a word is its element of vector k; in C, the lowest byte is. */
INLINE void load_bytes(words *x, const void *in) {
    const __m256i places = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    __m256i quads = _mm256_permute4x64_epi64((__m256i)load_vector(in), 0xd8);
    x[0] = x[1] = x[2] = x[3] = (words)_mm256_shuffle_epi8(quads, places);
}
INLINE void store_bytes(void *out, bytes x) {
    _mm256_storeu_si256((__m256i *)out, _mm256_permute4x64_epi64((__m256i)x, 0xd8));
}
/* The byte from bit `from` >= 16 on; and the high halves, cut off at what a signed byte holds. */
INLINE bytes pack(const words *x, int from) {
    const __m256i low = _mm256_set1_epi16(0xff);
    __m256i first = _mm256_srli_epi16((__m256i)halves(upper(x[0]), x[1]), from - 16);
    __m256i second = _mm256_srli_epi16((__m256i)halves(upper(x[2]), x[3]), from - 16);
    return (bytes)_mm256_packus_epi16(_mm256_and_si256(first, low), _mm256_and_si256(second, low));
}
INLINE bytes pack_signed(const words *x) {
    return (bytes)_mm256_packs_epi16((__m256i)halves(upper(x[0]), x[1]), (__m256i)halves(upper(x[2]), x[3]));
}
INLINE uint32_t largest_of(words x) {
    __m128i y = _mm_max_epu32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    y = _mm_max_epu32(y, _mm_shuffle_epi32(y, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(y, _mm_shuffle_epi32(y, 0xb1)));
}
#else
enum { PAIRED = 0 };
#define ORDER ((words){0, 1, 2, 3, 4, 5, 6, 7})
#define EACH for (int i = 0; i < EIGHT; i++)
INLINE floats root_of(floats x) {
    EACH x[i] = sqrtf(x[i]);
    return x;
}
INLINE words choose(ints where, words x, words y) { return ((words)where & x) | (~(words)where & y); }
INLINE words lesser(words x, words y) { return choose(x < y, x, y); }
INLINE words greater(words x, words y) { return choose(x > y, x, y); }
INLINE words upper(words x) { return x >> 16; }
INLINE void from_memory(floats *x) { (void)x; }
INLINE void to_memory(floats *x) { (void)x; }
INLINE void load_halves(words *x, const uint16_t *high, const int16_t *low) {
    FOUR(EACH x[k][i] = ((uint32_t)high[k * EIGHT + i] << 16) + (uint32_t)(low ? low[k * EIGHT + i] : 0);)
}
INLINE void store_halves(uint16_t *high, int16_t *low, const words *x) {
    FOUR(EACH high[k * EIGHT + i] = (uint16_t)(x[k][i] >> 16);)
    if (low) FOUR(EACH low[k * EIGHT + i] = (int16_t)(x[k][i] ^ 0x8000);)
}
INLINE void load_bytes(words *x, const void *in) { FOUR(EACH x[k][i] = ((const uint8_t *)in)[k * EIGHT + i];) }
INLINE void store_bytes(void *out, bytes x) { memcpy(out, &x, sizeof x); }
INLINE bytes pack(const words *x, int from) {
    bytes packed;
    FOUR(EACH packed[k * EIGHT + i] = (uint8_t)(x[k][i] >> from);)
    return packed;
}
INLINE bytes pack_signed(const words *x) {
    bytes packed;
    FOUR(EACH packed[k * EIGHT + i] = (int32_t)x[k][i] < 0 ? 0x80 : x[k][i] >= 0x10000;)
    return packed;
}
INLINE uint32_t largest_of(words x) {
    uint32_t largest = 0;
    EACH largest = largest > x[i] ? largest : x[i];
    return largest;
}
#endif

#ifdef __F16C__
enum { HAS_FP16 = 1 };
INLINE floats load_fp16(const uint16_t *in) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)in)); }
INLINE void store_fp16(uint16_t *out, floats x) {
    _mm_storeu_si128((__m128i *)out, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE floats round_fp16(floats x) { return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined __FLT16_MANT_DIG__
enum { HAS_FP16 = 1 };
INLINE floats load_fp16(const uint16_t *in) {
    floats x;
    for (int i = 0; i < EIGHT; i++) x[i] = (float)((const _Float16 *)in)[i];
    return x;
}
INLINE void store_fp16(uint16_t *out, floats x) {
    for (int i = 0; i < EIGHT; i++) ((_Float16 *)out)[i] = (_Float16)x[i];
}
INLINE floats round_fp16(floats x) {
    for (int i = 0; i < EIGHT; i++) x[i] = (float)(_Float16)x[i];
    return x;
}
#else
enum { HAS_FP16 = 0 };
INLINE floats load_fp16(const uint16_t *in) { return (floats){in[0]}; }
INLINE void store_fp16(uint16_t *out, floats x) { out[0] = (uint16_t)x[0]; }
INLINE floats round_fp16(floats x) { return x; }
#endif
