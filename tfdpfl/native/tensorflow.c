/* The kernels as TensorFlow ops, by TensorFlow's C API for kernels, which is the same in all versions of TensorFlow 2.
 *
 * The API's functions are looked up in the library that is in memory already, so that neither headers nor libraries of
 * TensorFlow are needed to build this. The declarations are those of tensorflow/c/{ops,kernels,tf_tensor,tf_status}.h. */

#define _GNU_SOURCE
#include "filters.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__APPLE__)
#include <sys/random.h>
#endif

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
enum { TF_OK = 0, TF_INVALID_ARGUMENT = 3, TF_RESOURCE_EXHAUSTED = 8, TF_INTERNAL = 13 };
enum { TF_FLOAT = 1, TF_INT64 = 9 };

#define FUNCTIONS(F)                                                                                                   \
    F(TF_Status *, TF_NewStatus, (void))                                                                               \
    F(void, TF_DeleteStatus, (TF_Status *))                                                                            \
    F(void, TF_SetStatus, (TF_Status *, int, const char *))                                                            \
    F(int, TF_GetCode, (const TF_Status *))                                                                            \
    F(TF_OpDefinitionBuilder *, TF_NewOpDefinitionBuilder, (const char *))                                             \
    F(void, TF_OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder *, const char *))                                   \
    F(void, TF_OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder *, const char *))                                  \
    F(void, TF_OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder *, const char *))                                 \
    F(void, TF_OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder *, bool))                                     \
    F(void, TF_OpDefinitionBuilderSetShapeInferenceFunction,                                                           \
      (TF_OpDefinitionBuilder *, void (*)(TF_ShapeInferenceContext *, TF_Status *)))                                   \
    F(void, TF_RegisterOpDefinition, (TF_OpDefinitionBuilder *, TF_Status *))                                          \
    F(void, TF_ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext *, TF_Status *))                        \
    F(TF_KernelBuilder *, TF_NewKernelBuilder,                                                                         \
      (const char *, const char *, void *(*)(TF_OpKernelConstruction *), void (*)(void *, TF_OpKernelContext *),       \
       void (*)(void *)))                                                                                              \
    F(void, TF_RegisterKernelBuilder, (const char *, TF_KernelBuilder *, TF_Status *))                                 \
    F(void, TF_OpKernelConstruction_GetAttrSize,                                                                       \
      (TF_OpKernelConstruction *, const char *, int32_t *, int32_t *, TF_Status *))                                    \
    F(void, TF_OpKernelConstruction_GetAttrInt64List,                                                                  \
      (TF_OpKernelConstruction *, const char *, int64_t *, int, TF_Status *))                                          \
    F(void, TF_OpKernelConstruction_GetAttrInt32List,                                                                  \
      (TF_OpKernelConstruction *, const char *, int32_t *, int, TF_Status *))                                          \
    F(void, TF_OpKernelConstruction_Failure, (TF_OpKernelConstruction *, TF_Status *))                                 \
    F(void, TF_GetInput, (TF_OpKernelContext *, int, TF_Tensor **, TF_Status *))                                       \
    F(TF_Tensor *, TF_AllocateOutput,                                                                                  \
      (TF_OpKernelContext *, int, int, const int64_t *, int, size_t, TF_Status *))                                     \
    F(int, TF_NumOutputs, (TF_OpKernelContext *))                                                                      \
    F(void, TF_OpKernelContext_Failure, (TF_OpKernelContext *, TF_Status *))                                           \
    F(int, TF_TensorType, (const TF_Tensor *))                                                                         \
    F(int, TF_NumDims, (const TF_Tensor *))                                                                            \
    F(int64_t, TF_Dim, (const TF_Tensor *, int))                                                                       \
    F(void *, TF_TensorData, (const TF_Tensor *))                                                                      \
    F(void, TF_DeleteTensor, (TF_Tensor *))
#define DECLARE(result, name, arguments) static result(*name) arguments;
FUNCTIONS(DECLARE)

/* Attribute "settings" of filters: kernel, strides, rates, zeros before the first pixel (-1: those of padding "SAME"), each
 * of depth (1, 1, 1, 0 for flat images), height and width; whether it is depthwise; threads and instruction set. */
