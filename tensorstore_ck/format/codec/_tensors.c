/* Asks a framework about many tensors in one call. Nothing of torch is known here: `rules` names what is asked, and DLPack's table of
   functions tells where a tensor lies. A tensor of which anything is out of the ordinary ends the run, and the caller describes it. */

#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_tensors.h"

#define MOST_DIMS 16
#define DLPACK_MAJOR 1
#define DLPACK_CPU 1

typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *earlier, *allocate, *export, *import;
    int (*describe)(void *tensor, DLTensor *into); /* 0, or -1 with an exception */
    void *stream;
} DLPackTable;

/* What is asked: see `_RULES` in state/tensor_table.py. */
typedef struct {
    PyObject *capsule, *type, *subtype, *storage, *start, *size, *is_negative, *is_conjugate, *has, *mark, *dtype, *requires_grad;
    const DLPackTable *dlpack;
} Rules;

/* What is known of the tensors before, and is added to: see `TensorTable`. `new_kind` is asked for the number of a dtype and shape, or None. */
typedef struct {
    PyObject *number_of, *objects, *owners, *flags, *kind_of, *kinds, *bounds, *places, *new_kind;
} Columns;

typedef struct {
    int64_t size_bytes, is_complex;
} Kind;

typedef struct {
    int64_t address, kind;
} Place;

typedef struct {
    int64_t start, stop;
} Bounds;

enum { ADDED, ENDED, FAILED };

/* Whether an error is one that the caller will meet again when it describes the tensor: then the run ends. */
static int ended(void)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return FAILED;
    PyErr_Clear();
    return ENDED;
}

static int append(PyObject *column, const void *row, Py_ssize_t size)
{
    Py_ssize_t end = PyByteArray_Size(column);
    if (PyByteArray_Resize(column, end + size) < 0)
        return -1;
    memcpy(PyByteArray_AsString(column) + end, row, (size_t)size);
    return 0;
}

/* Calls a question that is answered by True or False: -1 after an error. */
static int is_true(PyObject *question, PyObject *tensor, PyObject *more)
{
    PyObject *answer = PyObject_CallFunctionObjArgs(question, tensor, more, NULL);
    int result = answer ? answer == Py_True : -1;
    Py_XDECREF(answer);
    return result;
}

/* Calls a question that is answered by a number, not negative: -1 after an error. */
static int64_t number_from(PyObject *question, PyObject *object)
{
    PyObject *answer = PyObject_CallFunctionObjArgs(question, object, NULL);
    int64_t result = answer ? (int64_t)PyLong_AsUnsignedLongLong(answer) : -1;
    Py_XDECREF(answer);
    return result;
}

/* Whether the elements lie in memory one after another, by exactly these strides. */
static int is_row_major(const DLTensor *described)
{
    int64_t step = 1, has_one = 0;
    for (int32_t dim = 0; dim < described->ndim; dim++) {
        step *= described->shape[dim];
        has_one |= described->shape[dim] == 1;
    }
    if (step == 0) /* any strides will do, but see `TensorKind.strides` */
        return !has_one || described->ndim == 1;
    step = 1;
    for (int32_t dim = described->ndim - 1; dim >= 0; dim--) {
        if (described->strides[dim] != step)
            return 0;
        step *= described->shape[dim];
    }
    return 1;
}

/* Asks for the number of a kind that was not seen before: an int, or None. */
static PyObject *number_new_kind(const Columns *to, PyObject *dtype, const int64_t *extents, int32_t ndim)
{
    PyObject *shape = PyTuple_New(ndim);
    for (int32_t dim = 0; shape && dim < ndim; dim++) {
        PyObject *extent = PyLong_FromLongLong(extents[dim]);
        if (!extent || PyTuple_SetItem(shape, dim, extent) < 0)
            Py_CLEAR(shape);
    }
    PyObject *number = shape ? PyObject_CallFunctionObjArgs(to->new_kind, dtype, shape, NULL) : NULL;
    Py_XDECREF(shape);
    return number;
}

/* The number of a tensor's kind: its dtype and shape. Only the first line reads what DLPack described, which is the tensor's memory: any
   call of Python may let another thread resize it. */
static int find_kind(const Columns *to, const Rules *rules, PyObject *tensor, const DLTensor *described, int64_t *number)
{
    int64_t key[MOST_DIMS + 1];
    memcpy(key + 1, described->shape, (size_t)described->ndim * sizeof *key);
    PyObject *dtype = PyObject_GetAttr(tensor, rules->dtype);
    if (!dtype)
        return ended();
    key[0] = (int64_t)(intptr_t)dtype; /* every dtype is one object, for ever */
    PyObject *name = PyBytes_FromStringAndSize((const char *)key, (Py_ssize_t)sizeof *key * (described->ndim + 1));
    PyObject *found = name ? PyDict_GetItemWithError(to->kind_of, name) : NULL; /* borrowed */
    Py_XINCREF(found);
    if (!found && name && !PyErr_Occurred()) {
        found = number_new_kind(to, dtype, key + 1, described->ndim);
        if (found && found != Py_None && PyDict_SetItem(to->kind_of, name, found) < 0)
            Py_CLEAR(found);
    }
    Py_XDECREF(name);
    Py_DECREF(dtype);
    if (!found)
        return ended();
    *number = found == Py_None ? -1 : (int64_t)PyLong_AsLongLong(found);
    Py_DECREF(found);
    if (PyErr_Occurred())
        return ended();
    return *number < 0 || *number >= PyByteArray_Size(to->kinds) / (Py_ssize_t)sizeof(Kind) ? ENDED : ADDED;
}

