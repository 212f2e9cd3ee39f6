/* Per-example filter gradients of convolutions (NHWC and NDHWC, float32), their squared norms, and their weighted sums; squared norms
 * of embeddings' gradients; normals of random words.
 *
 * No framework is needed to build this, and none to call it: see tfdpfl_filters. tensorflow.c makes TensorFlow ops of it.
 * There is no state, and threads live as long as a call, so that a process may fork at any time. */

#define _GNU_SOURCE
#include "filters.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Words nearer than this to either end do not have digits enough for a normal's tail. */
#define NEAR (1u << 20)
/* Pairs of normals between two looks for such words, of which every 2,048th is one. */
#define GROUP 128

#if defined(__x86_64__)
#include "aes.h"
#define LANES 16
#define TILE_ROWS 13
#define TARGET __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")))
#define NAME(x) x##_avx512
#include "tile.h"
#include "normals.h"
#include "rows.h"
#undef LANES
#undef TILE_ROWS
#undef TARGET
#undef NAME
#define LANES 8
#define TILE_ROWS 6
#define TARGET __attribute__((target("avx2,fma")))
#define NAME(x) x##_avx2
#include "tile.h"
#include "normals.h"
#include "rows.h"
#undef LANES
#undef TILE_ROWS
#undef TARGET
#undef NAME
#endif
#define LANES 4 /* what any x86-64 or ARM processor has */
#if defined(__aarch64__)
#define TILE_ROWS 13
#else
#define TILE_ROWS 6
#endif
#define TARGET
#define NAME(x) x##_plain
#include "tile.h"
#include "normals.h"
#include "rows.h"
#undef LANES

enum { PLAIN, AVX2, AVX512 };
enum { DONE, INVALID, NO_MEMORY };
/* So much of an image and of its output's gradients is summed at a time: what a core's second cache holds. */
#define CACHED 49152
#define MOST_THREADS 256
/* So many multiplications take half a millisecond. To start a thread costs a tenth of that in CPU time: a step of a small
 * CNN spent a tenth of its time on three of them. */
#define WORTH_A_THREAD 4e7

/* The widest instruction set that the processor and the operating system have. */
int tfdpfl_instructions(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
        return AVX512;
    if (avx2) return AVX2;
#endif
    return PLAIN;
}

