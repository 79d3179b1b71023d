// The module paged_kernels._native: Buffer, Runtime, Program, Slots. See _native.pyi for the functions' meaning.
#include "objects.hpp"

namespace paged::binding {

PyObject* error_type = nullptr;
PyTypeObject *buffer_type = nullptr, *runtime_type = nullptr, *program_type = nullptr, *slots_type = nullptr;

namespace {

PyObject* isas(PyObject*, PyObject* const*, Py_ssize_t) {
    const std::vector<std::string> names = available_isas();
    PyObject* tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(names.size())));
    for (size_t i = 0; i < names.size(); i++) {
        PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), checked(PyUnicode_FromString(names[i].c_str())));
    }
    return tuple;
}

void add_types(PyObject* module) {
    buffer_type = make_buffer_type();
    runtime_type = make_runtime_type();
    program_type = make_program_type();
    slots_type = make_slots_type();
    error_type = checked(PyErr_NewException("paged_kernels._native.Error", PyExc_ValueError, nullptr));
    for (auto [name, object] :
         {std::pair<const char*, PyObject*>{"Buffer", reinterpret_cast<PyObject*>(buffer_type)},
          {"Runtime", reinterpret_cast<PyObject*>(runtime_type)},
          {"Program", reinterpret_cast<PyObject*>(program_type)},
          {"Slots", reinterpret_cast<PyObject*>(slots_type)},
          {"Error", error_type}}) {
        if (PyModule_AddObjectRef(module, name, object) < 0) {
            throw PythonError{};
        }
    }
    if (PyModule_AddIntConstant(module, "ABI_VERSION", PAGED_ABI_VERSION) < 0) {
        throw PythonError{};
    }
}

}  // namespace
}  // namespace paged::binding

PyMODINIT_FUNC PyInit__native() {
    using namespace paged::binding;
    static PyMethodDef functions[] = {
        {"available_isas", fast<isas>(), METH_FASTCALL, nullptr},
        {"gptq_losses", fast<gptq_losses_of>(), METH_FASTCALL, nullptr},
        {"gptq_strip", fast<gptq_strip_of>(), METH_FASTCALL, nullptr},
        {nullptr, nullptr, 0, nullptr},
    };
    static PyModuleDef definition{
        PyModuleDef_HEAD_INIT, "_native", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr,
    };
    return guarded<PyObject*>(nullptr, [&] {
        PyObject* module = checked(PyModule_Create(&definition));
        add_types(module);
        return module;
    });
}