enum { DEPTHWISE = 4 * AXES, THREADS, INSTRUCTIONS, SETTINGS };
enum { FORM, NORMS, SUM };
static const char *const NORMALS = "TfdpflNormals", *const ROWS = "TfdpflRowNorms";
static const char *const NAMES[] = {"TfdpflFilterGradients", "TfdpflFilterNorms", "TfdpflFilterSum"};

static void *create(TF_OpKernelConstruction *construction) {
    static const int least[SETTINGS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, 0, 1, 0};
    TF_Status *status = TF_NewStatus();
    int32_t *settings = calloc(SETTINGS, sizeof *settings);
    if (!settings) TF_SetStatus(status, TF_RESOURCE_EXHAUSTED, "tfdpfl: there is no memory for a kernel.");
    else TF_OpKernelConstruction_GetAttrInt32List(construction, "settings", settings, SETTINGS, status);
    for (int i = 0; i < SETTINGS && TF_GetCode(status) == TF_OK; i++)
        if (settings[i] < least[i]) TF_SetStatus(status, TF_INVALID_ARGUMENT, "tfdpfl: settings are out of range.");
    if (TF_GetCode(status) != TF_OK) TF_OpKernelConstruction_Failure(construction, status);
    TF_DeleteStatus(status);
    return settings;
}

/* The sizes of the images and of their output's gradients; 0 where these are no such batches. */
static int read_sizes(const int32_t *settings, TF_Tensor *const *inputs, int count, Geometry *g) {
    const int rank = TF_NumDims(inputs[0]), flat = AXES + 2 - rank; /* axes that flat images lack */
    if (flat < 0 || flat > 1) return 0;
    for (int i = 0; i < count; i++)
        if (TF_TensorType(inputs[i]) != TF_FLOAT || TF_NumDims(inputs[i]) != (i < 2 ? rank : 1) ||
            TF_Dim(inputs[i], 0) != TF_Dim(inputs[0], 0))
            return 0;
    for (int i = 0; i < 2 * rank; i++) /* so that no product of two of them, or of one and a setting, overflows */
        if (TF_Dim(inputs[i / rank], i % rank) >= (int64_t)1 << 31) return 0;
    g->batch = TF_Dim(inputs[0], 0);
    g->channels = TF_Dim(inputs[0], rank - 1);
    g->filters = TF_Dim(inputs[1], rank - 1);
    g->depthwise = settings[DEPTHWISE];
    for (int k = 0; k < AXES; k++) {
        g->size[k] = k < flat ? 1 : TF_Dim(inputs[0], 1 + k - flat);
        g->out[k] = k < flat ? 1 : TF_Dim(inputs[1], 1 + k - flat);
        g->kernel[k] = settings[k];
        g->stride[k] = settings[AXES + k];
        g->rate[k] = settings[2 * AXES + k];
        const int64_t reach = (g->out[k] - 1) * g->stride[k] + (g->kernel[k] - 1) * g->rate[k] + 1;
        const int64_t missing = reach > g->size[k] ? reach - g->size[k] : 0;
        g->pad[k] = settings[3 * AXES + k] < 0 ? missing / 2 : settings[3 * AXES + k];
    }
    return 1;
}

static float *allocated(TF_OpKernelContext *context, int at, const int64_t *dims, int rank, TF_Tensor **made,
                        TF_Status *status) {
    int64_t size = sizeof(float);
    for (int i = 0; i < rank; i++) size *= dims[i];
    *made = TF_AllocateOutput(context, at, TF_FLOAT, dims, rank, (size_t)size, status);
    return TF_GetCode(status) == TF_OK ? TF_TensorData(*made) : NULL;
}

