/* The squared norm of what one example adds to a table, for one instruction set. Included once for each, as tile.h is. */

typedef float NAME(R) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#define R NAME(R)
#define INLINE static inline __attribute__((always_inline)) TARGET
/* Rows whose squares are summed in float before they go on in double. */
#define ROWS_AT_ONCE 8

INLINE R NAME(squares)(const float *x, int64_t width, R squares) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) squares += *(const R *)(x + i) * *(const R *)(x + i);
    for (int k = 0; i < width; i++, k++) squares[k] += x[i] * x[i];
    return squares;
}

INLINE double NAME(total)(R squares) {
    double total = 0;
    for (int k = 0; k < LANES; k++) total += squares[k];
    return total;
}

/* Row t is the first of its place in the table where heads[t]; next[t] is the next of that place, or -1. Adds to
 * ``shared`` the squares of the rows that are not alone in their place. */
static TARGET double NAME(rows)(const float *rows, int64_t length, int64_t width, const int32_t *next,
                                const uint8_t *heads, float *sum, double *shared) {
    double square = 0;
    R squares = {0};
    for (int64_t t = 0; t < length; t++) {
        if (heads[t]) {
            const float *x = rows + t * width;
            if (next[t] >= 0) { /* of several rows the norm is that of their sum */
                R terms = NAME(squares)(x, width, (R){0});
                memcpy(sum, x, sizeof(float) * (size_t)width);
                for (int64_t k = next[t]; k >= 0; k = next[k]) {
                    const float *y = rows + k * width;
                    for (int64_t i = 0; i < width; i++) sum[i] += y[i];
                    terms = NAME(squares)(y, width, terms);
                }
                *shared += NAME(total)(terms);
                x = sum;
            }
            squares = NAME(squares)(x, width, squares);
        }
        if (t % ROWS_AT_ONCE && t + 1 < length) continue;
        square += NAME(total)(squares);
        squares = (R){0};
    }
    return square;
}

#undef R
#undef INLINE