static int add_described(const Columns *to, const Rules *rules, PyObject *tensor, PyObject *id, PyObject *storage, Place place)
{
    const int64_t start = number_from(rules->start, storage);
    if (PyErr_Occurred())
        return ended();
    const int64_t bytes = number_from(rules->size, storage);
    if (PyErr_Occurred())
        return ended();
    Kind kind;
    memcpy(&kind, PyByteArray_AsString(to->kinds) + place.kind * (int64_t)sizeof kind, sizeof kind);
    if (kind.size_bytes && (place.address < start || kind.size_bytes > bytes || place.address - start > bytes - kind.size_bytes))
        return ENDED;
    const int negative = is_true(rules->is_negative, tensor, NULL);
    const int conjugate = kind.is_complex && negative == 0 ? is_true(rules->is_conjugate, tensor, NULL) : 0;
    const int marked = negative == 0 && conjugate == 0 ? is_true(rules->has, tensor, rules->mark) : 0;
    if (negative < 0 || conjugate < 0 || marked < 0)
        return ended();
    if (negative || conjugate || marked)
        return ENDED;
    PyObject *grad = PyObject_GetAttr(tensor, rules->requires_grad);
    if (!grad)
        return ended();
    Py_DECREF(grad);
    const long flag = (grad == Py_True ? 1 : 0) | ((PyObject *)Py_TYPE(tensor) == rules->subtype ? 2 : 0);
    PyObject *number = PyLong_FromSsize_t(PyList_Size(to->objects)), *flags = number && flag ? PyLong_FromLong(flag) : NULL;
    Bounds bounds = {start, kind.size_bytes ? start + bytes : start};
    int failed = !number || (flag && !flags) || PyDict_SetItem(to->number_of, id, number) < 0 || PyList_Append(to->objects, tensor) < 0 ||
                 PyList_Append(to->owners, storage) < 0 || (flags && PyDict_SetItem(to->flags, number, flags) < 0) ||
                 append(to->bounds, &bounds, sizeof bounds) < 0 || append(to->places, &place, sizeof place) < 0;
    Py_XDECREF(number);
    Py_XDECREF(flags);
    return failed ? FAILED : ADDED;
}

static int add_tensor(const Columns *to, const Rules *rules, PyObject *tensor)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != rules->type && type != rules->subtype)
        return ENDED;
    DLTensor described;
    if (rules->dlpack->describe(tensor, &described) != 0)
        return ended();
    if (described.device_type != DLPACK_CPU || described.ndim > MOST_DIMS || !is_row_major(&described))
        return ENDED;
    Place place = {.address = (int64_t)(intptr_t)described.data + (int64_t)described.byte_offset};
    int result = find_kind(to, rules, tensor, &described, &place.kind);
    if (result != ADDED)
        return result;
    PyObject *id = PyLong_FromVoidPtr(tensor);
    int is_known = id ? PyDict_Contains(to->number_of, id) : -1;
    PyObject *storage = is_known == 0 ? PyObject_CallFunctionObjArgs(rules->storage, tensor, NULL) : NULL;
    if (is_known < 0)
        result = FAILED;
    else if (is_known)
        result = ENDED;
    else
        result = storage ? add_described(to, rules, tensor, id, storage, place) : ended();
    Py_XDECREF(storage);
    Py_XDECREF(id);
    return result;
}

PyObject *add_tensors(PyObject *module, PyObject *args)
{
    PyObject *asked, *columns, *items;
    Py_ssize_t position;
    Rules rules;
    Columns to;
    int result = ADDED;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!n", &PyTuple_Type, &asked, &PyTuple_Type, &columns, &PyList_Type, &items, &position) ||
        !PyArg_ParseTuple(asked, "OOOOOOOOOOOO", &rules.capsule, &rules.type, &rules.subtype, &rules.storage, &rules.start, &rules.size,
                          &rules.is_negative, &rules.is_conjugate, &rules.has, &rules.mark, &rules.dtype, &rules.requires_grad) ||
        !PyArg_ParseTuple(columns, "O!O!O!O!O!O!O!O!O", &PyDict_Type, &to.number_of, &PyList_Type, &to.objects, &PyList_Type, &to.owners,
                          &PyDict_Type, &to.flags, &PyDict_Type, &to.kind_of, &PyByteArray_Type, &to.kinds, &PyByteArray_Type, &to.bounds,
                          &PyByteArray_Type, &to.places, &to.new_kind))
        return NULL;
    rules.dlpack = PyCapsule_GetPointer(rules.capsule, "dlpack_exchange_api");
    if (!rules.dlpack) { /* a torch that means something else by it: the caller describes all tensors */
        PyErr_Clear();
        return PyLong_FromSsize_t(position);
    }
    if (rules.dlpack->major != DLPACK_MAJOR || !rules.dlpack->describe)
        return PyLong_FromSsize_t(position);
    for (; position < PyList_Size(items); position++) {
        PyObject *tensor = PyList_GetItem(items, position); /* borrowed */
        if (!tensor)
            return NULL;
        Py_INCREF(tensor);
        result = add_tensor(&to, &rules, tensor);
        Py_DECREF(tensor);
        if (result != ADDED)
            break;
    }
    return result == FAILED ? NULL : PyLong_FromSsize_t(position);
}