static Example example_of(int instructions, int *lanes) {
#if defined(__x86_64__)
    if (instructions == AVX512) return *lanes = 16, example_avx512;
    if (instructions == AVX2) return *lanes = 8, example_avx2;
#endif
    (void)instructions;
    return *lanes = 4, example_plain;
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct {
    const Geometry *g;
    const float *images, *gradients, *factors;
    float *each, *norms, *totals; /* totals: one a worker */
    Example example;
    int64_t *offsets, entries, padded[AXES], pixel, rows_at_once, row; /* pixel: numbers from one pixel to the next */
    int pads, widens, workers, failed;
    int64_t next, chunk;
} Job;

typedef struct {
    void (*work)(void *job, int number);
    void *job;
    int number;
} Worker;

/* The image with zeros around it, of which all windows' entries are inside. */
static void pad_image(const Job *job, const float *image, float *to) {
    const Geometry *g = job->g;
    int64_t kept[AXES];
    for (int k = 0; k < AXES; k++) kept[k] = smaller(g->size[k], job->padded[k] - g->pad[k]);
    const int64_t pieces = job->pixel == g->channels ? 1 : kept[2], length = kept[2] * g->channels / larger(1, pieces);
    for (int64_t d = 0; d < kept[0]; d++)
        for (int64_t i = 0; i < kept[1]; i++) {
            const float *from = image + (d * g->size[1] + i) * g->size[2] * g->channels;
            const int64_t at = ((d + g->pad[0]) * job->padded[1] + i + g->pad[1]) * job->padded[2] + g->pad[2];
            for (int64_t j = 0; j < pieces; j++)
                memcpy(to + (at + j) * job->pixel, from + j * g->channels, sizeof(float) * (size_t)length);
        }
}

static void one_example(const Job *job, int64_t b, float *padded, float *widened, float *scratch, float *total) {
    const Geometry *g = job->g;
    const int64_t places = volume(g->out), numbers = job->entries * g->filters;
    const float factor = job->factors ? job->factors[b] : 1;
    if (total && factor == 0) return; /* zero times what is not finite is zero, too */
    const float *image = job->images + b * volume(g->size) * g->channels;
    const float *gradient = job->gradients + b * places * g->filters;
    if (job->pads) {
        pad_image(job, image, padded);
        image = padded;
    }
    if (job->widens) {
        for (int64_t t = 0; t < places; t++)
            memcpy(widened + t * job->row, gradient + t * g->filters, sizeof(float) * (size_t)g->filters);
        gradient = widened;
    }
    double square = 0;
    const Result to = {job->each ? job->each + b * numbers : scratch, total, factor, job->norms ? &square : NULL};
    Pass pass = {.g = g, .offsets = job->offsets, .entries = job->entries, .row = job->row};
    pass.in = g->stride[0] * job->padded[1] * job->padded[2] * job->pixel;
    pass.down = g->stride[1] * job->padded[2] * job->pixel;
    pass.across = g->stride[2] * job->pixel;
    const int64_t rows = g->out[0] * g->out[1];
    for (int64_t i = 0; i < rows || i == 0; i += job->rows_at_once) {
        pass.first = i;
        pass.last = smaller(i + job->rows_at_once, rows);
        pass.first_part = i == 0;
        pass.last_part = i + job->rows_at_once >= rows;
        job->example(&pass, image, gradient, to);
    }
    if (job->norms) job->norms[b] = (float)square;
}

static void filter_work(void *of, int number) {
    Job *job = of;
    const Geometry *g = job->g;
    const int64_t numbers = job->entries * g->filters;
    float *total = job->totals ? job->totals + number * numbers : NULL;
    float *padded = NULL, *widened = NULL, *scratch = NULL;
    int ready = 1;
    if (job->pads)
        ready = ready && (padded = calloc((size_t)(volume(job->padded) * job->pixel), sizeof(float)));
    if (job->widens)
        ready = ready && (widened = calloc((size_t)(volume(g->out) * job->row), sizeof(float)));
    if (!job->each && job->rows_at_once < g->out[0] * g->out[1])
        ready = ready && (scratch = malloc(sizeof(float) * (size_t)numbers));
    if (!ready) __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
    while (ready) {
        /* A total's examples are always the same for as many workers, so that its rounding is, too. */
        const int64_t k = total ? number : __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        const int64_t from = k * job->chunk, until = smaller(from + job->chunk, g->batch);
        for (int64_t b = from; b < until; b++) one_example(job, b, padded, widened, scratch, total);
        if (total || until == g->batch || from >= g->batch) break;
    }
    free(padded);
    free(widened);
    free(scratch);
}

static void *begin(void *argument) {
    const Worker *worker = argument;
    worker->work(worker->job, worker->number);
    return NULL;
}

/* Has so many workers do a job, each in a thread. */
static void run(void (*work)(void *, int), void *job, int count) {
    pthread_t threads[MOST_THREADS];
    Worker workers[MOST_THREADS];
    int started[MOST_THREADS];
    for (int k = 1; k < count; k++) {
        workers[k] = (Worker){work, job, k};
        started[k] = !pthread_create(&threads[k], NULL, begin, &workers[k]);
    }
    work(job, 0);
    for (int k = 1; k < count; k++) {
        if (started[k]) pthread_join(threads[k], NULL);
        else work(job, k);
    }
}

/* Whether the product of the numbers, none of them negative, is one that can be addressed. */
static int fits(const int64_t *numbers, int count) {
    int64_t product = 1;
    for (int i = 0; i < count; i++) {
        if (numbers[i] < 0) return 0;
        if (numbers[i] && product > ((int64_t)1 << 40) / numbers[i]) return 0;
        product *= larger(numbers[i], 1);
    }
    return 1;
}

/* Whether all that is allocated for these sizes, and all places in it, can be addressed. */
int tfdpfl_is_valid(const Geometry *g) {
    for (int k = 0; k < AXES; k++)
        if (g->stride[k] < 1 || g->rate[k] < 1 || g->pad[k] < 0 || g->kernel[k] < 1 || g->size[k] < 0 || g->out[k] < 0 ||
            g->pad[k] >= (int64_t)1 << 20)
            return 0;
    if (g->depthwise != 0 && (g->depthwise != 1 || g->filters != g->channels)) return 0;
    const int64_t each = g->depthwise ? 1 : g->channels; /* channels that meet a filter */
    const int64_t image[] = {g->batch, g->size[0], g->size[1], g->size[2], g->channels};
    const int64_t places[] = {g->batch, g->out[0], g->out[1], g->out[2], g->filters, 32};
    const int64_t weights[] = {g->kernel[0], g->kernel[1], g->kernel[2], each, g->filters, MOST_THREADS};
    const int64_t stored[] = {g->batch, g->kernel[0], g->kernel[1], g->kernel[2], each, g->filters};
    int64_t reach[2 * AXES + 1], window[2 * AXES + 1];
    for (int k = 0; k < AXES; k++) {
        reach[2 * k] = larger(g->out[k], 1);
        reach[2 * k + 1] = g->stride[k];
        window[2 * k] = g->kernel[k];
        window[2 * k + 1] = g->rate[k];
    }
    reach[2 * AXES] = window[2 * AXES] = g->channels;
    return fits(image, 5) && fits(places, 6) && fits(weights, 6) && fits(stored, 6) && fits(reach, 2 * AXES + 1) &&
           fits(window, 2 * AXES + 1);
}

/* Gradients of a kernel, one for each example of a batch.
 *
 *   images     [batch, depth, height, width, channels]
 *   gradients  [batch, out depth, out height, out width, filters], of the losses' sum with respect to the convolution's output
 *   factors    [batch], or NULL: what each example's gradient is multiplied by in the total; zero leaves it out
 *   each       [batch, *kernel, channels, filters], or NULL: receives each example's gradient
 *   norms      [batch], or NULL: receives the squared norms of the very gradients that each and total are made of
 *   total      [*kernel, channels, filters], or NULL: receives the weighted sum
 *
 * In a depthwise convolution the kernel has no axis of filters.
 *
 * Returns 0; 1 if sizes are negative or too large; 2 if there is no memory. */
int tfdpfl_filters(const Geometry *g, const float *images, const float *gradients, const float *factors, float *each,
                   float *norms, float *total, int threads, int instructions) {
    if (!tfdpfl_is_valid(g) || instructions < PLAIN || instructions > tfdpfl_instructions() || threads < 1) return INVALID;
    Job job = {.g = g, .images = images, .gradients = gradients, .factors = factors, .each = each, .norms = norms};
    int lanes;
    if (instructions == AVX512 && g->filters <= 8) instructions = AVX2;
    job.example = example_of(instructions, &lanes);
    job.entries = entries_of(g);
    const int64_t places = volume(g->out), numbers = job.entries * g->filters;
    for (int k = 0; k < AXES; k++) {
        const int64_t reach = (larger(g->out[k], 1) - 1) * g->stride[k] + (g->kernel[k] - 1) * g->rate[k] + 1;
        job.padded[k] = larger(reach, g->size[k] + g->pad[k]);
        job.pads |= job.padded[k] != g->size[k];
    }
    job.row = (g->filters + lanes - 1) / lanes * lanes;
    job.widens = job.row != g->filters;
    job.pixel = g->depthwise ? job.row : g->channels;
    job.pads |= job.pixel != g->channels;
    const int64_t pixels[] = {job.padded[0], job.padded[1], job.padded[2], job.pixel};
    if (!fits(pixels, 4)) return INVALID;
    const int64_t row_of_places = g->out[2] * job.row + g->stride[1] * job.padded[2] * job.pixel;
    job.rows_at_once = larger(1, CACHED / larger(1, row_of_places));
    const double worth = (double)places * (double)numbers * (double)g->batch / WORTH_A_THREAD;
    job.workers = (int)smaller(smaller(threads, MOST_THREADS), larger(1, g->batch));
    if (worth < job.workers) job.workers = (int)worth + 1;
    job.chunk = (g->batch + job.workers - 1) / job.workers; /* a total is summed in chunks of one size */
    if (!total) job.chunk = (job.chunk + 3) / 4;
    int result = NO_MEMORY;
    job.offsets = malloc(sizeof(int64_t) * (size_t)larger(1, job.entries));
    job.totals = total && job.workers == 1 ? total : NULL;
    if (total && job.workers > 1) job.totals = malloc(sizeof(float) * (size_t)larger(1, job.workers * numbers));
    if (job.offsets && (!total || job.totals)) {
        int64_t entry = 0;
        for (int64_t d = 0; d < g->kernel[0]; d++)
            for (int64_t i = 0; i < g->kernel[1]; i++)
                for (int64_t j = 0; j < g->kernel[2]; j++) {
                    const int64_t row = d * g->rate[0] * job.padded[1] + i * g->rate[1];
                    const int64_t at = (row * job.padded[2] + j * g->rate[2]) * job.pixel;
                    for (int64_t c = 0; c < (g->depthwise ? 1 : g->channels); c++) job.offsets[entry++] = at + c;
                }
        if (total) memset(job.totals, 0, sizeof(float) * (size_t)(job.workers * numbers));
        run(filter_work, &job, job.workers);
        if (total && job.workers > 1) {
            memcpy(total, job.totals, sizeof(float) * (size_t)numbers);
            for (int k = 1; k < job.workers; k++)
                for (int64_t i = 0; i < numbers; i++) total[i] += job.totals[k * numbers + i];
        }
        result = job.failed ? NO_MEMORY : DONE;
    }
    free(job.offsets);
    if (job.totals != total) free(job.totals);
    return result;
}

typedef double (*Rows)(const float *rows, int64_t length, int64_t width, const int32_t *next, const uint8_t *heads,
                       float *sum, double *shared);

static Rows rows_of(int instructions) {
#if defined(__x86_64__)
    if (instructions == AVX512) return rows_avx512;
    if (instructions == AVX2) return rows_avx2;
#endif
    (void)instructions;
    return rows_plain;
}

typedef struct {
    const int64_t *ids;
    const float *rows;
    int64_t units, length, width, vocabulary, slots, chunk, next;
    float *norms, *shared;
    Rows squared;
    int failed;
} Lookups;

/* Chains the rows of each id: see NAME(rows). An id that the table does not have belongs to no chain. */
static void chain(const Lookups *job, const int64_t *ids, int32_t *slots, int32_t *last, int32_t *next, uint8_t *heads) {
    memset(slots, -1, sizeof *slots * (size_t)job->slots);
    for (int64_t t = 0; t < job->length; t++) {
        const int64_t id = ids[t];
        heads[t] = 0;
        next[t] = -1;
        if (id < 0 || id >= job->vocabulary) continue;
        uint64_t at = ((uint64_t)id * 0x9E3779B97F4A7C15u >> 32) & (uint64_t)(job->slots - 1);
        while (slots[at] >= 0 && ids[slots[at]] != id) at = (at + 1) & (uint64_t)(job->slots - 1);
        if (slots[at] < 0) {
            slots[at] = (int32_t)t;
            heads[t] = 1;
        } else next[last[at]] = (int32_t)t;
        last[at] = (int32_t)t;
    }
}

static void row_work(void *of, int number) {
    (void)number;
    Lookups *job = of;
    int32_t *slots = malloc(sizeof(int32_t) * (size_t)(2 * job->slots + job->length));
    uint8_t *heads = malloc((size_t)job->length);
    float *sum = malloc(sizeof(float) * (size_t)job->width);
    if (!slots || !heads || !sum) __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
    else for (;;) {
        const int64_t from = job->chunk * __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (from >= job->units) break;
        for (int64_t u = from; u < smaller(from + job->chunk, job->units); u++) {
            int32_t *next = slots + 2 * job->slots;
            chain(job, job->ids + u * job->length, slots, slots + job->slots, next, heads);
            const float *rows = job->rows + u * job->length * job->width;
            double shared = 0;
            job->norms[u] = (float)job->squared(rows, job->length, job->width, next, heads, sum, &shared);
            job->shared[u] = (float)shared;
        }
    }
    free(slots);
    free(heads);
    free(sum);
}

/* Squared norms of what each unit adds to a table.
 *
 *   ids    [units, length]: of the table's rows; what is no row of it counts for nothing
 *   rows   [units, length, width], which are added to them
 *   norms  [units]
 *   shared [units]: squared norms of the rows that are not alone with their id, summed
 *
 * Returns 0; 1 if sizes are negative or too large; 2 if there is no memory. */
int tfdpfl_row_norms(const int64_t *ids, const float *rows, int64_t units, int64_t length, int64_t width,
                     int64_t vocabulary, float *norms, float *shared, int threads, int instructions) {
    const int64_t numbers[] = {units, length, width};
    if (!fits(numbers, 3) || length > 1 << 28 || instructions < PLAIN || instructions > tfdpfl_instructions() || threads < 1)
        return INVALID;
    Lookups job = {ids, rows, units, length, width, vocabulary, 1, 1, 0, norms, shared, rows_of(instructions), 0};
    if (!length || !width) {
        memset(norms, 0, sizeof(float) * (size_t)units);
        memset(shared, 0, sizeof(float) * (size_t)units);
        return DONE;
    }
    while (job.slots < 2 * length) job.slots *= 2;
    const double worth = (double)units * (double)length * (double)(width + 16) * 8 / WORTH_A_THREAD;
    const int workers = (int)smaller(smaller(threads, MOST_THREADS), larger(1, smaller(units, (int64_t)smaller(worth, MOST_THREADS) + 1)));
    job.chunk = (units + 4 * workers - 1) / (4 * workers);
    run(row_work, &job, workers);
    return job.failed ? NO_MEMORY : DONE;
}

typedef int64_t (*Normals)(const uint32_t *radii, const uint32_t *turns, int64_t count, float stddev, float *cosines,
                           float *sines, uint32_t *near);

static Normals normals_of(int instructions) {
#if defined(__x86_64__)
    if (instructions == AVX512) return normals_avx512;
    if (instructions == AVX2) return normals_avx2;
#endif
    (void)instructions;
    return normals_plain;
}

/* Normals of deviation stddev: out[i] and out[half + i] of words[i], which gives the radius, and words[half + i], the
 * angle. The places i of words near 0 or 2^32 are written to near [half]: the caller makes these pairs anew, of more bits.
 *
 * Returns how many these are; -1 if sizes or instructions are out of range. */
int64_t tfdpfl_normals(const uint32_t *words, int64_t half, float stddev, float *out, uint32_t *near, int instructions) {
    if (half < 0 || half > UINT32_MAX || instructions < PLAIN || instructions > tfdpfl_instructions()) return -1;
    return normals_of(instructions)(words, words + half, half, stddev, out, out + half, near);
}

#if defined(__x86_64__)

/* So many pairs are made of a stretch of the stream, as KeyStream in tfdpfl/noise/source.py has it, */
#define STRETCH (1 << 17)
/* and so many at a time, of words that stay in a core's first cache. */
#define AT_ONCE 1024

/* The pair of two words of which the radius' has more bits below it. */
static void finer_pair(uint32_t radius, uint32_t turn, uint64_t more, float stddev, float *cosine, float *sine) {
    const int low = radius < NEAR;
    const double distance = ((low ? radius : ~radius) + ((double)more + 0.5) * 0x1p-64) * 0x1p-32; /* to the end */
    const double length = sqrt(-2 * (low ? log(distance) : log1p(-distance))) * stddev;
    const double angle = (int32_t)turn * (M_PI * 0x1p-31);
    *cosine = (float)(length * cos(angle));
    *sine = (float)(length * sin(angle));
}

/* Where number `at` of all is, and the next count - 1 behind it; NULL if they are not all in one array. */
static float *place_of(const Arrays *to, int *k, int64_t at, int64_t count) {
    while (*k + 1 < to->count && to->starts[*k + 1] <= at) ++*k;
    const int64_t from = at - to->starts[*k];
    return from >= 0 && from + count <= to->sizes[*k] ? to->data[*k] + from : NULL;
}

static void spread(const Arrays *to, int k, int64_t at, int64_t count, const float *numbers) {
    for (; k < to->count && to->starts[k] < at + count; k++) {
        const int64_t from = larger(at, to->starts[k]), until = smaller(at + count, to->starts[k] + to->sizes[k]);
        if (from < until)
            memcpy(to->data[k] + from - to->starts[k], numbers + from - at, sizeof(float) * (size_t)(until - from));
    }
}

#endif

/* Normals of deviation stddev, of the key stream of AES-128 in counter mode: the same, to rounding in the far tails, as
 * KeyStream(key).normals(total) makes, of which each array receives those from its start on.
 *
 * Returns 0; 1 if sizes or instructions are out of range, or the processor does not have AES. */
int tfdpfl_draw(const uint8_t *key, const Arrays *to, int64_t total, float stddev, int instructions) {
#if defined(__x86_64__)
    if (total < 0 || total % 2 || to->count < 1 || instructions < PLAIN || instructions > tfdpfl_instructions() || !has_aes())
        return INVALID;
    const Normals normals = normals_of(instructions);
    void (*const blocks)(const Schedule *, uint64_t, int64_t, uint8_t *) =
        instructions == AVX512 && has_vaes() ? blocks_vaes : blocks_aes;
    float numbers[2][AT_ONCE];
    uint32_t near[AT_ONCE];
    uint8_t words[2][4 * AT_ONCE + 16];
    Schedule schedule;
    expand_key(key, &schedule);
    uint64_t position = 0; /* in the stream, in bytes */
    int cosines_in = 0, sines_in = 0;
    for (int64_t start = 0; start < total; start += 2 * STRETCH) {
        const int64_t half = smaller(STRETCH, (total - start) / 2);
        uint64_t more_at = position + 8 * (uint64_t)half; /* of the bits for words near an end */
        for (int64_t i = 0; i < half; i += AT_ONCE) {
            const int64_t count = smaller(AT_ONCE, half - i);
            const uint32_t *of[2]; /* radii, turns */
            for (int k = 0; k < 2; k++) {
                const uint64_t from = position + 4 * (uint64_t)(k * half + i), behind = from % 16;
                blocks(&schedule, from / 16, ((int64_t)behind + 4 * count + 15) / 16, words[k]);
                of[k] = (const uint32_t *)(words[k] + behind);
            }
            float *cosines = place_of(to, &cosines_in, start + i, count);
            float *sines = place_of(to, &sines_in, start + half + i, count);
            float *const x = cosines ? cosines : numbers[0], *const y = sines ? sines : numbers[1];
            const int64_t found = normals(of[0], of[1], count, stddev, x, y, near);
            for (int64_t k = 0; k < found; k++, more_at += 8) {
                uint64_t more[2];
                blocks(&schedule, more_at / 16, 1, (uint8_t *)more);
                const uint32_t n = near[k];
                finer_pair(of[0][n], of[1][n], more[more_at % 16 / 8], stddev, x + n, y + n);
            }
            if (!cosines) spread(to, cosines_in, start + i, count, x);
            if (!sines) spread(to, sines_in, start + half + i, count, y);
        }
        position = more_at;
    }
    memset(&schedule, 0, sizeof schedule);
    __asm__ volatile("" : : "r"(&schedule) : "memory"); /* so that the key is not left on the stack */
    return DONE;
#else
    (void)key, (void)to, (void)total, (void)stddev, (void)instructions;
    return INVALID;
#endif
}

/* Whether tfdpfl_draw works here, and is faster than NumPy. */
int tfdpfl_draws(int instructions) {
#if defined(__x86_64__)
    return instructions > PLAIN && has_aes();
#else
    return (void)instructions, 0;
#endif
}
