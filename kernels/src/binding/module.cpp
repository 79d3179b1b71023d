// The module paged_kernels._native: Buffer, Runtime, Program. See _native.pyi for the functions' meaning.
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "../core/isa.hpp"
#include "../core/memory.hpp"
#include "../core/pool.hpp"
#include "../core/program.hpp"
#include "python.hpp"

namespace paged::binding {

PyObject* error_type = nullptr;

namespace {

PyTypeObject *buffer_type = nullptr, *runtime_type = nullptr, *program_type = nullptr;

// ---- Buffer

struct BufferObject {
    Memory memory;
};

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

Memory& memory_of(PyObject* object) {
    if (!PyObject_TypeCheck(object, buffer_type)) {
        PyErr_SetString(PyExc_TypeError, "a Buffer is expected");
        throw PythonError{};
    }
    return self_of<BufferObject>(object).memory;
}

// The floats of a Buffer, at least `count`; None gives null.
const float* floats_of(PyObject* object, int64_t count, const char* name) {
    if (object == Py_None) {
        return nullptr;
    }
    Memory& memory = memory_of(object);
    require(static_cast<int64_t>(memory.size()) >= 4 * count,
            std::string(name) + " has " + std::to_string(memory.size()) + " bytes, expected " + std::to_string(4 * count));
    return reinterpret_cast<const float*>(memory.data());
}

// ---- Runtime

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

PyObject* runtime_threads(PyObject* self, void*) { return PyLong_FromLong(self_of<RuntimeObject>(self).pool.threads()); }

PyObject* bind_caller(PyObject* self, PyObject* const*, Py_ssize_t) {
    self_of<RuntimeObject>(self).pool.bind_caller();
    return none();
}

int64_t stored_bytes(int64_t dtype) {
    require(dtype >= PAGED_F32 && dtype <= PAGED_F64, "a stored dtype is " + std::to_string(dtype));
    const int64_t sizes[] = {4, 2, 2, 8};
    return sizes[dtype];
}

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// packed, dtype, row_offset, rows, in_features, source, source_dtype
PyObject* pack(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 7);
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
    require(static_cast<int64_t>(packed.size()) >= needed,
            "the packed weight has " + std::to_string(packed.size()) + " bytes, " + std::to_string(needed) + " are needed");
    const int64_t stored = params.rows * params.in_features * stored_bytes(params.source_dtype);
    require(source.bytes() == stored,
            "the stored tensor has " + std::to_string(source.bytes()) + " bytes, expected " + std::to_string(stored));
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
    require(planes >= 0 && blocks >= 0 && bytes >= 0 && planes * blocks * bytes <= static_cast<int64_t>(pool.size()),
            "the pool has " + std::to_string(pool.size()) + " bytes, fewer than its blocks");
    for (int64_t i = 0; i < 2 * num_copies; i++) {
        require(pairs[i] >= 0 && pairs[i] < blocks,
                "block " + std::to_string(pairs[i]) + " of " + std::to_string(blocks));
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
    require(size >= 1 && size <= PAGED_MAX_VOCABULARY,
            "a vocabulary of " + std::to_string(size) + " tokens: from 1 to " + std::to_string(PAGED_MAX_VOCABULARY));
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
    require(top_ids.dimensions() == 2 && top.dimensions() == 2 && top_ids.size(1) == top.size(1), "top_ids and top are [rows, max_top]");
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
        require(row.logit_row >= 0 && row.logit_row < from.rows,
                "row " + std::to_string(row.logit_row) + " of " + std::to_string(from.rows) + " rows of logits");
        require(row.num_top <= params.max_top,
                std::to_string(row.num_top) + " alternatives, the output holds " + std::to_string(params.max_top));
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
    require(top_ids.dimensions() == 2 && top.dimensions() == 2 && top_ids.size(1) == top.size(1), "top_ids and top are [rows, max_top]");
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
        require(params.logit_rows[i] >= 0 && params.logit_rows[i] < from.rows,
                "row " + std::to_string(params.logit_rows[i]) + " of " + std::to_string(from.rows) + " rows of logits");
        require(params.tokens[i] >= 0 && params.tokens[i] < from.columns,
                "token id " + std::to_string(params.tokens[i]) + " of a vocabulary of " + std::to_string(from.columns));
        require(params.num_top[i] <= params.max_top,
                std::to_string(params.num_top[i]) + " alternatives, the output holds " + std::to_string(params.max_top));
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
    PagedKernel PagedTable::*kernel;
};

// name, params: one kernel on memory that the caller vouches for, for tests and measurements.
PyObject* call(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    static const NamedKernel kernels[] = {
        {"embedding", sizeof(PagedEmbedding), &PagedTable::embedding},
        {"norm", sizeof(PagedNorm), &PagedTable::norm},
        {"linear", sizeof(PagedLinear), &PagedTable::linear},
        {"rope", sizeof(PagedRope), &PagedTable::rope},
        {"attention", sizeof(PagedAttention), &PagedTable::attention},
        {"attention_join", sizeof(PagedAttention), &PagedTable::attention_join},
        {"gated", sizeof(PagedGated), &PagedTable::gated},
        {"add", sizeof(PagedAdd), &PagedTable::add},
        {"select", sizeof(PagedSelect), &PagedTable::select},
        {"pack", sizeof(PagedPack), &PagedTable::pack},
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
            require(params.bytes() == static_cast<int64_t>(known.params_bytes),
                    "the parameters have " + std::to_string(params.bytes()) + " bytes, expected " +
                        std::to_string(known.params_bytes));
            RuntimeObject& runtime = self_of<RuntimeObject>(self);
            const Busy busy(runtime);
            const WithoutGil unlocked;
            runtime.run(runtime.table->*known.kernel, params.data<void>());
            return nullptr;
        }
    }
    throw Error(std::string("no kernel is called ") + text);
}

// ---- Program

struct ProgramObject {
    PyObject* runtime;
    Program program;
    std::vector<PyObject*> kept;
    int64_t views = 0;
    Py_ssize_t shape[2], strides[2];

