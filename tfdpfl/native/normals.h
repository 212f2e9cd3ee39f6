/* Box and Muller's normals, for one instruction set. Included once for each, as tile.h is.
 *
 * A pair is made of two words: u = radius / 2^32, and a fraction of a turn. The logarithm's and the turn's polynomials
 * are those of Cephes (Moshier). */

typedef float NAME(F) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t NAME(I) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t NAME(U) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#define F NAME(F)
#define I NAME(I)
#define U NAME(U)
#define INLINE static inline __attribute__((always_inline)) TARGET

/* LANES pairs. Returns all ones where u is near 0 or 1, and the pair therefore not yet right. */
INLINE U NAME(pairs)(U radius, U turn, float stddev, float *cosines, float *sines) {
    const F u = __builtin_convertvector(radius, F) * 0x1p-32f;
    I bits = (I)u;
    const I exponent = (bits - 0x3f3504f3) >> 23; /* so that the fraction is between the roots of 1/2 and 2 */
    bits -= exponent << 23;
    const F e = __builtin_convertvector(exponent, F), f = (F)bits - 1, z = f * f;
    F log = 7.0376836292e-2f * f - 1.1514610310e-1f;
    log = log * f + 1.1676998740e-1f;
    log = log * f - 1.2420140846e-1f;
    log = log * f + 1.4249322787e-1f;
    log = log * f - 1.6668057665e-1f;
    log = log * f + 2.0000714765e-1f;
    log = log * f - 2.4999993993e-1f;
    log = log * f + 3.3333331174e-1f;
    log = log * f * z - 2.12194440e-4f * e - 0.5f * z + f + 0.693359375f * e;
    F length = -2 * log;
    for (int k = 0; k < LANES; k++) length[k] = __builtin_sqrtf(length[k]);
    length *= stddev;
    const U quarter = (turn + 0x20000000u) >> 30; /* the nearest axis, and the angle from it, within an eighth of a turn */
    const F angle = __builtin_convertvector((I)(turn - (quarter << 30)), F) * 1.46291807926715968e-9f, h = angle * angle;
    const F sine = ((-1.9515295891e-4f * h + 8.3321608736e-3f) * h - 1.6666654611e-1f) * h * angle + angle;
    const F cosine =
        ((2.443315711809948e-5f * h - 1.388731625493765e-3f) * h + 4.166664568298827e-2f) * h * h - 0.5f * h + 1;
    const U odd = -(quarter & 1u);
    const U x = (((U)cosine & ~odd) | ((U)sine & odd)) ^ (((quarter + 1u) & 2u) << 30);
    const U y = (((U)sine & ~odd) | ((U)cosine & odd)) ^ ((quarter & 2u) << 30);
    *(F *)cosines = length * (F)x;
    *(F *)sines = length * (F)y;
    return (U)(radius + NEAR < 2 * NEAR);
}

static TARGET int64_t NAME(normals)(const uint32_t *radii, const uint32_t *turns, int64_t count, float stddev,
                                    float *cosines, float *sines, uint32_t *near) {
    int64_t found = 0;
    for (int64_t at = 0; at < count; at += GROUP) {
        const int64_t end = at + GROUP < count ? at + GROUP : count;
        U any = {0};
        int64_t i = at;
        for (; i + LANES <= end; i += LANES)
            any |= NAME(pairs)(*(const U *)(radii + i), *(const U *)(turns + i), stddev, cosines + i, sines + i);
        if (i < end) { /* what is left of a vector */
            U pair[2] = {{0}};
            F made[2];
            const size_t left = sizeof(float) * (size_t)(end - i);
            memcpy(&pair[0], radii + i, left);
            memcpy(&pair[1], turns + i, left);
            any |= NAME(pairs)(pair[0], pair[1], stddev, (float *)&made[0], (float *)&made[1]);
            memcpy(cosines + i, &made[0], left);
            memcpy(sines + i, &made[1], left);
        }
        uint32_t hit = 0;
        for (int k = 0; k < LANES; k++) hit |= any[k];
        if (hit)
            for (int64_t k = at; k < end; k++)
                if (radii[k] + NEAR < 2 * NEAR) near[found++] = (uint32_t)k;
    }
    return found;
}

#undef F
#undef I
#undef U
#undef INLINE
