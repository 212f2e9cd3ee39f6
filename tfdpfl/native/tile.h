/* One example's filter gradient, for one instruction set. Included once for each, with LANES (numbers in a vector),
 * TARGET (the compiler's attribute) and NAME(x) defined.
 *
 * gradient[entry][filter] = sum over places of image[place + offset[entry]] * out_gradient[place][filter]
 *
 * and in a depthwise convolution, of image[place + offset[entry] + filter] * out_gradient[place][filter].
 *
 * A tile of ROWS entries and VECTORS vectors of filters stays in registers while all places are summed. */

typedef float NAME(V) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#define V NAME(V)
#define MOST_ROWS 14
#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE double NAME(added)(V numbers) {
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += numbers[i];
    return sum;
}

/* What is made of a tile, which stands in memory by now. */
static __attribute__((noinline)) TARGET void NAME(finish)(const Pass *p, const float *tile, int rows, int stride,
                                                          int64_t entry, int64_t filter, Result to) {
    const int64_t filters = p->g->filters, at = entry * filters + filter, left = filters - filter;
    V squares = {0};
    for (int r = 0; r < rows; r++) {
        for (int k = 0; k < stride && k < left; k += LANES) {
            V sum = *(const V *)(tile + r * stride + k); /* zero beyond the last filter */
            const int64_t here = at + r * filters + k, width = left - k < LANES ? left - k : LANES;
            float *each = to.each ? to.each + here : 0;
            float *total = to.total && p->last_part ? to.total + here : 0;
            if (width == LANES) {
                if (!p->first_part) sum += *(const V *)each;
                if (each) *(V *)each = sum;
                if (total) *(V *)total += to.factor * sum;
            } else {
                for (int64_t i = 0; i < width; i++) {
                    if (!p->first_part) sum[i] += each[i];
                    if (each) each[i] = sum[i];
                    if (total) total[i] += to.factor * sum[i];
                }
            }
            squares += sum * sum;
        }
    }
    if (!to.square || !p->last_part) return;
    *to.square += NAME(added)(squares);
}

INLINE void NAME(tile)(const int rows, const int vectors, const int depthwise, const Pass *p, const float *image, const float *gradient,
                       int64_t entry, int64_t filter, Result to) {
    V sum[MOST_ROWS][2];
    int64_t offset[MOST_ROWS];
    const int64_t high = p->g->out[1], places = p->g->out[2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        offset[r] = p->offsets[entry + r];
        sum[r][0] = sum[r][1] = (V){0};
    }
    const float *g = gradient + p->first * places * p->row + filter;
    for (int64_t i = p->first; i < p->last; i++) {
        const float *x = image + i / high * p->in + i % high * p->down;
        for (int64_t j = 0; j < places; j++, x += p->across, g += p->row) {
            const V g0 = *(const V *)g;
            V g1 = {0};
            if (vectors > 1) g1 = *(const V *)(g + LANES);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                const float *entry_of_image = x + offset[r];
                if (depthwise) sum[r][0] += *(const V *)(entry_of_image + filter) * g0;
                else sum[r][0] += *entry_of_image * g0;
                if (vectors > 1) sum[r][1] += *entry_of_image * g1;
            }
        }
    }
    if (p->first_part && p->last_part && filter + vectors * LANES <= p->g->filters) { /* most are whole: they stay here */
        const int64_t filters = p->g->filters, at = entry * filters + filter;
        V squares = {0};
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            squares += sum[r][0] * sum[r][0];
            if (vectors > 1) squares += sum[r][1] * sum[r][1];
        }
        if (to.square) *to.square += NAME(added)(squares);
        if (to.each) {
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                float *each = to.each + at + r * filters;
                *(V *)each = sum[r][0];
                if (vectors > 1) *(V *)(each + LANES) = sum[r][1];
            }
        }
        if (to.total) {
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                float *total = to.total + at + r * filters;
                *(V *)total += to.factor * sum[r][0];
                if (vectors > 1) *(V *)(total + LANES) += to.factor * sum[r][1];
            }
        }
        return;
    }
    float tile[MOST_ROWS * 2 * LANES];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        *(V *)(tile + r * vectors * LANES) = sum[r][0];
        if (vectors > 1) *(V *)(tile + (r * vectors + 1) * LANES) = sum[r][1];
    }
    NAME(finish)(p, tile, rows, vectors * LANES, entry, filter, to);
}

INLINE void NAME(columns)(const int most, const int vectors, const int depthwise, const Pass *p, const float *image,
                          const float *gradient, int64_t filter, Result to) {
    const int64_t tiles = (p->entries + most - 1) / most;
    int64_t entry = 0;
    for (int64_t k = tiles; k > 0; k--) { /* tiles of as equal a height as may be */
        const int rows = (int)((p->entries - entry + k - 1) / k);
        switch (rows) {
#define CASE(n) case n: if (n <= most) NAME(tile)(n, vectors, depthwise, p, image, gradient, entry, filter, to); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
            CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#undef CASE
        }
        entry += rows;
    }
}

/* Its gradient's rows are a whole number of vectors long, so that reads beyond the last filter find zeros; in a depthwise
 * convolution the image's rows are, too. */
static TARGET void NAME(example)(const Pass *p, const float *image, const float *gradient, Result to) {
    int64_t filter = 0;
    if (p->g->depthwise) {
        for (; filter < p->g->filters; filter += LANES) NAME(columns)(MOST_ROWS, 1, 1, p, image, gradient, filter, to);
        return;
    }
    for (; p->g->filters - filter > LANES; filter += 2 * LANES)
        NAME(columns)(TILE_ROWS, 2, 0, p, image, gradient, filter, to);
    if (filter < p->g->filters) NAME(columns)(MOST_ROWS, 1, 0, p, image, gradient, filter, to);
}

#undef V
#undef INLINE
