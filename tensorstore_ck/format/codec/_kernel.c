/* The module `_kernel`: what numpy is too slow for. Checks what it is given; the work is in the other files, without the GIL. */

#include <Python.h>

#include "_kernel.h"
#include "_tensors.h"

#define MAX_BUFFERS (MAX_GROUPS + 1)

typedef struct {
    Py_buffer views[MAX_BUFFERS];
    int count;
} Buffers;

static Py_buffer *add_buffer(Buffers *buffers, PyObject *source, int flags)
{
    if (PyObject_GetBuffer(source, &buffers->views[buffers->count], flags) < 0)
        return NULL;
    return &buffers->views[buffers->count++];
}

static PyObject *release(Buffers *buffers, PyObject *result)
{
    while (buffers->count > 0)
        PyBuffer_Release(&buffers->views[--buffers->count]);
    return result;
}

static PyObject *misfit(const char *message)
{
    PyErr_SetString(PyExc_ValueError, message);
    return NULL;
}

/* The binary logarithm of a word's bytes; 4 if no word has so many. */
static int width_of(int item_bytes)
{
    int width = 0;
    while (width < 4 && 1 << width != item_bytes)
        width++;
    return width;
}

static PyObject *difference(PyObject *args, const DifferenceLoop loops[4])
{
    PyObject *sources[3];
    Buffers buffers = {.count = 0};
    int item_bytes, width;
    if (!PyArg_ParseTuple(args, "OOOi", &sources[0], &sources[1], &sources[2], &item_bytes))
        return NULL;
    width = width_of(item_bytes);
    for (int i = 0; i < 3; i++)
        if (!add_buffer(&buffers, sources[i], i == 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE))
            return release(&buffers, NULL);
    const Py_buffer *from = &buffers.views[0], *base = &buffers.views[1], *into = &buffers.views[2];
    if (width == 4 || from->len != into->len || base->len != into->len || into->len % item_bytes || into->len / item_bytes > UINT32_MAX)
        return release(&buffers, misfit("buffers of one size, and of whole words of 1, 2, 4 or 8 bytes"));
    Py_BEGIN_ALLOW_THREADS
    loops[width](from->buf, base->buf, into->buf, (size_t)(into->len / item_bytes));
    Py_END_ALLOW_THREADS
    Py_INCREF(Py_None);
    return release(&buffers, Py_None);
}

static PyObject *take_differences(PyObject *module, PyObject *args)
{
    (void)module;
    return difference(args, take_loops);
}

static PyObject *add_differences(PyObject *module, PyObject *args)
{
    (void)module;
    return difference(args, add_loops);
}

static PyObject *places_of(const Group *groups, int count, const uint8_t *start)
{
    PyObject *places = PyList_New(count);
    for (int g = 0; places && g < count; g++) {
        Py_ssize_t begin = groups[g].bytes - start;
        PyObject *place = Py_BuildValue("nn", begin, begin + (Py_ssize_t)groups[g].size);
        if (!place || PyList_SetItem(places, g, place) < 0) {
            Py_DECREF(places);
            return NULL;
        }
    }
    return places;
}

static PyObject *encode(PyObject *module, PyObject *args)
{
    PyObject *source, *destination, *width_bytes, *how_bytes;
    char *widths, *hows;
    Py_ssize_t group_count, how_count;
    int item_bytes, rotated;
    Buffers buffers = {.count = 0};
    Group groups[MAX_GROUPS];
    (void)module;
    /* No format with '#': in a module that was built by Python 3.13, Python 3.11 and 3.12 refuse it. */
    if (!PyArg_ParseTuple(args, "OOipSS", &source, &destination, &item_bytes, &rotated, &width_bytes, &how_bytes) ||
        PyBytes_AsStringAndSize(width_bytes, &widths, &group_count) < 0 || PyBytes_AsStringAndSize(how_bytes, &hows, &how_count) < 0)
        return NULL;
    const Py_buffer *words = add_buffer(&buffers, source, PyBUF_SIMPLE);
    const Py_buffer *into = words ? add_buffer(&buffers, destination, PyBUF_WRITABLE) : NULL;
    if (!into)
        return release(&buffers, NULL);
    if (group_count != how_count || group_count < 1 || group_count > MAX_GROUPS)
        return release(&buffers, misfit("1 to 8 groups"));
    for (int g = 0; g < group_count; g++)
        groups[g] = (Group){.width = widths[g], .how = hows[g] == HUFFMAN ? HUFFMAN : RAW};
    if (!are_groups_of(groups, (int)group_count, item_bytes) || words->len % item_bytes || words->len / item_bytes > UINT32_MAX)
        return release(&buffers, misfit("whole words, and groups of bytes that make one up"));
    size_t count = (size_t)(words->len / item_bytes), needed = 0;
    for (int g = 0; g < group_count; g++) {
        groups[g].bytes = (uint8_t *)into->buf + needed;
        needed += groups[g].how == HUFFMAN ? huffman_bound(count) : count * (size_t)groups[g].width;
    }
    if ((size_t)into->len < needed)
        return release(&buffers, misfit("too little memory for what is encoded"));
    Py_BEGIN_ALLOW_THREADS
    encode_groups(words->buf, count, item_bytes, rotated, groups, (int)group_count);
    Py_END_ALLOW_THREADS
    return release(&buffers, places_of(groups, (int)group_count, into->buf));
}

