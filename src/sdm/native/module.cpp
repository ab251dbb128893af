// The Python module sdm.native._core (stable ABI).
#include "binding.h"
#include "gated_delta_rule/rule.h"
#include "kernel_table.h"
#include "product_key/topk.h"
#include "sparse_delta_rule/python.h"

static PyMethodDef methods[] = {
    SDM_METHOD(isa_name),
    SDM_METHOD(has_openmp),
    SDM_METHOD(gated_delta_forward),
    SDM_METHOD(gated_delta_backward),
    SDM_METHOD(product_key_topk),
    SDM_METHOD(product_key_topk_backward),
    SDM_METHOD(sparse_delta_rule_forward),
    SDM_METHOD(sparse_delta_rule_backward),
    SDM_METHOD(sparse_delta_rule_saved_rows),
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "CPU kernels of sparse-delta-memory", -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__core() { return PyModule_Create(&definition); }
