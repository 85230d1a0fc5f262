/* The one function of `_tensors.c`. Include Python.h first. */

#ifndef TENSORSTORE_CK_TENSORS_H
#define TENSORSTORE_CK_TENSORS_H

PyObject *add_tensors(PyObject *module, PyObject *args);

#endif