static void compute(int what, const int32_t *settings, TF_OpKernelContext *context) {
    TF_Status *status = TF_NewStatus();
    TF_Tensor *inputs[3] = {NULL}, *outputs[2] = {NULL};
    const int count = what == SUM ? 3 : 2;
    for (int i = 0; i < count && TF_GetCode(status) == TF_OK; i++) TF_GetInput(context, i, &inputs[i], status);
    Geometry g;
    if (TF_GetCode(status) == TF_OK && (!read_sizes(settings, inputs, count, &g) || !tfdpfl_is_valid(&g)))
        TF_SetStatus(status, TF_INVALID_ARGUMENT, "tfdpfl: the inputs' shapes are not those of a convolution.");
    if (TF_GetCode(status) == TF_OK) {
        const int64_t each_dims[] = {g.batch, entries_of(&g), g.filters};
        float *each = NULL, *norms = NULL, *total = NULL;
        if (what == FORM) each = allocated(context, 0, each_dims, 3, &outputs[0], status);
        if (what == SUM) total = allocated(context, 0, each_dims + 1, 2, &outputs[0], status);
        else if (TF_GetCode(status) == TF_OK)
            norms = allocated(context, what == FORM, each_dims, 1, &outputs[1], status);
        if (TF_GetCode(status) == TF_OK &&
            tfdpfl_filters(&g, TF_TensorData(inputs[0]), TF_TensorData(inputs[1]),
                           what == SUM ? TF_TensorData(inputs[2]) : NULL, each, norms, total, settings[THREADS],
                           settings[INSTRUCTIONS]))
            TF_SetStatus(status, TF_RESOURCE_EXHAUSTED, "tfdpfl: there is no memory for per-example gradients.");
    }
    if (TF_GetCode(status) != TF_OK) TF_OpKernelContext_Failure(context, status);
    for (int i = 0; i < 3; i++)
        if (inputs[i]) TF_DeleteTensor(inputs[i]);
    for (int i = 0; i < 2; i++)
        if (outputs[i]) TF_DeleteTensor(outputs[i]);
    TF_DeleteStatus(status);
}

static void compute_form(void *settings, TF_OpKernelContext *context) { compute(FORM, settings, context); }
static void compute_norms(void *settings, TF_OpKernelContext *context) { compute(NORMS, settings, context); }
static void compute_sum(void *settings, TF_OpKernelContext *context) { compute(SUM, settings, context); }

/* Attribute "settings" of a table's norms: its rows, threads and instruction set. */
enum { ROW_SETTINGS = 3 };

static void *create_rows(TF_OpKernelConstruction *construction) {
    TF_Status *status = TF_NewStatus();
    int64_t *settings = calloc(ROW_SETTINGS, sizeof *settings);
    if (!settings) TF_SetStatus(status, TF_RESOURCE_EXHAUSTED, "tfdpfl: there is no memory for a kernel.");
    else TF_OpKernelConstruction_GetAttrInt64List(construction, "settings", settings, ROW_SETTINGS, status);
    if (TF_GetCode(status) != TF_OK) TF_OpKernelConstruction_Failure(construction, status);
    TF_DeleteStatus(status);
    return settings;
}

static void compute_rows(void *of, TF_OpKernelContext *context) {
    const int64_t *settings = of;
    TF_Status *status = TF_NewStatus();
    TF_Tensor *ids = NULL, *rows = NULL, *made[2] = {NULL};
    TF_GetInput(context, 0, &ids, status);
    if (TF_GetCode(status) == TF_OK) TF_GetInput(context, 1, &rows, status);
    if (TF_GetCode(status) == TF_OK) {
        const int valid = TF_TensorType(ids) == TF_INT64 && TF_TensorType(rows) == TF_FLOAT && TF_NumDims(ids) == 2 &&
                          TF_NumDims(rows) == 3 && TF_Dim(ids, 0) == TF_Dim(rows, 0) && TF_Dim(ids, 1) == TF_Dim(rows, 1);
        int64_t units = valid ? TF_Dim(ids, 0) : 0;
        float *norms = allocated(context, 0, &units, 1, &made[0], status);
        float *shared = norms ? allocated(context, 1, &units, 1, &made[1], status) : NULL;
        const int code = !valid ? 1
                         : !shared  ? 2
                                : tfdpfl_row_norms(TF_TensorData(ids), TF_TensorData(rows), units, TF_Dim(rows, 1),
                                                   TF_Dim(rows, 2), settings[0], norms, shared, (int)settings[1], (int)settings[2]);
        if (code == 1) TF_SetStatus(status, TF_INVALID_ARGUMENT, "tfdpfl: these are no rows of a table with their ids.");
        else if (code) TF_SetStatus(status, TF_RESOURCE_EXHAUSTED, "tfdpfl: there is no memory for norms of rows.");
    }
    if (TF_GetCode(status) != TF_OK) TF_OpKernelContext_Failure(context, status);
    TF_Tensor *const tensors[] = {ids, rows, made[0], made[1]};
    for (int i = 0; i < 4; i++)
        if (tensors[i]) TF_DeleteTensor(tensors[i]);
    TF_DeleteStatus(status);
}