static PyObject *survey(PyObject *module, PyObject *args)
{
    PyObject *sources[2];
    int item_bytes, rotated, places;
    Plane planes[MAX_GROUPS];
    Buffers buffers = {.count = 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOipi", &sources[0], &sources[1], &item_bytes, &rotated, &places))
        return NULL;
    for (int i = 0; i < 2; i++)
        if (!add_buffer(&buffers, sources[i], PyBUF_SIMPLE))
            return release(&buffers, NULL);
    const Py_buffer *words = &buffers.views[0], *logarithms = &buffers.views[1];
    if (width_of(item_bytes) == 4 || words->len % item_bytes || places < 1 || places > item_bytes)
        return release(&buffers, misfit("whole words of 1, 2, 4 or 8 bytes, and no more places than these"));
    const Py_ssize_t count = words->len / item_bytes;
    if (count > UINT32_MAX || (size_t)logarithms->len / sizeof(double) <= (size_t)count || (uintptr_t)logarithms->buf % sizeof(double))
        return release(&buffers, misfit("a logarithm for each number of words"));
    Py_BEGIN_ALLOW_THREADS
    survey_planes(words->buf, (size_t)count, item_bytes, rotated, logarithms->buf, planes, places);
    Py_END_ALLOW_THREADS
    PyObject *rows = PyList_New(places);
    for (int place = 0; rows && place < places; place++) {
        const Plane *each = &planes[place];
        PyObject *row = Py_BuildValue("dKKKK", each->logarithms, (unsigned long long)each->repeats, (unsigned long long)each->squares,
                                      (unsigned long long)each->values, (unsigned long long)each->values_squared);
        if (!row || PyList_SetItem(rows, place, row) < 0)
            Py_CLEAR(rows);
    }
    return release(&buffers, rows);
}

static int take_group(Buffers *buffers, PyObject *row, Group *group)
{
    PyObject *stored;
    if (!PyTuple_Check(row)) {
        misfit("a group is a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(row, "iiO", &group->width, &group->how, &stored))
        return 0;
    const Py_buffer *view = add_buffer(buffers, stored, PyBUF_SIMPLE);
    if (view) {
        group->bytes = view->buf;
        group->size = (size_t)view->len;
    }
    return view != NULL;
}

static PyObject *decode(PyObject *module, PyObject *args)
{
    PyObject *rows, *destination;
    int item_bytes, rotated, found;
    Buffers buffers = {.count = 0};
    Group groups[MAX_GROUPS];
    (void)module;
    if (!PyArg_ParseTuple(args, "OOip", &rows, &destination, &item_bytes, &rotated))
        return NULL;
    Py_ssize_t group_count = PyList_Check(rows) ? PyList_Size(rows) : 0;
    const Py_buffer *into = add_buffer(&buffers, destination, PyBUF_WRITABLE);
    if (!into)
        return NULL;
    if (group_count < 1 || group_count > MAX_GROUPS)
        return release(&buffers, misfit("a list of 1 to 8 groups"));
    for (int g = 0; g < group_count; g++)
        if (!take_group(&buffers, PyList_GetItem(rows, g), &groups[g]))
            return release(&buffers, NULL);
    if (!are_groups_of(groups, (int)group_count, item_bytes) || into->len % item_bytes)
        return release(&buffers, misfit("whole words, and groups of bytes that make one up"));
    size_t count = (size_t)(into->len / item_bytes);
    for (int g = 0; g < group_count; g++) {
        size_t width = (size_t)groups[g].width, size = groups[g].how == RAW ? count * width : width;
        if (groups[g].how != HUFFMAN && ((groups[g].how != RAW && groups[g].how != CONSTANT) || groups[g].size != size))
            return release(&buffers, misfit("a group of the wrong size"));
    }
    Py_BEGIN_ALLOW_THREADS
    found = decode_groups(groups, (int)group_count, into->buf, count, item_bytes, rotated);
    Py_END_ALLOW_THREADS
    if (found >= 0)
        return release(&buffers, PyLong_FromLong(found));
    return release(&buffers, Py_BuildValue(""));
}

/* Calls `visit` with a slice of `words`; false after an error. */
static int visit_piece(PyObject *visit, PyObject *words, Py_ssize_t at, Py_ssize_t end)
{
    PyObject *piece = PySequence_GetSlice(words, at, end);
    PyObject *result = piece ? PyObject_CallFunctionObjArgs(visit, piece, NULL) : NULL;
    Py_XDECREF(piece);
    Py_XDECREF(result);
    return result != NULL;
}

static PyObject *compare_words(PyObject *module, PyObject *args)
{
    PyObject *sources[4], *visit;
    Buffers buffers = {.count = 0};
    Search search = {0};
    Py_ssize_t piece_bytes;
    int item_bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOipnO", &sources[0], &sources[1], &sources[2], &sources[3], &item_bytes, &search.is_float, &piece_bytes,
                          &visit))
        return NULL;
    for (int i = 0; i < 4; i++)
        if (!add_buffer(&buffers, sources[i], i > 1 || (i == 1 && visit != Py_None) ? PyBUF_WRITABLE : PyBUF_SIMPLE))
            return release(&buffers, NULL);
    const Py_buffer *words = &buffers.views[0], *gaps = &buffers.views[2];
    int width = width_of(item_bytes);
    if (width == 4 || buffers.views[1].len != words->len || words->len % item_bytes || words->len / item_bytes > UINT32_MAX ||
        buffers.views[3].len != gaps->len / 4 * item_bytes || piece_bytes < 64 || piece_bytes % 64)
        return release(&buffers, misfit("two buffers of one size, of whole words, as many gaps as differences, and pieces of whole lines"));
    search.words = words->buf, search.base = buffers.views[1].buf, search.gaps = gaps->buf, search.values = buffers.views[3].buf;
    search.limit = (size_t)gaps->len / 4;
    search.into = visit == Py_None ? NULL : buffers.views[1].buf;
    for (Py_ssize_t at = 0; at < words->len; at += piece_bytes) {
        Py_ssize_t end = words->len - at < piece_bytes ? words->len : at + piece_bytes;
        Py_BEGIN_ALLOW_THREADS
        find_loops[width](&search, (size_t)at, (size_t)end);
        Py_END_ALLOW_THREADS
        if (visit != Py_None && !visit_piece(visit, sources[0], at, end))
            return release(&buffers, NULL);
    }
    PyObject *sums[] = {PyBytes_FromStringAndSize((const char *)&search.of_words, sizeof(Sum)),
                        PyBytes_FromStringAndSize((const char *)&search.of_base, sizeof(Sum))};
    return release(&buffers, Py_BuildValue("nNN", (Py_ssize_t)search.count, sums[0], sums[1]));
}

static PyObject *apply_changes(PyObject *module, PyObject *args)
{
    PyObject *sources[3];
    Buffers buffers = {.count = 0};
    int item_bytes, is_float, fits;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOip", &sources[0], &sources[1], &sources[2], &item_bytes, &is_float))
        return NULL;
    for (int i = 0; i < 3; i++)
        if (!add_buffer(&buffers, sources[i], i == 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE))
            return release(&buffers, NULL);
    const Py_buffer *gaps = &buffers.views[0], *values = &buffers.views[1], *into = &buffers.views[2];
    int width = width_of(item_bytes);
    size_t count = (size_t)gaps->len / 4;
    if (width == 4 || (size_t)values->len != count * (size_t)item_bytes || into->len % item_bytes)
        return release(&buffers, misfit("whole words, and as many gaps as differences"));
    Py_BEGIN_ALLOW_THREADS
    fits = gaps_fit(gaps->buf, count, (size_t)(into->len / item_bytes));
    if (fits)
        apply_loops[width](gaps->buf, values->buf, into->buf, count, is_float);
    Py_END_ALLOW_THREADS
    return release(&buffers, PyBool_FromLong(fits));
}

/* Masters and words: false after an error. */
static int take_roundings(PyObject *args, Buffers *buffers, int flags)
{
    PyObject *sources[2];
    if (!PyArg_ParseTuple(args, "OO", &sources[0], &sources[1]) || !add_buffer(buffers, sources[0], PyBUF_SIMPLE) ||
        !add_buffer(buffers, sources[1], flags))
        return 0;
    if (buffers->views[0].len % 4 == 0 && buffers->views[0].len == 2 * buffers->views[1].len)
        return 1;
    misfit("as many words of 2 bytes as of 4");
    return 0;
}

static PyObject *rounding(PyObject *module, PyObject *args)
{
    Buffers buffers = {.count = 0};
    (void)module;
    if (!take_roundings(args, &buffers, PyBUF_WRITABLE))
        return release(&buffers, NULL);
    Py_BEGIN_ALLOW_THREADS
    round_words(buffers.views[0].buf, (size_t)(buffers.views[0].len / 4), buffers.views[1].buf);
    Py_END_ALLOW_THREADS
    Py_INCREF(Py_None);
    return release(&buffers, Py_None);
}

static PyObject *compare_roundings(PyObject *module, PyObject *args)
{
    Buffers buffers = {.count = 0};
    int fits;
    (void)module;
    if (!take_roundings(args, &buffers, PyBUF_SIMPLE))
        return release(&buffers, NULL);
    Py_BEGIN_ALLOW_THREADS
    fits = are_roundings(buffers.views[0].buf, (size_t)(buffers.views[0].len / 4), buffers.views[1].buf);
    Py_END_ALLOW_THREADS
    return release(&buffers, PyBool_FromLong(fits));
}

typedef struct {
    int64_t target, source, size;
} Move;

static PyObject *copy_memory(PyObject *module, PyObject *args)
{
    PyObject *source;
    Buffers buffers = {.count = 0};
    Move move;
    (void)module;
    if (!PyArg_ParseTuple(args, "O", &source) || !add_buffer(&buffers, source, PyBUF_SIMPLE))
        return NULL;
    const Py_buffer *moves = &buffers.views[0];
    if (moves->len % (Py_ssize_t)sizeof(Move))
        return release(&buffers, misfit("rows of a target, a source and a size, each of 8 bytes"));
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < moves->len; at += (Py_ssize_t)sizeof(Move)) {
        memcpy(&move, (const char *)moves->buf + at, sizeof(Move));
        memmove((void *)(intptr_t)move.target, (const void *)(intptr_t)move.source, (size_t)move.size);
    }
    Py_END_ALLOW_THREADS
    Py_INCREF(Py_None);
    return release(&buffers, Py_None);
}

