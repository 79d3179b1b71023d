// Program: recording and running, and the output as a buffer.
#include "objects.hpp"

namespace paged::binding {

namespace {

struct ProgramObject {
    PyObject* runtime;
    Program program;
    std::vector<PyObject*> kept;
    int64_t views = 0;
    Py_ssize_t shape[2], strides[2];

    ProgramObject(PyObject* runtime_object, int32_t dtype, int64_t block_size)
        : runtime(Py_NewRef(runtime_object)),
          program(
              *self_of<RuntimeObject>(runtime_object).table, self_of<RuntimeObject>(runtime_object).pool, dtype,
              block_size
          ) {}
    ~ProgramObject() {
        for (PyObject* object : kept) {
            Py_DECREF(object);
        }
        Py_DECREF(runtime);
    }
    ProgramObject(const ProgramObject&) = delete;
    ProgramObject& operator=(const ProgramObject&) = delete;

    void keep(PyObject* object) { kept.push_back(Py_NewRef(object)); }
};

PyObject* program_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
    return guarded<PyObject*>(nullptr, [&] {
        PyObject* runtime;
        int dtype;
        long long block_size;
        if (!PyArg_ParseTuple(arguments, "O!iL", runtime_type, &runtime, &dtype, &block_size)) {
            throw PythonError{};
        }
        return instance(type, new ProgramObject(runtime, dtype, block_size));
    });
}

ProgramObject& recording(PyObject* self) { return self_of<ProgramObject>(self); }

// table, vocab_size, hidden_size
PyObject* record_embedding(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 3);
    ProgramObject& object = recording(self);
    const Memory& table = memory_of(arguments.object(0));
    object.keep(arguments.object(0));
    return PyLong_FromLong(object.program.embedding(
        table.data(), static_cast<int64_t>(table.size()), arguments.integer(1), arguments.integer(2)
    ));
}

// x, residual, weight, eps
PyObject* record_norm(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 4);
    ProgramObject& object = recording(self);
    const Memory& weight = memory_of(arguments.object(2));
    object.keep(arguments.object(2));
    const auto [normed, sum] = object.program.norm(
        static_cast<int>(arguments.integer(0)), static_cast<int>(arguments.integer(1)),
        reinterpret_cast<const float*>(weight.data()), static_cast<int64_t>(weight.size()) / 4,
        static_cast<float>(arguments.real(3))
    );
    return Py_BuildValue("(ii)", normed, sum);
}

// x, weight, out_features, bias, float32_out
PyObject* record_linear(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 5);
    ProgramObject& object = recording(self);
    const Memory& weight = memory_of(arguments.object(1));
    const int64_t out_features = arguments.integer(2);
    const float* bias = floats_of(arguments.object(3), out_features, "bias");
    object.keep(arguments.object(1));
    object.keep(arguments.object(3));
    return PyLong_FromLong(object.program.linear(
        static_cast<int>(arguments.integer(0)), weight.data(), static_cast<int64_t>(weight.size()), out_features, bias,
        arguments.truth(4)
    ));
}

// x, features, float32_out
PyObject* record_allocate(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 3);
    return PyLong_FromLong(recording(self).program.allocate(
        static_cast<int>(arguments.integer(0)), arguments.integer(1), arguments.truth(2)
    ));
}

// x, weight, out_features, bias, out, column
PyObject* record_linear_into(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 6);
    ProgramObject& object = recording(self);
    const Memory& weight = memory_of(arguments.object(1));
    const int64_t out_features = arguments.integer(2);
    const float* bias = floats_of(arguments.object(3), out_features, "bias");
    object.keep(arguments.object(1));
    object.keep(arguments.object(3));
    object.program.linear_into(
        static_cast<int>(arguments.integer(0)), weight.data(), static_cast<int64_t>(weight.size()), out_features, bias,
        static_cast<int>(arguments.integer(4)), arguments.integer(5)
    );
    return none();
}

void keep_weight(ProgramObject& object, const Arguments& arguments, Py_ssize_t first) {
    for (Py_ssize_t i = first; i < first + 4; i++) {
        object.keep(arguments.object(i));
    }
}

