/* AES-128 in counter mode (FIPS 197, SP 800-38A), by the processor's instructions for it. The counter begins at 0, so that
 * any block of a key's stream can be made by itself. */
#include <cpuid.h>
#include <immintrin.h>

#define AES __attribute__((target("aes,ssse3,sse4.1")))
#define VAES __attribute__((target("vaes,avx512f,avx512bw,avx512dq,avx512vl")))

typedef struct {
    __m128i rounds[11];
} Schedule;

static int has_aes(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("aes");
}

static int has_vaes(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & bit_VAES);
}

static AES void expand_key(const uint8_t *key, Schedule *to) {
    __m128i k = to->rounds[0] = _mm_loadu_si128((const __m128i *)key);
#define ROUND(i, constant)                                                                                             \
    {                                                                                                                  \
        const __m128i word = _mm_shuffle_epi32(_mm_aeskeygenassist_si128(k, constant), 0xff);                          \
        k = _mm_xor_si128(k, _mm_slli_si128(k, 4));                                                                    \
        k = _mm_xor_si128(k, _mm_slli_si128(k, 8));                                                                    \
        to->rounds[i] = k = _mm_xor_si128(k, word);                                                                    \
    }
    ROUND(1, 0x01) ROUND(2, 0x02) ROUND(3, 0x04) ROUND(4, 0x08) ROUND(5, 0x10)
    ROUND(6, 0x20) ROUND(7, 0x40) ROUND(8, 0x80) ROUND(9, 0x1b) ROUND(10, 0x36)
#undef ROUND
}

/* Blocks first to first + count of the stream. So many are made at once that none waits for the one before. */
static AES void blocks_aes(const Schedule *s, uint64_t first, int64_t count, uint8_t *out) {
    for (int64_t at = 0; at < count; at += 8) {
        __m128i b[8];
        const int64_t left = count - at < 8 ? count - at : 8;
        for (int k = 0; k < 8; k++)
            b[k] = _mm_xor_si128(_mm_set_epi64x((int64_t)__builtin_bswap64(first + (uint64_t)(at + k)), 0), s->rounds[0]);
        for (int i = 1; i < 10; i++)
            for (int k = 0; k < 8; k++) b[k] = _mm_aesenc_si128(b[k], s->rounds[i]);
        for (int k = 0; k < 8; k++) b[k] = _mm_aesenclast_si128(b[k], s->rounds[10]);
        memcpy(out + 16 * at, b, 16 * (size_t)left);
    }
}

static VAES void blocks_vaes(const Schedule *s, uint64_t first, int64_t count, uint8_t *out) {
    const __m512i turned = _mm512_broadcast_i32x4(_mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 7, 6, 5, 4, 3, 2, 1, 0));
    __m512i rounds[11];
    for (int i = 0; i < 11; i++) rounds[i] = _mm512_broadcast_i32x4(s->rounds[i]);
    for (int64_t at = 0; at < count; at += 16) {
        __m512i b[4];
        const int64_t left = count - at < 16 ? count - at : 16;
        for (int k = 0; k < 4; k++) {
            const int64_t n = (int64_t)(first + (uint64_t)(at + 4 * k));
            b[k] = _mm512_shuffle_epi8(_mm512_set_epi64(n + 3, 0, n + 2, 0, n + 1, 0, n, 0), turned);
            b[k] = _mm512_xor_si512(b[k], rounds[0]);
        }
        for (int i = 1; i < 10; i++)
            for (int k = 0; k < 4; k++) b[k] = _mm512_aesenc_epi128(b[k], rounds[i]);
        for (int k = 0; k < 4; k++) b[k] = _mm512_aesenclast_epi128(b[k], rounds[10]);
        if (left == 16)
            for (int k = 0; k < 4; k++) _mm512_storeu_si512(out + 16 * at + 64 * k, b[k]);
        else memcpy(out + 16 * at, b, 16 * (size_t)left);
    }
}