static PyObject *compare_memory(PyObject *module, PyObject *args)
{
    PyObject *source, *into;
    Buffers buffers = {.count = 0};
    Move move;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &source, &into))
        return NULL;
    if (!add_buffer(&buffers, source, PyBUF_SIMPLE) || !add_buffer(&buffers, into, PyBUF_WRITABLE))
        return release(&buffers, NULL);
    const Py_buffer *moves = &buffers.views[0];
    char *differs = buffers.views[1].buf;
    if (moves->len != buffers.views[1].len * (Py_ssize_t)sizeof(Move))
        return release(&buffers, misfit("rows of two addresses and a size, each of 8 bytes, and a byte for each"));
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t row = 0; row < buffers.views[1].len; row++) {
        memcpy(&move, (const char *)moves->buf + row * (Py_ssize_t)sizeof(Move), sizeof(Move));
        differs[row] = memcmp((const void *)(intptr_t)move.target, (const void *)(intptr_t)move.source, (size_t)move.size) != 0;
    }
    Py_END_ALLOW_THREADS
    Py_INCREF(Py_None);
    return release(&buffers, Py_None);
}

static PyMethodDef methods[] = {
    {"take_differences", take_differences, METH_VARARGS, "(words, base, into, item_bytes): the zigzag differences, sorted."},
    {"add_differences", add_differences, METH_VARARGS, "(sorted, base, into, item_bytes): the words again."},
    {"survey_words", survey, METH_VARARGS, "(words, logarithms, item_bytes, rotated, places): of so many places of the words a `Plane`."},
    {"round_words", rounding, METH_VARARGS, "(masters, into): fp32 numbers as bfloat16."},
    {"are_roundings", compare_roundings, METH_VARARGS, "(masters, words): whether `round_words` would make these words."},
    {"encode_groups", encode, METH_VARARGS, "(words, into, item_bytes, rotated, widths, hows): where in `into` each group of bytes is."},
    {"decode_groups", decode, METH_VARARGS, "(groups, into, item_bytes, rotated): None, or the number of a group that only zstd itself can decode."},
    {"compare_words", compare_words, METH_VARARGS,
     "(words, base, gaps, values, item_bytes, is_float, piece_bytes, visit): count, sum of words, sum of base."},
    {"apply_changes", apply_changes, METH_VARARGS, "(gaps, values, into, item_bytes, is_float): whether the gaps fit, and were applied."},
    {"copy_memory", copy_memory, METH_VARARGS, "(moves): copies; rows of a target address, a source address and a size, as int64."},
    {"compare_memory", compare_memory, METH_VARARGS, "(moves, differs): sets a byte for each row: whether the bytes at both addresses differ."},
    {"add_tensors", add_tensors, METH_VARARGS, "(rules, columns, items, start): where a run of ordinary tensors ends; adds those to the columns."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernel", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void)
{
    return PyModule_Create(&definition);
}