// x, row_kind, bias, out (or -1), column, float32_out, a weight's ten arguments
PyObject* record_quantized_linear(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 6 + QuantizedArguments::COUNT);
    ProgramObject& object = recording(self);
    const QuantizedArguments packed(arguments, 6);
    const float* bias = floats_of(arguments.object(2), packed.weight.out_features, "bias");
    const int x = static_cast<int>(arguments.integer(0));
    int out = static_cast<int>(arguments.integer(3));
    const auto kind = static_cast<int32_t>(arguments.integer(1));
    object.keep(arguments.object(2));
    keep_weight(object, arguments, 6);
    if (out >= 0) {
        object.program.quantized_linear_into(x, packed.weight, packed.columns, bias, kind, out, arguments.integer(4));
    } else {
        out = object.program.quantized_linear(x, packed.weight, packed.columns, bias, arguments.truth(5), kind);
    }
    return PyLong_FromLong(out);
}

// hidden_size, a weight's ten arguments
PyObject* record_quantized_embedding(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 1 + QuantizedArguments::COUNT);
    ProgramObject& object = recording(self);
    const QuantizedArguments packed(arguments, 1);
    require(packed.columns == nullptr, "a table's features are in order");
    keep_weight(object, arguments, 1);
    return PyLong_FromLong(object.program.quantized_embedding(packed.weight, arguments.integer(0)));
}

Heads heads_of(const Arguments& arguments, Py_ssize_t first) {
    return {arguments.integer(first), arguments.integer(first + 1), arguments.integer(first + 2)};
}

// kv, key_offset, value_offset, from argument `first` on; keys and values are planes of as many whole blocks as fit
// between.
Cache cache_of(ProgramObject& object, const Arguments& arguments, Py_ssize_t first) {
    const Memory& pool = memory_of(arguments.object(first));
    const int64_t key = arguments.integer(first + 1), value = arguments.integer(first + 2);
    const int64_t plane = value - key;
    require(
        key >= 0 && plane > 0 && value + plane <= static_cast<int64_t>(pool.size()),
        "keys and values do not lie within the pool of " + std::to_string(pool.size()) + " bytes"
    );
    object.keep(arguments.object(first));
    return {pool.data() + key, pool.data() + value, plane, 0};
}

// qkv, num_heads, num_kv_heads, head_dim, cos, sin, q_norm, k_norm, eps, kv, key_offset, value_offset
PyObject* record_rope(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 12);
    ProgramObject& object = recording(self);
    const Heads heads = heads_of(arguments, 1);
    const int64_t half = heads.head_dim / 2;
    require(half >= 1, "head_dim is " + std::to_string(heads.head_dim) + ": an even number");
    const Memory &cos = memory_of(arguments.object(4)), &sin = memory_of(arguments.object(5));
    require(
        cos.size() == sin.size() && cos.size() % static_cast<size_t>(4 * half) == 0,
        "cos and sin are [positions, head_dim / 2]"
    );
    Op angles{OpKind::rope};
    angles.cos = reinterpret_cast<const float*>(cos.data());
    angles.sin = reinterpret_cast<const float*>(sin.data());
    angles.size = static_cast<int64_t>(cos.size()) / (4 * half);
    angles.q_norm = floats_of(arguments.object(6), heads.head_dim, "q_norm");
    angles.k_norm = floats_of(arguments.object(7), heads.head_dim, "k_norm");
    angles.number = static_cast<float>(arguments.real(8));
    for (Py_ssize_t i = 4; i < 8; i++) {
        object.keep(arguments.object(i));
    }
    const Cache cache = cache_of(object, arguments, 9);
    return PyLong_FromLong(object.program.rope(static_cast<int>(arguments.integer(0)), heads, angles, cache));
}

// q, num_heads, num_kv_heads, head_dim, scale, window, kv, key_offset, value_offset
PyObject* record_attention(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 9);
    ProgramObject& object = recording(self);
    const Cache cache = cache_of(object, arguments, 6);
    return PyLong_FromLong(object.program.attention(
        static_cast<int>(arguments.integer(0)), heads_of(arguments, 1), static_cast<float>(arguments.real(4)),
        arguments.integer(5), cache
    ));
}

