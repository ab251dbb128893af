// The Python module sdm.native._core (stable ABI).
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", "CPU kernels of sparse-delta-memory", -1, nullptr};

PyMODINIT_FUNC PyInit__core() { return PyModule_Create(&definition); }
