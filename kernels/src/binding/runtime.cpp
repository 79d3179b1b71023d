// Runtime: a variant and its threads; packing, copying, sampling and single kernels.
#include <cstring>
#include <optional>

#include "objects.hpp"

namespace paged::binding {

namespace {

PyObject* runtime_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
    return guarded<PyObject*>(nullptr, [&] {
        int threads;
        PyObject* list;
        const char* isa;
        if (!PyArg_ParseTuple(arguments, "iOs", &threads, &list, &isa)) {
            throw PythonError{};
        }
        std::vector<int> cpus;
        const Py_ssize_t count = PySequence_Size(list);
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject* item = checked(PySequence_GetItem(list, i));
            cpus.push_back(static_cast<int>(PyLong_AsLong(item)));
            Py_DECREF(item);
        }
        if (PyErr_Occurred()) {
            throw PythonError{};
        }
        return instance(type, new RuntimeObject(threads, std::move(cpus), isa));
    });
}

PyObject* runtime_isa(PyObject* self, void*) { return PyUnicode_FromString(self_of<RuntimeObject>(self).table->isa); }

PyObject* runtime_threads(PyObject* self, void*) {
    return PyLong_FromLong(self_of<RuntimeObject>(self).pool.threads());
}

PyObject* bind_caller(PyObject* self, PyObject* const*, Py_ssize_t) {
    self_of<RuntimeObject>(self).pool.bind_caller();
    return none();
}

// Bytes of a stored row.
int64_t stored_bytes(int64_t dtype, int64_t in_features) {
    require(dtype >= PAGED_F32 && dtype <= PAGED_Q8_0, "a stored dtype is " + std::to_string(dtype));
    const int64_t elements[] = {1, 1, 1, 1, 32, 32, 32}, bytes[] = {4, 2, 2, 8, 18, 20, 34};
    require(
        in_features % elements[dtype] == 0,
        std::to_string(in_features) + " features are no whole blocks of " + std::to_string(elements[dtype])
    );
    return in_features / elements[dtype] * bytes[dtype];
}

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// packed, dtype, row_offset, rows, in_features, source, source_dtype, order
PyObject* pack(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 8);
    Memory& packed = memory_of(arguments.object(0));
    PagedPack params{};
    params.packed = packed.data();
    params.dtype = static_cast<int32_t>(arguments.integer(1));
    params.row_offset = arguments.integer(2);
    params.rows = arguments.integer(3);
    params.in_features = arguments.integer(4);
    View source(arguments.object(5), 0, "source");
    source.contiguous("source");
    params.source = source.data<void>();
    params.source_dtype = static_cast<int32_t>(arguments.integer(6));
    require(params.dtype == PAGED_F32 || params.dtype == PAGED_BF16, "weights are packed as float32 or bfloat16");
    require(params.rows >= 0 && params.row_offset >= 0 && params.in_features >= 1, "negative sizes");
    const int64_t needed = round_up(params.row_offset + params.rows, PAGED_BLOCK_N) *
                           round_up(params.in_features, PAGED_BLOCK_K) * (params.dtype == PAGED_F32 ? 4 : 2);
    require(
        static_cast<int64_t>(packed.size()) >= needed,
        "the packed weight has " + std::to_string(packed.size()) + " bytes, " + std::to_string(needed) + " are needed"
    );
    const int64_t stored = params.rows * stored_bytes(params.source_dtype, params.in_features);
    require(
        source.bytes() == stored,
        "the stored tensor has " + std::to_string(source.bytes()) + " bytes, expected " + std::to_string(stored)
    );
    std::optional<View> order;
    if (arguments.object(7) != Py_None) {
        order.emplace(arguments.object(7), 8, "order");
        order->contiguous("order").at_least(params.rows, "order");
        params.order = order->data<int64_t>();
        for (int64_t i = 0; i < params.rows; i++) {
            require(
                params.order[i] >= 0 && params.order[i] < params.rows, "an order of rows names one that is not there"
            );
        }
    }
    RuntimeObject& runtime = self_of<RuntimeObject>(self);
    const Busy busy(runtime);
    const WithoutGil unlocked;
    runtime.run(runtime.table->pack, &params);
    return nullptr;
}