// gate_up, activation
PyObject* record_gated(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 2);
    return PyLong_FromLong(
        recording(self).program.gated(static_cast<int>(arguments.integer(0)), static_cast<int>(arguments.integer(1)))
    );
}

// x, residual
PyObject* record_add(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 2);
    return PyLong_FromLong(
        recording(self).program.add(static_cast<int>(arguments.integer(0)), static_cast<int>(arguments.integer(1)))
    );
}

// x
PyObject* record_select(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 1);
    return PyLong_FromLong(recording(self).program.select(static_cast<int>(arguments.integer(0))));
}

// output, fuse
PyObject* record_finish(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 2);
    recording(self).program.finish(static_cast<int>(arguments.integer(0)), arguments.truth(1));
    return none();
}

// The arrays of a step: token_ids, positions, slot_mapping, query_start, seq_lens, block_table, logit_rows.
class Step {
public:
    explicit Step(const Arguments& arguments)
        : token_ids_(arguments.object(0), 8, "token_ids"),
          positions_(arguments.object(1), 8, "positions"),
          slots_(arguments.object(2), 8, "slot_mapping"),
          starts_(arguments.object(3), 4, "query_start"),
          lens_(arguments.object(4), 4, "seq_lens"),
          tables_(arguments.object(5), 4, "block_table"),
          logit_rows_(arguments.object(6), 8, "logit_rows") {
        batch.num_tokens = token_ids_.count();
        batch.num_seqs = lens_.count();
        batch.num_logit_rows = logit_rows_.count();
        batch.token_ids = token_ids_.contiguous("token_ids").data<int64_t>();
        batch.positions = positions_.contiguous("positions").at_least(batch.num_tokens, "positions").data<int64_t>();
        batch.slot_mapping =
            slots_.contiguous("slot_mapping").at_least(batch.num_tokens, "slot_mapping").data<int64_t>();
        batch.query_start =
            starts_.contiguous("query_start").at_least(batch.num_seqs + 1, "query_start").data<int32_t>();
        batch.seq_lens = lens_.contiguous("seq_lens").data<int32_t>();
        require(tables_.dimensions() == 2 && tables_.size(0) >= batch.num_seqs, "block_table is [sequences, blocks]");
        batch.block_table = tables_.contiguous("block_table").data<int32_t>();
        batch.table_stride = tables_.size(1);
        batch.logit_rows = logit_rows_.contiguous("logit_rows").data<int64_t>();
    }

    Batch batch{};

private:
    View token_ids_, positions_, slots_, starts_, lens_, tables_, logit_rows_;
};

PyObject* program_run(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Step step(Arguments(values, count, 7));
    ProgramObject& object = self_of<ProgramObject>(self);
    const Busy busy(self_of<RuntimeObject>(object.runtime));
    const WithoutGil unlocked;
    object.program.run(step.batch);
    return nullptr;
}

PyObject* time_calls(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Step step(Arguments(values, count, 7));
    ProgramObject& object = self_of<ProgramObject>(self);
    std::vector<std::pair<const char*, double>> times;
    {
        const Busy busy(self_of<RuntimeObject>(object.runtime));
        const WithoutGil unlocked;
        times = object.program.time_calls(step.batch);
    }
    PyObject* list = checked(PyList_New(0));
    for (const auto& [name, seconds] : times) {
        PyObject* pair = checked(Py_BuildValue("(sd)", name, seconds));
        const int failed = PyList_Append(list, pair);
        Py_DECREF(pair);
        if (failed != 0) {
            Py_DECREF(list);
            throw PythonError{};
        }
    }
    return list;
}

PyObject* describe(PyObject* self, PyObject* const*, Py_ssize_t) {
    const std::string text = self_of<ProgramObject>(self).program.describe();
    return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
}

