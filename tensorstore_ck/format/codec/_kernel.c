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

/* Changed words: their distances from one another, and their zigzag differences, in one pass at the pace of memory. */

#define LINE_BYTES 64

typedef uint64_t Pair __attribute__((vector_size(16)));

/* Sums of words, and of those sums, in two lanes: the order counts, and no bit can change unnoticed. Not stored anywhere. */
typedef struct {
    Pair words, sums;
} Sum;

typedef struct {
    const char *words, *base;
    char *gaps, *values;
    size_t limit, count; /* capacity in changed words; how many were found */
    size_t next;         /* behind the last changed word */
    int is_float;
    Sum of_words, of_base;
} Search;

/* Adds a line to both sums, which the caller holds in registers; whether it differs. */
static inline int add_line(const char *words, const char *base, Sum *of_words, Sum *of_base)
{
    Pair differ = {0, 0};
    for (int at = 0; at < LINE_BYTES; at += (int)sizeof(Pair)) {
        Pair word, other;
        memcpy(&word, words + at, sizeof word);
        memcpy(&other, base + at, sizeof other);
        of_words->words += word;
        of_words->sums += of_words->words;
        of_base->words += other;
        of_base->sums += of_base->words;
        differ |= word ^ other;
    }
    return (differ[0] | differ[1]) != 0;
}