// pool, planes, num_blocks, block_bytes, copies [n, 2] int64
PyObject* copy_blocks(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 5);
    Memory& pool = memory_of(arguments.object(0));
    const int64_t planes = arguments.integer(1), blocks = arguments.integer(2), bytes = arguments.integer(3);
    View copies(arguments.object(4), 8, "copies");
    copies.contiguous("copies");
    const int64_t* pairs = copies.data<int64_t>();
    const int64_t num_copies = copies.count() / 2;
    require(
        planes >= 0 && blocks >= 0 && bytes >= 0 && planes * blocks * bytes <= static_cast<int64_t>(pool.size()),
        "the pool has " + std::to_string(pool.size()) + " bytes, fewer than its blocks"
    );
    for (int64_t i = 0; i < 2 * num_copies; i++) {
        require(
            pairs[i] >= 0 && pairs[i] < blocks, "block " + std::to_string(pairs[i]) + " of " + std::to_string(blocks)
        );
    }
    const Busy busy(self_of<RuntimeObject>(self));
    const WithoutGil unlocked;
    const auto size = static_cast<size_t>(bytes);
    std::vector<char> room(static_cast<size_t>(num_copies) * size);
    for (int64_t plane = 0; plane < planes; plane++) {
        char* base = pool.data() + plane * blocks * bytes;
        for (int64_t i = 0; i < num_copies; i++) {
            std::memcpy(room.data() + static_cast<size_t>(i) * size, base + pairs[2 * i] * bytes, size);
        }
        for (int64_t i = 0; i < num_copies; i++) {
            std::memcpy(base + pairs[2 * i + 1] * bytes, room.data() + static_cast<size_t>(i) * size, size);
        }
    }
    return nullptr;
}

struct LogitRows {
    const float* data;
    int64_t rows, columns, stride;
};

LogitRows logit_rows(const View& view) {
    require(view.dimensions() == 2 && (view.size(1) <= 1 || view.stride_bytes(1) == 4), "logits are rows of floats");
    return {view.data<float>(), view.size(0), view.size(1), view.stride_bytes(0) / 4};
}

void check_vocabulary(int64_t size) {
    require(
        size >= 1 && size <= PAGED_MAX_VOCABULARY,
        "a vocabulary of " + std::to_string(size) + " tokens: from 1 to " + std::to_string(PAGED_MAX_VOCABULARY)
    );
}