/* What a draw is made of: attribute "settings" has the instruction set, then the size of each output. */
typedef struct {
    int instructions, count;
    int64_t total, *sizes, *starts;
} Draw;

static void delete_draw(void *made) {
    Draw *draw = made;
    if (draw) free(draw->sizes);
    free(draw);
}

static void *create_draw(TF_OpKernelConstruction *construction) {
    TF_Status *status = TF_NewStatus();
    int32_t length = 0, bytes = 0;
    TF_OpKernelConstruction_GetAttrSize(construction, "settings", &length, &bytes, status);
    Draw *draw = calloc(1, sizeof *draw);
    int64_t *settings = length > 1 ? calloc(2 * (size_t)length, sizeof *settings) : NULL;
    if (TF_GetCode(status) == TF_OK && (!draw || !settings))
        TF_SetStatus(status, TF_RESOURCE_EXHAUSTED, "tfdpfl: there is no memory for a draw, or nothing to draw.");
    if (TF_GetCode(status) == TF_OK)
        TF_OpKernelConstruction_GetAttrInt64List(construction, "settings", settings, length, status);
    if (TF_GetCode(status) == TF_OK) {
        *draw = (Draw){(int)settings[0], length - 1, 0, settings, settings + length};
        for (int k = 1; k < length; k++) {
            const int64_t size = settings[k];
            if (size < 0 || size > (int64_t)1 << 36) TF_SetStatus(status, TF_INVALID_ARGUMENT, "tfdpfl: a size is out of range.");
            draw->starts[k - 1] = draw->total;
            draw->total += (size + 15) / 16 * 16; /* as Source in tfdpfl/noise/source.py lays them out */
            settings[k - 1] = size;
        }
    }
    if (TF_GetCode(status) != TF_OK) TF_OpKernelConstruction_Failure(construction, status);
    if (!draw || draw->sizes != settings) free(settings);
    TF_DeleteStatus(status);
    return draw;
}

/* Fills the key with the operating system's entropy, in a forked process, too. Returns whether it could. */
static int from_entropy(uint8_t *key) { return !getentropy(key, 16); }

static void compute_normals(void *made, TF_OpKernelContext *context) {
    const Draw *draw = made;
    TF_Status *status = TF_NewStatus();
    TF_Tensor *key = NULL, *stddev = NULL;
    TF_Tensor **outputs = calloc((size_t)draw->count, sizeof *outputs);
    float **data = calloc((size_t)draw->count, sizeof *data);
    uint8_t bytes[16];
    TF_GetInput(context, 0, &key, status);
    if (TF_GetCode(status) == TF_OK) TF_GetInput(context, 1, &stddev, status);
    if (TF_NumOutputs(context) != draw->count)
        TF_SetStatus(status, TF_INVALID_ARGUMENT, "tfdpfl: a draw has one size for each output.");
    if (!outputs || !data) TF_SetStatus(status, TF_RESOURCE_EXHAUSTED, "tfdpfl: there is no memory for a draw.");
    for (int k = 0; k < draw->count && TF_GetCode(status) == TF_OK; k++)
        data[k] = allocated(context, k, draw->sizes + k, 1, &outputs[k], status);
    if (TF_GetCode(status) == TF_OK) {
        const int64_t words = TF_NumDims(key) == 1 ? TF_Dim(key, 0) : -1;
        const Arrays to = {draw->count, draw->starts, draw->sizes, data};
        if (TF_TensorType(key) != TF_INT64 || TF_TensorType(stddev) != TF_FLOAT || TF_NumDims(stddev) || (words && words != 2))
            TF_SetStatus(status, TF_INVALID_ARGUMENT, "tfdpfl: a draw takes int64 [2] or [0], and a scalar.");
        else if (!words && !from_entropy(bytes))
            TF_SetStatus(status, TF_INTERNAL, "tfdpfl: the operating system gives no random bytes (getentropy), so there is no private noise: run where it does.");
        else if (tfdpfl_draw(words ? TF_TensorData(key) : bytes, &to, draw->total, *(float *)TF_TensorData(stddev),
                             draw->instructions))
            TF_SetStatus(status, TF_INVALID_ARGUMENT, "tfdpfl: this processor does not make normals of AES.");
    }
    if (TF_GetCode(status) != TF_OK) TF_OpKernelContext_Failure(context, status);
    memset(bytes, 0, sizeof bytes);
    __asm__ volatile("" : : "r"(bytes) : "memory"); /* so that no key is left on the stack */
    if (key) TF_DeleteTensor(key);
    if (stddev) TF_DeleteTensor(stddev);
    for (int k = 0; outputs && k < draw->count; k++)
        if (outputs[k]) TF_DeleteTensor(outputs[k]);
    free(outputs);
    free(data);
    TF_DeleteStatus(status);
}

