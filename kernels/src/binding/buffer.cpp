// Buffer: memory that the kernels and numpy share.
#include <memory>

#include "objects.hpp"

namespace paged::binding {

namespace {

PyObject* buffer_new(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
    return guarded<PyObject*>(nullptr, [&] {
        static const char* names[] = {"num_bytes", "huge", nullptr};
        Py_ssize_t bytes;
        int huge = 1;
        if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "n|p", const_cast<char**>(names), &bytes, &huge)) {
            throw PythonError{};
        }
        require(bytes >= 0, "a buffer of " + std::to_string(bytes) + " bytes");
        auto value = std::make_unique<BufferObject>(BufferObject{Memory(static_cast<size_t>(bytes), huge != 0)});
        return instance(type, value.release());
    });
}

int buffer_view(PyObject* self, Py_buffer* view, int flags) {
    Memory& memory = self_of<BufferObject>(self).memory;
    return PyBuffer_FillInfo(view, self, memory.data(), static_cast<Py_ssize_t>(memory.size()), 0, flags);
}

PyObject* buffer_address(PyObject* self, void*) {
    return PyLong_FromVoidPtr(self_of<BufferObject>(self).memory.data());
}

PyObject* buffer_nbytes(PyObject* self, void*) { return PyLong_FromSize_t(self_of<BufferObject>(self).memory.size()); }

PyGetSetDef buffer_members[] = {
    {"address", buffer_address, nullptr, nullptr, nullptr},
    {"nbytes", buffer_nbytes, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

}  // namespace

Memory& memory_of(PyObject* object) {
    if (!PyObject_TypeCheck(object, buffer_type)) {
        PyErr_SetString(PyExc_TypeError, "a Buffer is expected");
        throw PythonError{};
    }
    return self_of<BufferObject>(object).memory;
}

const float* floats_of(PyObject* object, int64_t count, const char* name) {
    if (object == Py_None) {
        return nullptr;
    }
    Memory& memory = memory_of(object);
    require(
        static_cast<int64_t>(memory.size()) >= 4 * count,
        std::string(name) + " has " + std::to_string(memory.size()) + " bytes, expected " + std::to_string(4 * count)
    );
    return reinterpret_cast<const float*>(memory.data());
}

PyTypeObject* make_buffer_type() {
    PyType_Slot buffer_slots[] = {
        {Py_tp_new, slot(buffer_new)},
        {Py_tp_dealloc, slot(deallocate<BufferObject>)},
        {Py_tp_getset, buffer_members},
        {Py_bf_getbuffer, slot(buffer_view)},
        {0, nullptr},
    };
    return make_type("paged_kernels._native.Buffer", sizeof(Instance<BufferObject>), buffer_slots);
}

}  // namespace paged::binding