// logits, rows, tokens, faults, logprobs, ranks, top_ids, top
PyObject* sample(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 8);
    View logits(arguments.object(0), 4, "logits");
    View rows(arguments.object(1), sizeof(PagedSampleRow), "rows");
    const LogitRows from = logit_rows(logits);
    check_vocabulary(from.columns);
    rows.contiguous("rows");
    const int64_t num_rows = rows.count();
    View tokens(arguments.object(2), 8, "tokens", true), faults(arguments.object(3), 8, "faults", true);
    View logprobs(arguments.object(4), 8, "logprobs", true), ranks(arguments.object(5), 8, "ranks", true);
    View top_ids(arguments.object(6), 8, "top_ids", true), top(arguments.object(7), 8, "top", true);
    require(
        top_ids.dimensions() == 2 && top.dimensions() == 2 && top_ids.size(1) == top.size(1),
        "top_ids and top are [rows, max_top]"
    );
    PagedSample params{};
    params.logits = from.data;
    params.rows = rows.data<PagedSampleRow>();
    params.num_rows = num_rows;
    params.vocab_size = from.columns;
    params.logits_stride = from.stride;
    params.max_top = top.size(1);
    params.tokens = tokens.contiguous("tokens").at_least(num_rows, "tokens").data<int64_t>();
    params.faults = faults.contiguous("faults").at_least(num_rows, "faults").data<int64_t>();
    params.logprobs = logprobs.contiguous("logprobs").at_least(num_rows, "logprobs").data<double>();
    params.ranks = ranks.contiguous("ranks").at_least(num_rows, "ranks").data<int64_t>();
    params.top_ids = top_ids.contiguous("top_ids").at_least(num_rows * params.max_top, "top_ids").data<int64_t>();
    params.top = top.contiguous("top").at_least(num_rows * params.max_top, "top").data<double>();
    for (int64_t i = 0; i < num_rows; i++) {
        const PagedSampleRow& row = params.rows[i];
        require(
            row.logit_row >= 0 && row.logit_row < from.rows,
            "row " + std::to_string(row.logit_row) + " of " + std::to_string(from.rows) + " rows of logits"
        );
        require(
            row.num_top <= params.max_top,
            std::to_string(row.num_top) + " alternatives, the output holds " + std::to_string(params.max_top)
        );
    }
    RuntimeObject& runtime = self_of<RuntimeObject>(self);
    const Busy busy(runtime);
    const WithoutGil unlocked;
    runtime.run(runtime.table->sample, &params);
    return nullptr;
}

// logits, logit_rows, tokens, num_top, logprobs, ranks, top_ids, top
PyObject* logprobs(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 8);
    View logits(arguments.object(0), 4, "logits");
    const LogitRows from = logit_rows(logits);
    check_vocabulary(from.columns);
    View rows(arguments.object(1), 8, "logit_rows"), tokens(arguments.object(2), 8, "tokens");
    View num_top(arguments.object(3), 8, "num_top");
    View out(arguments.object(4), 8, "logprobs", true), ranks(arguments.object(5), 8, "ranks", true);
    View top_ids(arguments.object(6), 8, "top_ids", true), top(arguments.object(7), 8, "top", true);
    const int64_t num_rows = rows.count();
    require(
        top_ids.dimensions() == 2 && top.dimensions() == 2 && top_ids.size(1) == top.size(1),
        "top_ids and top are [rows, max_top]"
    );
    PagedLogprobs params{};
    params.logits = from.data;
    params.logit_rows = rows.contiguous("logit_rows").data<int64_t>();
    params.tokens = tokens.contiguous("tokens").at_least(num_rows, "tokens").data<int64_t>();
    params.num_top = num_top.contiguous("num_top").at_least(num_rows, "num_top").data<int64_t>();
    params.num_rows = num_rows;
    params.vocab_size = from.columns;
    params.logits_stride = from.stride;
    params.max_top = top.size(1);
    params.logprobs = out.contiguous("logprobs").at_least(num_rows, "logprobs").data<double>();
    params.ranks = ranks.contiguous("ranks").at_least(num_rows, "ranks").data<int64_t>();
    params.top_ids = top_ids.contiguous("top_ids").at_least(num_rows * params.max_top, "top_ids").data<int64_t>();
    params.top = top.contiguous("top").at_least(num_rows * params.max_top, "top").data<double>();
    for (int64_t i = 0; i < num_rows; i++) {
        require(
            params.logit_rows[i] >= 0 && params.logit_rows[i] < from.rows,
            "row " + std::to_string(params.logit_rows[i]) + " of " + std::to_string(from.rows) + " rows of logits"
        );
        require(
            params.tokens[i] >= 0 && params.tokens[i] < from.columns,
            "token id " + std::to_string(params.tokens[i]) + " of a vocabulary of " + std::to_string(from.columns)
        );
        require(
            params.num_top[i] <= params.max_top,
            std::to_string(params.num_top[i]) + " alternatives, the output holds " + std::to_string(params.max_top)
        );
    }
    RuntimeObject& runtime = self_of<RuntimeObject>(self);
    const Busy busy(runtime);
    const WithoutGil unlocked;
    runtime.run(runtime.table->logprobs, &params);
    return nullptr;
}

