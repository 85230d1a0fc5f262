/* Differences sorted by the exponents of their base (see sorting.py, which says the same in numpy, 6 times slower).

   A counting sort: one pass counts the exponents, another one writes each difference to its place, or takes it from there. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define WORD(BITS)                                                                                                                         \
    static uint##BITS##_t load##BITS(const char *from, size_t i)                                                                           \
    {                                                                                                                                      \
        uint##BITS##_t word;                                                                                                               \
        memcpy(&word, from + i * sizeof word, sizeof word);                                                                                \
        return word;                                                                                                                       \
    }                                                                                                                                      \
                                                                                                                                           \
    static void store##BITS(char *to, size_t i, uint##BITS##_t word)                                                                       \
    {                                                                                                                                      \
        memcpy(to + i * sizeof word, &word, sizeof word);                                                                                  \
    }                                                                                                                                      \
                                                                                                                                           \
    static unsigned exponent##BITS(uint##BITS##_t word)                                                                                    \
    {                                                                                                                                      \
        return (uint##BITS##_t)(word << 1) >> (BITS - 8);                                                                                  \
    }                                                                                                                                      \
                                                                                                                                           \
    /* Floats as integers in their order, in two's complement; its own inverse. */                                                        \
    static uint##BITS##_t ordered##BITS(uint##BITS##_t word)                                                                               \
    {                                                                                                                                      \
        uint##BITS##_t sign = (uint##BITS##_t)(0 - (word >> (BITS - 1)));                                                                  \
        return word ^ (uint##BITS##_t)(sign >> 1);                                                                                         \
    }                                                                                                                                      \
                                                                                                                                           \
    static void starts##BITS(const char *base, size_t count, size_t starts[256])                                                           \
    {                                                                                                                                      \
        size_t counts[4][256]; /* several, as neighbours are often alike, and a count waits for the one before */                         \
        memset(counts, 0, sizeof counts);                                                                                                  \
        for (size_t i = 0; i < count; i++)                                                                                                 \
            counts[i & 3][exponent##BITS(load##BITS(base, i))]++;                                                                          \
        for (size_t e = 0, start = 0; e < 256; e++) {                                                                                      \
            starts[e] = start;                                                                                                             \
            start += counts[0][e] + counts[1][e] + counts[2][e] + counts[3][e];                                                            \
        }                                                                                                                                  \
    }                                                                                                                                      \
                                                                                                                                           \
    static void take##BITS(const char *words, const char *base, char *into, size_t count)                                                 \
    {                                                                                                                                      \
        size_t at[256];                                                                                                                    \
        starts##BITS(base, count, at);                                                                                                     \
        for (size_t i = 0; i < count; i++) {                                                                                               \
            uint##BITS##_t other = load##BITS(base, i);                                                                                    \
            uint##BITS##_t difference = (uint##BITS##_t)(ordered##BITS(load##BITS(words, i)) - ordered##BITS(other));                      \
            uint##BITS##_t sign = (uint##BITS##_t)(0 - (difference >> (BITS - 1)));                                                        \
            store##BITS(into, at[exponent##BITS(other)]++, (uint##BITS##_t)(difference << 1) ^ sign);                                      \
        }                                                                                                                                  \
    }                                                                                                                                      \
                                                                                                                                           \
    static void add##BITS(const char *sorted, const char *base, char *into, size_t count)                                                 \
    {                                                                                                                                      \
        size_t at[256];                                                                                                                    \
        starts##BITS(base, count, at);                                                                                                     \
        for (size_t i = 0; i < count; i++) {                                                                                               \
            uint##BITS##_t other = load##BITS(base, i), zigzag = load##BITS(sorted, at[exponent##BITS(other)]++);                          \
            uint##BITS##_t difference = (uint##BITS##_t)((zigzag >> 1) ^ (uint##BITS##_t)(0 - (zigzag & 1)));                              \
            store##BITS(into, i, ordered##BITS((uint##BITS##_t)(ordered##BITS(other) + difference)));                                      \
        }                                                                                                                                  \
    }

WORD(8)
WORD(16)
WORD(32)
WORD(64)

typedef void (*Loop)(const char *, const char *, char *, size_t);

static PyObject *run(PyObject *args, const Loop loops[4])
{
    PyObject *sources[3];
    Py_buffer buffers[3];
    int item_bytes, got = 0, width;
    if (!PyArg_ParseTuple(args, "OOOi", &sources[0], &sources[1], &sources[2], &item_bytes))
        return NULL;
    for (width = 0; width < 4 && 1 << width != item_bytes; width++)
        ;
    for (; got < 3; got++)
        if (PyObject_GetBuffer(sources[got], &buffers[got], got == 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            break;
    if (got == 3) {
        if (width == 4 || buffers[0].len != buffers[2].len || buffers[1].len != buffers[2].len || buffers[2].len % item_bytes)
            PyErr_SetString(PyExc_ValueError, "buffers of one size, and of whole words of 1, 2, 4 or 8 bytes");
        else {
            Py_BEGIN_ALLOW_THREADS
            loops[width](buffers[0].buf, buffers[1].buf, buffers[2].buf, (size_t)(buffers[2].len / item_bytes));
            Py_END_ALLOW_THREADS
        }
    }
    while (got > 0)
        PyBuffer_Release(&buffers[--got]);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *take_differences(PyObject *module, PyObject *args)
{
    static const Loop loops[4] = {take8, take16, take32, take64};
    (void)module;
    return run(args, loops);
}

static PyObject *add_differences(PyObject *module, PyObject *args)
{
    static const Loop loops[4] = {add8, add16, add32, add64};
    (void)module;
    return run(args, loops);
}

static PyMethodDef methods[] = {
    {"take_differences", take_differences, METH_VARARGS, "(words, base, into, item_bytes): the zigzag differences, sorted."},
    {"add_differences", add_differences, METH_VARARGS, "(sorted, base, into, item_bytes): the words again."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernel", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void)
{
    return PyModule_Create(&definition);
}