/* Whoever makes the ops in Python sets their shapes. */
static void leave_shapes(TF_ShapeInferenceContext *context, TF_Status *status) {
    TF_ShapeInferenceContextSetUnknownShape(context, status);
}

static int registered(const char *name, TF_OpDefinitionBuilder *op, void *(*make)(TF_OpKernelConstruction *),
                      void (*run)(void *, TF_OpKernelContext *), void (*drop)(void *)) {
    TF_Status *status = TF_NewStatus();
    TF_OpDefinitionBuilderAddAttr(op, "settings: list(int)");
    TF_OpDefinitionBuilderSetShapeInferenceFunction(op, leave_shapes);
    TF_RegisterOpDefinition(op, status);
    if (TF_GetCode(status) == TF_OK)
        TF_RegisterKernelBuilder(name, TF_NewKernelBuilder(name, "CPU", make, run, drop), status);
    const int code = TF_GetCode(status);
    TF_DeleteStatus(status);
    return code;
}

static int register_filters(int what) {
    void (*const computes[])(void *, TF_OpKernelContext *) = {compute_form, compute_norms, compute_sum};
    TF_OpDefinitionBuilder *op = TF_NewOpDefinitionBuilder(NAMES[what]);
    TF_OpDefinitionBuilderAddInput(op, "images: float");
    TF_OpDefinitionBuilderAddInput(op, "gradients: float");
    if (what == SUM) TF_OpDefinitionBuilderAddInput(op, "factors: float");
    if (what == FORM) TF_OpDefinitionBuilderAddOutput(op, "each: float");
    TF_OpDefinitionBuilderAddOutput(op, what == SUM ? "total: float" : "norms: float");
    return registered(NAMES[what], op, create, computes[what], free);
}

static int register_rows(void) {
    TF_OpDefinitionBuilder *op = TF_NewOpDefinitionBuilder(ROWS);
    TF_OpDefinitionBuilderAddInput(op, "ids: int64");
    TF_OpDefinitionBuilderAddInput(op, "rows: float");
    TF_OpDefinitionBuilderAddOutput(op, "norms: float");
    TF_OpDefinitionBuilderAddOutput(op, "shared: float");
    return registered(ROWS, op, create_rows, compute_rows, free);
}

static int register_normals(void) {
    TF_OpDefinitionBuilder *op = TF_NewOpDefinitionBuilder(NORMALS);
    TF_OpDefinitionBuilderAddInput(op, "key: int64");
    TF_OpDefinitionBuilderAddInput(op, "stddev: float");
    TF_OpDefinitionBuilderAddOutput(op, "normals: N * float");
    TF_OpDefinitionBuilderAddAttr(op, "N: int >= 1");
    /* Else TensorFlow would take two draws for one, or a draw for a constant. */
    TF_OpDefinitionBuilderSetIsStateful(op, true);
    return registered(NORMALS, op, create_draw, compute_normals, delete_draw);
}

/* What the functions' arguments are, and the ops' attributes: a library of another number is not used. */
int tfdpfl_interface(void) { return 6; }

/* Registers the ops with the TensorFlow whose library of this path is in memory. Returns 0; -1 if it is not, or lacks a
 * function; TensorFlow's code of an error. To be called once. */
int tfdpfl_register(const char *path) {
    void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return -1;
#define LOOK_UP(result, name, arguments)                                                                               \
    *(void **)&name = dlsym(library, #name);                                                                           \
    if (!name) return -1;
    FUNCTIONS(LOOK_UP)
    int code = register_normals();
    if (!code) code = register_rows();
    for (int what = FORM; what <= SUM && !code; what++) code = register_filters(what);
    return code;
}
