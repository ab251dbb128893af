// The Python module sdm.native._core (stable ABI).
#include "attention/window_step.h"
#include "binding.h"
#include "gated_delta_rule/rule.h"
#include "kernel_table.h"
#include "linear/linear.h"
#include "product_key/topk.h"
#include "sparse_delta_map/map.h"
#include "sparse_delta_rule/call.h"

// What __init__.py expects to find: the two change together when a function or a field does.
constexpr int kInterface = 6;

static PyMethodDef methods[] = {
    SDM_FACT(isa_name),
    SDM_FACT(has_openmp),
    SDM_METHOD(gated_delta_forward, GatedDeltaForward),
    SDM_METHOD(gated_delta_backward, GatedDeltaBackward),
    SDM_METHOD(gated_mlp, GatedMLP),
    SDM_METHOD(linear, LinearCall),
    SDM_METHOD(linear_group, LinearGroup),
    SDM_METHOD(product_key_topk, ProductKeyForward),
    SDM_METHOD(product_key_topk_backward, ProductKeyBackward),
    SDM_METHOD(rms_norm, RMSNorm),
    SDM_METHOD(sparse_delta_map, SparseDeltaMap),
    SDM_METHOD(sparse_delta_rule_forward, SparseDeltaForward),
    SDM_METHOD(sparse_delta_rule_backward, SparseDeltaBackward),
    SDM_METHOD(sparse_delta_rule_saved_rows, SparseDeltaPlan),
    SDM_METHOD(window_step, WindowStep),
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "CPU kernels of sparse-delta-memory", -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__core() {
  PyObject* module = PyModule_Create(&definition);
  if (module) PyModule_AddIntConstant(module, "INTERFACE", kInterface);
  return module;
}
