/* What a step of a convolution's per-example filter gradients needs to know. All lengths count float32 numbers. */
#ifndef TFDPFL_FILTERS_H
#define TFDPFL_FILTERS_H

#include <stdint.h>

/* A batch of images [batch, depth, height, width, channels] under a kernel [depth, height, width, channels, filters]. Each
 * three are of depth (1 in a flat image), height and width; pad is the number of zeros before the first pixel. In a
 * depthwise convolution (1, not 0) each channel has one filter of its own: the kernel is [depth, height, width, channels],
 * and filters equal channels. */
enum { AXES = 3 };
typedef struct {
    int64_t batch, size[AXES], channels, out[AXES], filters, kernel[AXES], stride[AXES], rate[AXES], pad[AXES], depthwise;
} Geometry;

static inline int64_t volume(const int64_t *lengths) { return lengths[0] * lengths[1] * lengths[2]; }

/* How many numbers of a window meet one filter. */
static inline int64_t entries_of(const Geometry *g) { return volume(g->kernel) * (g->depthwise ? 1 : g->channels); }

/* The same, as one thread works on it. */
typedef struct {
    const Geometry *g;
    const int64_t *offsets; /* of the entries of a window, in the padded image: [entries] */
    int64_t entries;        /* of a window, as entries_of has it */
    int64_t in, down, across; /* from a window to the next of each axis, in the padded image */
    int64_t row;            /* from a place's output gradients to the next place's */
    int64_t first, last;    /* rows of places, of all depths, that are summed now */
    int first_part, last_part;
} Pass;

/* What is made of an example's gradient; NULL for what is not wanted. */
typedef struct {
    float *each;    /* [entries, filters]: the gradient, or what of it was summed in earlier passes */
    float *total;   /* [entries, filters]: to which factor times the gradient is added */
    float factor;
    double *square; /* to which the gradient's squared norm is added */
} Result;

/* Arrays that share a row of numbers: each has sizes[k] of them, from number starts[k] on. Starts ascend. */
typedef struct {
    int count;
    const int64_t *starts, *sizes;
    float *const *data;
} Arrays;

typedef void (*Example)(const Pass *, const float *image, const float *gradient, Result);

#define EXPORTED __attribute__((visibility("default")))
EXPORTED int tfdpfl_instructions(void);
EXPORTED int tfdpfl_interface(void);
EXPORTED int tfdpfl_register(const char *path);
int tfdpfl_is_valid(const Geometry *);
EXPORTED int tfdpfl_filters(const Geometry *, const float *images, const float *gradients, const float *factors,
                            float *each, float *norms, float *total, int threads, int instructions);
EXPORTED int tfdpfl_row_norms(const int64_t *ids, const float *rows, int64_t units, int64_t length, int64_t width,
                              int64_t vocabulary, float *norms, float *shared, int threads, int instructions);
EXPORTED int64_t tfdpfl_normals(const uint32_t *words, int64_t half, float stddev, float *out, uint32_t *near,
                                int instructions);
EXPORTED int tfdpfl_draws(int instructions);
EXPORTED int tfdpfl_draw(const uint8_t *key, const Arrays *to, int64_t total, float stddev, int instructions);

#endif
