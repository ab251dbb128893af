// Turns a C++ function over pointers and numbers into a Python function over integers and floats.
//
//     void scale(float* data, int64_t count, double factor, int threads);
//     PyMethodDef methods[] = {SDM_METHOD(scale), {nullptr, nullptr, 0, nullptr}};
//
// Python calls scale(tensor.data_ptr(), tensor.numel(), 2.0, torch.get_num_threads()). A pointer is an integer
// (None or 0: null). The GIL is released around the call. std::out_of_range becomes an IndexError,
// std::invalid_argument a ValueError, std::bad_alloc a MemoryError.
#pragma once

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

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
    static_assert(std::is_integral_v<T>, "a bound function takes pointers, integers and floats");
    return static_cast<T>(PyLong_AsLongLong(object));
  }
}

inline PyObject* to_python(double value) { return PyFloat_FromDouble(value); }
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

template <class Result, class... Args, std::size_t... I>
PyObject* invoke(Result (*function)(Args...), PyObject* const* args, std::index_sequence<I...>) {
  std::tuple<Args...> values{from_python<Args>(args[I])...};
  if (PyErr_Occurred()) return nullptr;
  try {
    if constexpr (std::is_void_v<Result>) {
      ReleasedGil released;
      std::apply(function, values);
    } else {
      auto result = [&] {
        ReleasedGil released;
        return std::apply(function, values);
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

template <class Result, class... Args>
PyObject* call(const char* name, Result (*function)(Args...), PyObject* const* args, Py_ssize_t count) {
  if (count != static_cast<Py_ssize_t>(sizeof...(Args))) {
    const std::string message = std::string(name) + " takes " + std::to_string(sizeof...(Args)) +
                                " arguments, not " + std::to_string(count);
    PyErr_SetString(PyExc_TypeError, message.c_str());
    return nullptr;
  }
  return invoke(function, args, std::index_sequence_for<Args...>{});
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

// The detour over void(*)() keeps compilers quiet: METH_FASTCALL functions are stored as PyCFunction by convention.
inline PyCFunction as_method(FastFunction function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace sdm

#define SDM_METHOD_AS(name, ...)                                                     \
  {name, sdm::as_method([](PyObject*, PyObject* const* args, Py_ssize_t count) {     \
     return sdm::call(name, &__VA_ARGS__, args, count);                              \
   }),                                                                               \
   METH_FASTCALL, nullptr}
#define SDM_METHOD(function) SDM_METHOD_AS(#function, sdm::function)