#define CHANGES(BITS)                                                                                                                      \
    static uint##BITS##_t signed_order##BITS(uint##BITS##_t word, int is_float)                                                            \
    {                                                                                                                                      \
        uint##BITS##_t negative = (uint##BITS##_t)(0 - (word >> (BITS - 1)));                                                              \
        return word ^ (uint##BITS##_t)(is_float ? negative >> 1 : 0);                                                                      \
    }                                                                                                                                      \
                                                                                                                                           \
    static void note##BITS(Search *search, size_t first, const char *words, const char *base)                                              \
    {                                                                                                                                      \
        for (size_t at = 0; at < LINE_BYTES / 8; at++) {                                                                                   \
            uint64_t some, other;                                                                                                          \
            memcpy(&some, words + at * 8, 8);                                                                                              \
            memcpy(&other, base + at * 8, 8);                                                                                              \
            for (uint64_t differ = some ^ other; differ;) {                                                                                \
                unsigned bit = (unsigned)__builtin_ctzll(differ) / BITS * BITS;                                                            \
                size_t word = first + at * (64 / BITS) + bit / BITS;                                                                       \
                differ &= ~((uint64_t)(uint##BITS##_t)-1 << bit);                                                                          \
                if (search->count++ >= search->limit)                                                                                      \
                    continue;                                                                                                              \
                uint##BITS##_t difference = (uint##BITS##_t)(signed_order##BITS((uint##BITS##_t)(some >> bit), search->is_float) -         \
                                                             signed_order##BITS((uint##BITS##_t)(other >> bit), search->is_float));        \
                uint##BITS##_t sign = (uint##BITS##_t)(0 - (difference >> (BITS - 1)));                                                    \
                uint32_t gap = (uint32_t)(word + 1 - search->next);                                                                        \
                memcpy(search->gaps + (search->count - 1) * 4, &gap, 4);                                                                   \
                store##BITS(search->values, search->count - 1, (uint##BITS##_t)(difference << 1) ^ sign);                                  \
                search->next = word + 1;                                                                                                   \
            }                                                                                                                              \
        }                                                                                                                                  \
    }                                                                                                                                      \
                                                                                                                                           \
    static void find##BITS(Search *search, size_t size_bytes)                                                                              \
    {                                                                                                                                      \
        Sum of_words = {{0, 0}, {0, 0}}, of_base = of_words;                                                                               \
        char last[2][LINE_BYTES] = {{0}};                                                                                                  \
        size_t at = 0;                                                                                                                     \
        for (; at + LINE_BYTES <= size_bytes; at += LINE_BYTES)                                                                            \
            if (add_line(search->words + at, search->base + at, &of_words, &of_base) && search->count <= search->limit)                    \
                note##BITS(search, at / (BITS / 8), search->words + at, search->base + at);                                                \
        memcpy(last[0], search->words + at, size_bytes - at);                                                                              \
        memcpy(last[1], search->base + at, size_bytes - at);                                                                               \
        if (add_line(last[0], last[1], &of_words, &of_base) && search->count <= search->limit)                                             \
            note##BITS(search, at / (BITS / 8), last[0], last[1]);                                                                         \
        search->of_words = of_words;                                                                                                       \
        search->of_base = of_base;                                                                                                         \
    }                                                                                                                                      \
                                                                                                                                           \
    static void apply##BITS(const char *gaps, const char *values, char *into, size_t count, int is_float)                                  \
    {                                                                                                                                      \
        size_t next = 0;                                                                                                                   \
        for (size_t i = 0; i < count; i++) {                                                                                               \
            next += load32(gaps, i);                                                                                                       \
            uint##BITS##_t zigzag = load##BITS(values, i);                                                                                 \
            uint##BITS##_t difference = (uint##BITS##_t)((zigzag >> 1) ^ (uint##BITS##_t)(0 - (zigzag & 1)));                              \
            uint##BITS##_t word = (uint##BITS##_t)(signed_order##BITS(load##BITS(into, next - 1), is_float) + difference);                 \
            store##BITS(into, next - 1, signed_order##BITS(word, is_float));                                                               \
        }                                                                                                                                  \
    }

CHANGES(8)
CHANGES(16)
CHANGES(32)
CHANGES(64)

/* Gets `count` buffers, from the one numbered `first_writable` on writable; false with an error. */
static int get_buffers(PyObject **sources, Py_buffer *buffers, int count, int first_writable)
{
    for (int got = 0; got < count; got++)
        if (PyObject_GetBuffer(sources[got], &buffers[got], got >= first_writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) {
            while (got > 0)
                PyBuffer_Release(&buffers[--got]);
            return 0;
        }
    return 1;
}

static void release_buffers(Py_buffer *buffers, int count)
{
    while (count > 0)
        PyBuffer_Release(&buffers[--count]);
}

static int is_width(int item_bytes)
{
    return item_bytes == 1 || item_bytes == 2 || item_bytes == 4 || item_bytes == 8;
}

static PyObject *find_changes(PyObject *module, PyObject *args)
{
    PyObject *sources[4];
    Py_buffer buffers[4];
    int item_bytes;
    Search search = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOip", &sources[0], &sources[1], &sources[2], &sources[3], &item_bytes, &search.is_float) ||
        !get_buffers(sources, buffers, 4, 2))
        return NULL;
    Py_ssize_t size_bytes = buffers[0].len, limit = buffers[2].len / 4;
    if (!is_width(item_bytes) || buffers[1].len != size_bytes || size_bytes % item_bytes || buffers[3].len != limit * item_bytes ||
        (uint64_t)size_bytes / (unsigned)item_bytes > UINT32_MAX)
        PyErr_SetString(PyExc_ValueError, "two buffers of one size of whole words, and as many gaps as differences");
    else {
        search.words = buffers[0].buf, search.base = buffers[1].buf, search.gaps = buffers[2].buf, search.values = buffers[3].buf;
        search.limit = (size_t)limit;
        Py_BEGIN_ALLOW_THREADS
        if (item_bytes == 1)
            find8(&search, (size_t)size_bytes);
        else if (item_bytes == 2)
            find16(&search, (size_t)size_bytes);
        else if (item_bytes == 4)
            find32(&search, (size_t)size_bytes);
        else
            find64(&search, (size_t)size_bytes);
        Py_END_ALLOW_THREADS
    }
    release_buffers(buffers, 4);
    if (PyErr_Occurred())
        return NULL;
    return Py_BuildValue("ny#y#", (Py_ssize_t)search.count, (const char *)&search.of_words, (Py_ssize_t)sizeof(Sum),
                         (const char *)&search.of_base, (Py_ssize_t)sizeof(Sum));
}

/* Whether all gaps lead to words of `words`: checked before any is written. */
static int gaps_fit(const char *gaps, size_t count, size_t words)
{
    size_t next = 0;
    for (size_t i = 0; i < count; i++) {
        if (!load32(gaps, i))
            return 0;
        next += load32(gaps, i);
    }
    return next <= words;
}

static PyObject *apply_changes(PyObject *module, PyObject *args)
{
    PyObject *sources[3];
    Py_buffer buffers[3];
    int item_bytes, is_float, fits;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOip", &sources[0], &sources[1], &sources[2], &item_bytes, &is_float) ||
        !get_buffers(sources, buffers, 3, 2))
        return NULL;
    const char *gaps = buffers[0].buf, *values = buffers[1].buf;
    char *into = buffers[2].buf;
    size_t count = (size_t)buffers[0].len / 4;
    fits = is_width(item_bytes) && (size_t)buffers[1].len == count * (size_t)item_bytes && buffers[2].len % item_bytes == 0;
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "whole words, and as many gaps as differences");
    else {
        Py_BEGIN_ALLOW_THREADS
        fits = gaps_fit(gaps, count, (size_t)buffers[2].len / (size_t)item_bytes);
        if (!fits)
            ;
        else if (item_bytes == 1)
            apply8(gaps, values, into, count, is_float);
        else if (item_bytes == 2)
            apply16(gaps, values, into, count, is_float);
        else if (item_bytes == 4)
            apply32(gaps, values, into, count, is_float);
        else
            apply64(gaps, values, into, count, is_float);
        Py_END_ALLOW_THREADS
    }
    release_buffers(buffers, 3);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(fits);
}

static PyMethodDef methods[] = {
    {"take_differences", take_differences, METH_VARARGS, "(words, base, into, item_bytes): the zigzag differences, sorted."},
    {"add_differences", add_differences, METH_VARARGS, "(sorted, base, into, item_bytes): the words again."},
    {"find_changes", find_changes, METH_VARARGS, "(words, base, gaps, values, item_bytes, is_float): count, sum of words, sum of base."},
    {"apply_changes", apply_changes, METH_VARARGS, "(gaps, values, into, item_bytes, is_float): whether the gaps fit, and were applied."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernel", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void)
{
    return PyModule_Create(&definition);
}
