/* The kernels as TensorFlow ops, by TensorFlow's C API for kernels, which is the same in all versions of TensorFlow 2.
 *
 * The API's functions are looked up in the library that is in memory already, so that neither headers nor libraries of
 * TensorFlow are needed to build this. The declarations are those of tensorflow/c/{ops,kernels,tf_tensor,tf_status}.h. */

#define _GNU_SOURCE
#include "filters.h"

#include <dlfcn.h>
#include <stdlib.h>

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
enum { TF_OK = 0, TF_INVALID_ARGUMENT = 3, TF_RESOURCE_EXHAUSTED = 8 };
enum { TF_FLOAT = 1 };

#define FUNCTIONS(F)                                                                                                   \
    F(TF_Status *, TF_NewStatus, (void))                                                                               \
    F(void, TF_DeleteStatus, (TF_Status *))                                                                            \
    F(void, TF_SetStatus, (TF_Status *, int, const char *))                                                            \
    F(int, TF_GetCode, (const TF_Status *))                                                                            \
    F(TF_OpDefinitionBuilder *, TF_NewOpDefinitionBuilder, (const char *))                                             \
    F(void, TF_OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder *, const char *))                                   \
    F(void, TF_OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder *, const char *))                                  \
    F(void, TF_OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder *, const char *))                                 \
    F(void, TF_OpDefinitionBuilderSetShapeInferenceFunction,                                                           \
      (TF_OpDefinitionBuilder *, void (*)(TF_ShapeInferenceContext *, TF_Status *)))                                   \
    F(void, TF_RegisterOpDefinition, (TF_OpDefinitionBuilder *, TF_Status *))                                          \
    F(void, TF_ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext *, TF_Status *))                        \
    F(TF_KernelBuilder *, TF_NewKernelBuilder,                                                                         \
      (const char *, const char *, void *(*)(TF_OpKernelConstruction *), void (*)(void *, TF_OpKernelContext *),       \
       void (*)(void *)))                                                                                              \
    F(void, TF_RegisterKernelBuilder, (const char *, TF_KernelBuilder *, TF_Status *))                                 \
    F(void, TF_OpKernelConstruction_GetAttrInt32List,                                                                  \
      (TF_OpKernelConstruction *, const char *, int32_t *, int, TF_Status *))                                          \
    F(void, TF_OpKernelConstruction_Failure, (TF_OpKernelConstruction *, TF_Status *))                                 \
    F(void, TF_GetInput, (TF_OpKernelContext *, int, TF_Tensor **, TF_Status *))                                       \
    F(TF_Tensor *, TF_AllocateOutput,                                                                                  \
      (TF_OpKernelContext *, int, int, const int64_t *, int, size_t, TF_Status *))                                     \
    F(void, TF_OpKernelContext_Failure, (TF_OpKernelContext *, TF_Status *))                                           \
    F(int, TF_TensorType, (const TF_Tensor *))                                                                         \
    F(int, TF_NumDims, (const TF_Tensor *))                                                                            \
    F(int64_t, TF_Dim, (const TF_Tensor *, int))                                                                       \
    F(void *, TF_TensorData, (const TF_Tensor *))                                                                      \
    F(void, TF_DeleteTensor, (TF_Tensor *))
#define DECLARE(result, name, arguments) static result(*name) arguments;
FUNCTIONS(DECLARE)

/* Attribute "settings" of all ops: kernel, strides, rates, zeros before the first pixel (-1: those of padding "SAME"),
 * each of height and width; threads and instruction set. */
enum { SETTINGS = 10 };
enum { FORM, NORMS, SUM };
static const char *const NAMES[] = {"TfdpflFilterGradients", "TfdpflFilterNorms", "TfdpflFilterSum"};