    ProgramObject(PyObject* runtime_object, int32_t dtype, int64_t block_size)
        : runtime(Py_NewRef(runtime_object)),
          program(*self_of<RuntimeObject>(runtime_object).table, self_of<RuntimeObject>(runtime_object).pool, dtype, block_size) {}
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
    return PyLong_FromLong(
        object.program.embedding(table.data(), static_cast<int64_t>(table.size()), arguments.integer(1), arguments.integer(2)));
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

Heads heads_of(const Arguments& arguments, Py_ssize_t first) {
    return {arguments.integer(first), arguments.integer(first + 1), arguments.integer(first + 2)};
}

// kv, key_offset, value_offset, from argument `first` on; keys and values are planes of as many whole blocks as fit between.
Cache cache_of(ProgramObject& object, const Arguments& arguments, Py_ssize_t first) {
    const Memory& pool = memory_of(arguments.object(first));
    const int64_t key = arguments.integer(first + 1), value = arguments.integer(first + 2);
    const int64_t plane = value - key;
    require(key >= 0 && plane > 0 && value + plane <= static_cast<int64_t>(pool.size()),
            "keys and values do not lie within the pool of " + std::to_string(pool.size()) + " bytes");
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
    require(cos.size() == sin.size() && cos.size() % static_cast<size_t>(4 * half) == 0, "cos and sin are [positions, head_dim / 2]");
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
    return PyLong_FromLong(recording(self).program.gated(
        static_cast<int>(arguments.integer(0)), static_cast<int>(arguments.integer(1))));
}

// x, residual
PyObject* record_add(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 2);
    return PyLong_FromLong(recording(self).program.add(
        static_cast<int>(arguments.integer(0)), static_cast<int>(arguments.integer(1))));
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
        : token_ids_(arguments.object(0), 8, "token_ids"), positions_(arguments.object(1), 8, "positions"),
          slots_(arguments.object(2), 8, "slot_mapping"), starts_(arguments.object(3), 4, "query_start"),
          lens_(arguments.object(4), 4, "seq_lens"), tables_(arguments.object(5), 4, "block_table"),
          logit_rows_(arguments.object(6), 8, "logit_rows") {
        batch.num_tokens = token_ids_.count();
        batch.num_seqs = lens_.count();
        batch.num_logit_rows = logit_rows_.count();
        batch.token_ids = token_ids_.contiguous("token_ids").data<int64_t>();
        batch.positions = positions_.contiguous("positions").at_least(batch.num_tokens, "positions").data<int64_t>();
        batch.slot_mapping = slots_.contiguous("slot_mapping").at_least(batch.num_tokens, "slot_mapping").data<int64_t>();
        batch.query_start = starts_.contiguous("query_start").at_least(batch.num_seqs + 1, "query_start").data<int32_t>();
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

// ---- the module

PyObject* isas(PyObject*, PyObject* const*, Py_ssize_t) {
    const std::vector<std::string> names = available_isas();
    PyObject* tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(names.size())));
    for (size_t i = 0; i < names.size(); i++) {
        PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), checked(PyUnicode_FromString(names[i].c_str())));
    }
    return tuple;
}

