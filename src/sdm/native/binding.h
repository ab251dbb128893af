// Turns a C++ function over a struct of pointers and numbers into a Python function over the names of its fields.
//
//     template <class Real>
//     struct Scaling {
//       Real* data;
//       int64_t count;
//       double factor;
//       template <class Visit>
//       void each_field(const Visit& field) { field("data", data), field("count", count), field("factor", factor); }
//     };
//     template <class Real>
//     void scale(const Scaling<Real>& call);
//     PyMethodDef methods[] = {SDM_METHOD(scale, Scaling), {nullptr, nullptr, 0, nullptr}};
//
// Python calls scale(False, data=tensor.data_ptr(), count=tensor.numel(), factor=2.0); the first argument says whether
// Real is double. All fields are named, in any order. A pointer is an integer (None or 0: null). The GIL is released
// around the call. std::out_of_range becomes an IndexError, std::invalid_argument a ValueError, std::bad_alloc a
// MemoryError.
#pragma once

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <new>
#include <stdexcept>
#include <type_traits>

namespace sdm {

template <class T>
T from_python(PyObject* object) {
  if constexpr (std::is_pointer_v<T>) {
    return object == Py_None ? nullptr : static_cast<T>(PyLong_AsVoidPtr(object));
  } else if constexpr (std::is_same_v<T, bool>) {
    return PyObject_IsTrue(object) == 1;
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(PyFloat_AsDouble(object));
  } else {
    static_assert(std::is_integral_v<T>, "a field is a pointer, an integer or a float");
    return static_cast<T>(PyLong_AsLongLong(object));
  }
}

inline PyObject* to_python(int64_t value) { return PyLong_FromLongLong(value); }
inline PyObject* to_python(int value) { return PyLong_FromLong(value); }
inline PyObject* to_python(const char* value) { return PyUnicode_FromString(value); }

class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() { PyEval_RestoreThread(state_); }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

// Where `name` is among the names of a call, or -1.
inline Py_ssize_t position(PyObject* names, Py_ssize_t count, PyObject* name) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PyUnicode_Compare(PyTuple_GetItem(names, i), name) == 0) return i;
  }
  return -1;
}

// Fills the fields of a call from the values `args` of the arguments `names`. False, with a Python error, unless each
// field is there and nothing else.
template <class Call>
bool read_fields(const char* function, Call& call, PyObject* const* args, PyObject* names) {
  constexpr Py_ssize_t kMostFields = 64;
  static PyObject* known[kMostFields] = {};  // interned: the names of a call in Python code are these same objects
  const Py_ssize_t given = names ? PyTuple_Size(names) : 0;
  Py_ssize_t count = 0;
  call.each_field([&](const char* name, auto& field) {
    PyObject*& interned = known[count];
    if (!interned) interned = PyUnicode_InternFromString(name);
    const bool in_order = count < given && PyTuple_GetItem(names, count) == interned;
    const Py_ssize_t at = in_order ? count : position(names, given, interned);
    ++count;
    if (at < 0) {
      if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "%s needs the argument %s", function, name);
    } else if (!PyErr_Occurred()) {
      field = from_python<std::remove_reference_t<decltype(field)>>(args[at]);
    }
  });
  if (PyErr_Occurred()) return false;
  if (given == count) return true;
  // All fields are there, and Python takes no name twice: so one is unknown.
  for (Py_ssize_t i = 0; i < given; ++i) {
    PyObject* name = PyTuple_GetItem(names, i);
    bool is_known = false;
    for (Py_ssize_t k = 0; k < count; ++k) is_known |= PyUnicode_Compare(name, known[k]) == 0;
    if (!is_known) PyErr_Format(PyExc_TypeError, "%s has no argument %U", function, name);
  }
  return false;
}

template <class Run>
PyObject* run_released(const Run& run) {
  try {
    if constexpr (std::is_void_v<decltype(run())>) {
      ReleasedGil released;
      run();
    } else {
      const auto result = [&] {
        ReleasedGil released;
        return run();
      }();
      return to_python(result);
    }
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
    return nullptr;
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_INCREF(Py_None);
  return Py_None;
}

template <template <class> class Call, class Function>
PyObject* call(const char* name, const Function& function, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  if (count != 1) {
    PyErr_Format(PyExc_TypeError, "%s takes one argument without a name, whether its numbers are float64", name);
    return nullptr;
  }
  const auto run = [&](auto fields) -> PyObject* {
    if (!read_fields(name, fields, args + 1, names)) return nullptr;
    return run_released([&] { return function(fields); });
  };
  return PyObject_IsTrue(args[0]) == 1 ? run(Call<double>{}) : run(Call<float>{});
}

// The detour over void(*)() keeps compilers quiet: methods of all kinds are stored as PyCFunction by convention.
using FieldFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);
inline PyCFunction as_method(FieldFunction function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace sdm

#define SDM_METHOD(function, Call)                                                                          \
  {#function, sdm::as_method([](PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names) {      \
     return sdm::call<sdm::Call>(#function, [](const auto& fields) { return sdm::function(fields); }, args, \
                                 count, names);                                                             \
   }),                                                                                                      \
   METH_FASTCALL | METH_KEYWORDS, nullptr}
// A function that takes nothing.
#define SDM_FACT(function) \
  {#function, [](PyObject*, PyObject*) { return sdm::run_released(&sdm::function); }, METH_NOARGS, nullptr}