static void *create(TF_OpKernelConstruction *construction) {
    static const int least[SETTINGS] = {1, 1, 1, 1, 1, 1, -1, -1, 1, 0};
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
    for (int i = 0; i < count; i++)
        if (TF_TensorType(inputs[i]) != TF_FLOAT || TF_NumDims(inputs[i]) != (i < 2 ? 4 : 1) ||
            TF_Dim(inputs[i], 0) != TF_Dim(inputs[0], 0))
            return 0;
    for (int i = 0; i < 8; i++) /* so that no product of two of them, or of one and a setting, overflows */
        if (TF_Dim(inputs[i / 4], i % 4) >= (int64_t)1 << 31) return 0;
    g->batch = TF_Dim(inputs[0], 0);
    g->channels = TF_Dim(inputs[0], 3);
    g->filters = TF_Dim(inputs[1], 3);
    for (int k = 0; k < 2; k++) {
        g->size[k] = TF_Dim(inputs[0], 1 + k);
        g->out[k] = TF_Dim(inputs[1], 1 + k);
        g->kernel[k] = settings[k];
        g->stride[k] = settings[2 + k];
        g->rate[k] = settings[4 + k];
        const int64_t reach = (g->out[k] - 1) * g->stride[k] + (g->kernel[k] - 1) * g->rate[k] + 1;
        const int64_t missing = reach > g->size[k] ? reach - g->size[k] : 0;
        g->pad[k] = settings[6 + k] < 0 ? missing / 2 : settings[6 + k];
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
        const int64_t entries = g.kernel[0] * g.kernel[1] * g.channels;
        const int64_t each_dims[] = {g.batch, entries, g.filters};
        float *each = NULL, *norms = NULL, *total = NULL;
        if (what == FORM) each = allocated(context, 0, each_dims, 3, &outputs[0], status);
        if (what == SUM) total = allocated(context, 0, each_dims + 1, 2, &outputs[0], status);
        else if (TF_GetCode(status) == TF_OK)
            norms = allocated(context, what == FORM, each_dims, 1, &outputs[1], status);
        if (TF_GetCode(status) == TF_OK &&
            tfdpfl_filters(&g, TF_TensorData(inputs[0]), TF_TensorData(inputs[1]),
                           what == SUM ? TF_TensorData(inputs[2]) : NULL, each, norms, total, settings[8],
                           settings[9]))
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

/* Whoever makes the ops in Python sets their shapes. */
static void leave_shapes(TF_ShapeInferenceContext *context, TF_Status *status) {
    TF_ShapeInferenceContextSetUnknownShape(context, status);
}

static int register_one(int what) {
    void (*const computes[])(void *, TF_OpKernelContext *) = {compute_form, compute_norms, compute_sum};
    TF_Status *status = TF_NewStatus();
    TF_OpDefinitionBuilder *op = TF_NewOpDefinitionBuilder(NAMES[what]);
    TF_OpDefinitionBuilderAddInput(op, "images: float");
    TF_OpDefinitionBuilderAddInput(op, "gradients: float");
    if (what == SUM) TF_OpDefinitionBuilderAddInput(op, "factors: float");
    if (what == FORM) TF_OpDefinitionBuilderAddOutput(op, "each: float");
    TF_OpDefinitionBuilderAddOutput(op, what == SUM ? "total: float" : "norms: float");
    TF_OpDefinitionBuilderAddAttr(op, "settings: list(int)");
    TF_OpDefinitionBuilderSetShapeInferenceFunction(op, leave_shapes);
    TF_RegisterOpDefinition(op, status);
    if (TF_GetCode(status) == TF_OK)
        TF_RegisterKernelBuilder(NAMES[what], TF_NewKernelBuilder(NAMES[what], "CPU", create, computes[what], free),
                                 status);
    const int code = TF_GetCode(status);
    TF_DeleteStatus(status);
    return code;
}

/* What the functions' arguments are, and the ops' attributes: a library of another number is not used. */
int tfdpfl_interface(void) { return 2; }

/* Registers the ops with the TensorFlow whose library of this path is in memory. Returns 0; -1 if it is not, or lacks a
 * function; TensorFlow's code of an error. To be called once. */
int tfdpfl_register(const char *path) {
    void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return -1;
#define LOOK_UP(result, name, arguments)                                                                               \
    *(void **)&name = dlsym(library, #name);                                                                           \
    if (!name) return -1;
    FUNCTIONS(LOOK_UP)
    for (int what = FORM; what <= SUM; what++) {
        const int code = register_one(what);
        if (code) return code;
    }
    return 0;
}