// For functions that return null on success because the GIL is still released then.
template <PyObject* (*F)(PyObject*, PyObject* const*, Py_ssize_t)>
PyObject* then_none(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    F(self, values, count);
    return none();
}

PyMethodDef runtime_methods[] = {
    {"bind_caller", fast<bind_caller>(), METH_FASTCALL, nullptr},
    {"pack", fast<then_none<pack>>(), METH_FASTCALL, nullptr},
    {"copy_blocks", fast<then_none<copy_blocks>>(), METH_FASTCALL, nullptr},
    {"sample", fast<then_none<sample>>(), METH_FASTCALL, nullptr},
    {"logprobs", fast<then_none<logprobs>>(), METH_FASTCALL, nullptr},
    {"call", fast<then_none<call>>(), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef program_methods[] = {
    {"embedding", fast<record_embedding>(), METH_FASTCALL, nullptr},
    {"norm", fast<record_norm>(), METH_FASTCALL, nullptr},
    {"linear", fast<record_linear>(), METH_FASTCALL, nullptr},
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

PyGetSetDef buffer_members[] = {
    {"address", buffer_address, nullptr, nullptr, nullptr},
    {"nbytes", buffer_nbytes, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyGetSetDef runtime_members[] = {
    {"isa", runtime_isa, nullptr, nullptr, nullptr},
    {"threads", runtime_threads, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

template <class F>
void* slot(F* function) {
    return reinterpret_cast<void*>(function);
}

PyTypeObject* make_type(const char* name, int size, PyType_Slot* slots) {
    PyType_Spec spec{name, size, 0, Py_TPFLAGS_DEFAULT, slots};
    return reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(&spec)));
}

void add_types(PyObject* module) {
    PyType_Slot buffer_slots[] = {
        {Py_tp_new, slot(buffer_new)},         {Py_tp_dealloc, slot(deallocate<BufferObject>)},
        {Py_tp_getset, buffer_members},        {Py_bf_getbuffer, slot(buffer_view)},
        {0, nullptr},
    };
    PyType_Slot runtime_slots[] = {
        {Py_tp_new, slot(runtime_new)},   {Py_tp_dealloc, slot(deallocate<RuntimeObject>)},
        {Py_tp_methods, runtime_methods}, {Py_tp_getset, runtime_members},
        {0, nullptr},
    };
    PyType_Slot program_slots[] = {
        {Py_tp_new, slot(program_new)},       {Py_tp_dealloc, slot(deallocate<ProgramObject>)},
        {Py_tp_methods, program_methods},     {Py_bf_getbuffer, slot(program_view)},
        {Py_bf_releasebuffer, slot(program_release)},
        {0, nullptr},
    };
    buffer_type = make_type("paged_kernels._native.Buffer", sizeof(Instance<BufferObject>), buffer_slots);
    runtime_type = make_type("paged_kernels._native.Runtime", sizeof(Instance<RuntimeObject>), runtime_slots);
    program_type = make_type("paged_kernels._native.Program", sizeof(Instance<ProgramObject>), program_slots);
    error_type = checked(PyErr_NewException("paged_kernels._native.Error", PyExc_ValueError, nullptr));
    for (auto [name, object] : {std::pair<const char*, PyObject*>{"Buffer", reinterpret_cast<PyObject*>(buffer_type)},
                                {"Runtime", reinterpret_cast<PyObject*>(runtime_type)},
                                {"Program", reinterpret_cast<PyObject*>(program_type)},
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