PyObject* workspace_bytes(PyObject* self, PyObject* const*, Py_ssize_t) {
    return PyLong_FromLongLong(self_of<ProgramObject>(self).program.workspace_bytes());
}

// The output of the last run, [rows, features], as a view that holds its memory.
int program_view(PyObject* self, Py_buffer* view, int flags) {
    return guarded<int>(-1, [&] {
        ProgramObject& object = self_of<ProgramObject>(self);
        require(object.program.output_rows() > 0, "the program has no output yet");
        if ((flags & PyBUF_STRIDES) != PyBUF_STRIDES) {
            PyErr_SetString(PyExc_BufferError, "the output has strides");
            throw PythonError{};
        }
        const Value& value = object.program.output_value();
        const Py_ssize_t size = value.dtype == PAGED_F32 ? 4 : 2;
        object.shape[0] = object.program.output_rows();
        object.shape[1] = value.features;
        object.strides[0] = (value.features + 31) / 32 * 32 * size;
        object.strides[1] = size;
        view->buf = object.program.output();
        view->obj = Py_NewRef(self);
        view->len = object.shape[0] * object.shape[1] * size;
        view->readonly = 1;
        view->itemsize = size;
        view->format = (flags & PyBUF_FORMAT) ? const_cast<char*>(size == 4 ? "f" : "H") : nullptr;
        view->ndim = 2;
        view->shape = object.shape;
        view->strides = object.strides;
        view->suboffsets = nullptr;
        view->internal = nullptr;
        object.views++;
        object.program.hold_output(true);
        return 0;
    });
}

void program_release(PyObject* self, Py_buffer*) {
    ProgramObject& object = self_of<ProgramObject>(self);
    if (--object.views == 0) {
        object.program.hold_output(false);
    }
}

PyMethodDef program_methods[] = {
    {"embedding", fast<record_embedding>(), METH_FASTCALL, nullptr},
    {"norm", fast<record_norm>(), METH_FASTCALL, nullptr},
    {"linear", fast<record_linear>(), METH_FASTCALL, nullptr},
    {"allocate", fast<record_allocate>(), METH_FASTCALL, nullptr},
    {"linear_into", fast<record_linear_into>(), METH_FASTCALL, nullptr},
    {"quantized_linear", fast<record_quantized_linear>(), METH_FASTCALL, nullptr},
    {"quantized_embedding", fast<record_quantized_embedding>(), METH_FASTCALL, nullptr},
    {"rope", fast<record_rope>(), METH_FASTCALL, nullptr},
    {"attention", fast<record_attention>(), METH_FASTCALL, nullptr},
    {"gated", fast<record_gated>(), METH_FASTCALL, nullptr},
    {"add", fast<record_add>(), METH_FASTCALL, nullptr},
    {"select", fast<record_select>(), METH_FASTCALL, nullptr},
    {"finish", fast<record_finish>(), METH_FASTCALL, nullptr},
    {"run", fast<then_none<program_run>>(), METH_FASTCALL, nullptr},
    {"time_calls", fast<time_calls>(), METH_FASTCALL, nullptr},
    {"describe", fast<describe>(), METH_FASTCALL, nullptr},
    {"workspace_bytes", fast<workspace_bytes>(), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

ProgramParts program_of(PyObject* object) {
    if (!PyObject_TypeCheck(object, program_type)) {
        PyErr_SetString(PyExc_TypeError, "a Program is expected");
        throw PythonError{};
    }
    ProgramObject& self = self_of<ProgramObject>(object);
    return {self.program, self_of<RuntimeObject>(self.runtime)};
}

PyTypeObject* make_program_type() {
    PyType_Slot program_slots[] = {
        {Py_tp_new, slot(program_new)},
        {Py_tp_dealloc, slot(deallocate<ProgramObject>)},
        {Py_tp_methods, program_methods},
        {Py_bf_getbuffer, slot(program_view)},
        {Py_bf_releasebuffer, slot(program_release)},
        {0, nullptr},
    };
    return make_type("paged_kernels._native.Program", sizeof(Instance<ProgramObject>), program_slots);
}

}  // namespace paged::binding
