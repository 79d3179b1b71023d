// The module's kinds of objects, each with its file: what they hold and how the others get at it.
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "../core/isa.hpp"
#include "../core/memory.hpp"
#include "../core/pool.hpp"
#include "../core/program.hpp"
#include "python.hpp"

namespace paged::binding {

extern PyTypeObject *buffer_type, *runtime_type, *program_type, *slots_type;

PyTypeObject* make_buffer_type();
PyTypeObject* make_runtime_type();
PyTypeObject* make_program_type();
PyTypeObject* make_slots_type();

struct BufferObject {
    Memory memory;
};

// The memory of a Buffer; anything else is refused.
Memory& memory_of(PyObject* object);

// The floats of a Buffer, at least `count`; None gives null.
const float* floats_of(PyObject* object, int64_t count, const char* name);

struct RuntimeObject {
    const PagedTable* table;
    Pool pool;
    std::atomic<bool> busy{false};

    RuntimeObject(int threads, std::vector<int> cpus, const std::string& isa)
        : table(load_table(isa)), pool(threads, std::move(cpus)) {}

    void run(const PagedKernel& kernel, const void* params) {
        const Call call{&kernel, params};
        pool.run(&call, 1);
    }
};

// The program of a Program and the runtime that it was recorded for.
struct ProgramParts {
    Program& program;
    RuntimeObject& runtime;
};
ProgramParts program_of(PyObject* object);

// A packed quantized weight from ten arguments, checked: codes, scales, zeros, columns (or None), out_features, depth,
// group_size, bits, half_scales, float_offsets.
struct QuantizedArguments {
    static constexpr Py_ssize_t COUNT = 10;
    QuantizedArguments(const Arguments& arguments, Py_ssize_t first);

    PagedQuantizedWeight weight;
    const int32_t* columns;
};

// Runtime.pack_quantized, which is in quantized.cpp.
PyObject* pack_quantized(PyObject* self, PyObject* const* values, Py_ssize_t count);

// gptq_strip and gptq_losses, which are in gptq.cpp.
PyObject* gptq_strip_of(PyObject* self, PyObject* const* values, Py_ssize_t count);
PyObject* gptq_losses_of(PyObject* self, PyObject* const* values, Py_ssize_t count);

// One caller at a time: a second one is told, it does not wait.
class Busy {
public:
    explicit Busy(RuntimeObject& runtime) : runtime_(runtime) {
        require(!runtime.busy.exchange(true), "the runtime is at work for another thread: one thread at a time");
    }
    ~Busy() { runtime_.busy.store(false); }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

private:
    RuntimeObject& runtime_;
};

}  // namespace paged::binding