struct NamedKernel {
    const char* name;
    size_t params_bytes;
    PagedKernel PagedTable::* kernel;
};

// name, params: one kernel on memory that the caller vouches for, for tests and measurements.
PyObject* call(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    static const NamedKernel kernels[] = {
        {"embedding", sizeof(PagedEmbedding), &PagedTable::embedding},
        {"norm", sizeof(PagedNorm), &PagedTable::norm},
        {"linear", sizeof(PagedLinear), &PagedTable::linear},
        {"rope", sizeof(PagedRope), &PagedTable::rope},
        {"attention", sizeof(PagedAttention), &PagedTable::attention},
        {"attention_shared", sizeof(PagedAttention), &PagedTable::attention_shared},
        {"attention_join", sizeof(PagedAttention), &PagedTable::attention_join},
        {"gated", sizeof(PagedGated), &PagedTable::gated},
        {"add", sizeof(PagedAdd), &PagedTable::add},
        {"select", sizeof(PagedSelect), &PagedTable::select},
        {"pack", sizeof(PagedPack), &PagedTable::pack},
        {"prepare", sizeof(PagedPrepare), &PagedTable::prepare},
        {"quantized_linear", sizeof(PagedQuantizedLinear), &PagedTable::quantized_linear},
        {"quantized_embedding", sizeof(PagedQuantizedEmbedding), &PagedTable::quantized_embedding},
        {"quantized_pack", sizeof(PagedQuantizedPack), &PagedTable::quantized_pack},
    };
    const Arguments arguments(values, count, 2);
    Py_ssize_t length;
    const char* text = PyUnicode_AsUTF8AndSize(arguments.object(0), &length);
    if (text == nullptr) {
        throw PythonError{};
    }
    View params(arguments.object(1), 0, "params");
    for (const NamedKernel& known : kernels) {
        if (std::strcmp(known.name, text) == 0) {
            require(
                params.bytes() == static_cast<int64_t>(known.params_bytes),
                "the parameters have " + std::to_string(params.bytes()) + " bytes, expected " +
                    std::to_string(known.params_bytes)
            );
            RuntimeObject& runtime = self_of<RuntimeObject>(self);
            const Busy busy(runtime);
            const WithoutGil unlocked;
            runtime.run(runtime.table->*known.kernel, params.data<void>());
            return nullptr;
        }
    }
    throw Error(std::string("no kernel is called ") + text);
}

PyMethodDef runtime_methods[] = {
    {"bind_caller", fast<bind_caller>(), METH_FASTCALL, nullptr},
    {"pack", fast<then_none<pack>>(), METH_FASTCALL, nullptr},
    {"pack_quantized", fast<then_none<pack_quantized>>(), METH_FASTCALL, nullptr},
    {"copy_blocks", fast<then_none<copy_blocks>>(), METH_FASTCALL, nullptr},
    {"sample", fast<then_none<sample>>(), METH_FASTCALL, nullptr},
    {"logprobs", fast<then_none<logprobs>>(), METH_FASTCALL, nullptr},
    {"call", fast<then_none<call>>(), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef runtime_members[] = {
    {"isa", runtime_isa, nullptr, nullptr, nullptr},
    {"threads", runtime_threads, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

}  // namespace

PyTypeObject* make_runtime_type() {
    PyType_Slot runtime_slots[] = {
        {Py_tp_new, slot(runtime_new)},
        {Py_tp_dealloc, slot(deallocate<RuntimeObject>)},
        {Py_tp_methods, runtime_methods},
        {Py_tp_getset, runtime_members},
        {0, nullptr},
    };
    return make_type("paged_kernels._native.Runtime", sizeof(Instance<RuntimeObject>), runtime_slots);
}

}  // namespace paged::binding
