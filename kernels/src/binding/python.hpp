// The little of Python that the binding needs, on the limited API (one module for 3.11 and newer), with C++ errors.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <cstdint>
#include <string>

#include "../core/error.hpp"

namespace paged::binding {

// A Python exception is set already.
struct PythonError {};

extern PyObject* error_type;

// Runs f; C++ errors become Python's, and the result `failed`.
template <class R, class F>
R guarded(R failed, F&& f) {
    try {
        return f();
    } catch (const PythonError&) {
    } catch (const Error& error) {
        PyErr_SetString(error_type, error.what());
    } catch (const Broken& error) {
        PyErr_SetString(PyExc_AssertionError, error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return failed;
}

inline PyObject* checked(PyObject* object) {
    if (object == nullptr) {
        throw PythonError{};
    }
    return object;
}

class WithoutGil {
public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() { PyEval_RestoreThread(state_); }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

private:
    PyThreadState* state_;
};

// Arguments of a fast call.
class Arguments {
public:
    Arguments(PyObject* const* values, Py_ssize_t count, Py_ssize_t expected) : values_(values) {
        if (count != expected) {
            PyErr_Format(PyExc_TypeError, "%zd arguments, expected %zd", count, expected);
            throw PythonError{};
        }
    }

    PyObject* object(Py_ssize_t i) const { return values_[i]; }

    int64_t integer(Py_ssize_t i) const {
        const long long value = PyLong_AsLongLong(values_[i]);
        if (value == -1 && PyErr_Occurred()) {
            throw PythonError{};
        }
        return value;
    }

    double real(Py_ssize_t i) const {
        const double value = PyFloat_AsDouble(values_[i]);
        if (value == -1.0 && PyErr_Occurred()) {
            throw PythonError{};
        }
        return value;
    }

    bool truth(Py_ssize_t i) const {
        const int value = PyObject_IsTrue(values_[i]);
        if (value < 0) {
            throw PythonError{};
        }
        return value != 0;
    }

private:
    PyObject* const* values_;
};

// A view on an array's memory. Element size 0: any.
class View {
public:
    View(PyObject* object, Py_ssize_t item_bytes, const char* name, bool writable = false) {
        const int flags = PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(object, &view_, flags) < 0) {
            throw PythonError{};
        }
        if (item_bytes != 0 && view_.itemsize != item_bytes) {
            const std::string message = std::string(name) + " has elements of " + std::to_string(view_.itemsize) +
                                        " bytes, expected " + std::to_string(item_bytes);
            PyBuffer_Release(&view_);
            throw Error(message);
        }
    }
    ~View() { PyBuffer_Release(&view_); }
    View(const View&) = delete;
    View& operator=(const View&) = delete;

    template <class T>
    T* data() const {
        return static_cast<T*>(view_.buf);
    }
    int64_t bytes() const { return view_.len; }
    int64_t count() const { return view_.itemsize == 0 ? 0 : view_.len / view_.itemsize; }
    int dimensions() const { return view_.ndim; }
    int64_t size(int dimension) const { return view_.shape[dimension]; }
    int64_t stride_bytes(int dimension) const { return view_.strides[dimension]; }

    // Row-major without gaps.
    View& contiguous(const char* name) {
        require(PyBuffer_IsContiguous(&view_, 'C') == 1, std::string(name) + " is not contiguous");
        return *this;
    }

    View& at_least(int64_t wanted, const char* name) {
        require(
            count() >= wanted, std::string(name) + " has " + std::to_string(count()) + " elements, at least " +
                                   std::to_string(wanted) + " are needed"
        );
        return *this;
    }

private:
    Py_buffer view_;
};

// Memory of an instance beyond the object's head. Limited API: no basicsize arithmetic by hand.
template <class T>
struct Instance {
    PyObject_HEAD T* self;
};

template <class T>
T& self_of(PyObject* object) {
    return *reinterpret_cast<Instance<T>*>(object)->self;
}

template <class T>
void deallocate(PyObject* object) {
    delete reinterpret_cast<Instance<T>*>(object)->self;
    PyTypeObject* type = Py_TYPE(object);
    auto free = reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free));
    free(object);
    Py_DECREF(type);
}

// A new instance that takes over `value`.
template <class T>
PyObject* instance(PyTypeObject* type, T* value) {
    auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    PyObject* object = allocate(type, 0);
    if (object == nullptr) {
        delete value;
        throw PythonError{};
    }
    reinterpret_cast<Instance<T>*>(object)->self = value;
    return object;
}

// A method whose implementation may throw.
template <PyObject* (*F)(PyObject*, PyObject* const*, Py_ssize_t)>
PyObject* method(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    return guarded<PyObject*>(nullptr, [&] { return F(self, values, count); });
}

template <PyObject* (*F)(PyObject*, PyObject* const*, Py_ssize_t)>
PyCFunction fast() {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&method<F>));
}

// For functions that return null on success because the GIL is still released then.
template <PyObject* (*F)(PyObject*, PyObject* const*, Py_ssize_t)>
PyObject* then_none(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    F(self, values, count);
    return Py_NewRef(Py_None);
}

template <class F>
void* slot(F* function) {
    return reinterpret_cast<void*>(function);
}

inline PyTypeObject* make_type(const char* name, int size, PyType_Slot* slots) {
    PyType_Spec spec{name, size, 0, Py_TPFLAGS_DEFAULT, slots};
    return reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(&spec)));
}

inline PyObject* none() { return Py_NewRef(Py_None); }

}  // namespace paged::binding
