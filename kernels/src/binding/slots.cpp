// Slots: the batch state of an engine, and its steps by one call each.
//
// A plan's entries come as they are, tuples that the scheduler made: reading nine items of a tuple is cheaper than
// making arrays of them.
#include <chrono>
#include <cstring>

#include "../core/slots.hpp"
#include "objects.hpp"

namespace paged::binding {

namespace {

// Items of an entry, in the order of pagedcli's PlanEntry: request, slot, epoch, start, n, samples, logit_rows,
// new_blocks, admission.
enum Item : Py_ssize_t { REQUEST, SLOT, EPOCH, START, COUNT, SAMPLES, LOGIT_ROWS, NEW_BLOCKS, ADMISSION, ITEMS };

enum Note : long { FAULTS = 1, SCORES = 2, PROMPT = 4 };

struct SlotsObject {
    Slots slots;
    int64_t vocab_size;
    double seconds = 0.0;  // inside the kernels
    std::vector<int64_t> offsets;

    explicit SlotsObject(const Slots::Sizes& sizes) : slots(sizes), vocab_size(sizes.vocab_size) {}
};

class Stopwatch {
public:
    explicit Stopwatch(double& seconds) : seconds_(seconds), start_(std::chrono::steady_clock::now()) {}
    ~Stopwatch() { seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;

private:
    double& seconds_;
    std::chrono::steady_clock::time_point start_;
};

int64_t integer_of(PyObject* object) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) {
        throw PythonError{};
    }
    return value;
}

// Borrowed.
PyObject* item_of(PyObject* tuple, Py_ssize_t i) { return checked(PyTuple_GetItem(tuple, i)); }

Py_ssize_t size_of(PyObject* tuple) {
    const Py_ssize_t size = PyTuple_Size(tuple);
    if (size < 0) {
        throw PythonError{};
    }
    return size;
}

std::vector<int32_t> integers_of(PyObject* tuple) {
    const Py_ssize_t size = size_of(tuple);
    std::vector<int32_t> values(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; i++) {
        const int64_t value = integer_of(item_of(tuple, i));
        values[static_cast<size_t>(i)] = value < 0 || value > INT32_MAX ? -1 : static_cast<int32_t>(value);
    }
    return values;
}

PyObject* slots_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
    return guarded<PyObject*>(nullptr, [&] {
        long long slots, model_len, block_size, vocab_size, max_top;
        if (!PyArg_ParseTuple(arguments, "LLLLL", &slots, &model_len, &block_size, &vocab_size, &max_top)) {
            throw PythonError{};
        }
        require(
            slots >= 1 && model_len >= 1 && block_size >= 1 && vocab_size >= 1 && max_top >= 1,
            "slots, lengths, block size, vocabulary and alternatives are at least 1"
        );
        require(
            vocab_size <= PAGED_MAX_VOCABULARY,
            "a vocabulary of " + std::to_string(vocab_size) + " tokens: at most " + std::to_string(PAGED_MAX_VOCABULARY)
        );
        return instance(type, new SlotsObject({slots, model_len, block_size, vocab_size, max_top}));
    });
}

// slot
PyObject* free_slot(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 1);
    self_of<SlotsObject>(self).slots.free(arguments.integer(0));
    return none();
}

// slot, tokens, table, row, prompt_top
PyObject* admit(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 5);
    View row(arguments.object(3), sizeof(PagedSampleRow), "row");
    row.contiguous("row").at_least(1, "row");
    self_of<SlotsObject>(self).slots.admit(
        arguments.integer(0), integers_of(arguments.object(1)), integers_of(arguments.object(2)),
        *row.data<PagedSampleRow>(), arguments.integer(4)
    );
    return none();
}

void add_entry(SlotsObject& object, PyObject* entry) {
    require(size_of(entry) == ITEMS, "an entry has " + std::to_string(size_of(entry)) + " items");
    const int64_t slot = integer_of(item_of(entry, SLOT));
    PyObject* blocks = item_of(entry, NEW_BLOCKS);
    for (Py_ssize_t i = 0, size = size_of(blocks); i < size; i++) {
        object.slots.append_block(slot, integer_of(item_of(blocks, i)));
    }
    PyObject* rows = item_of(entry, LOGIT_ROWS);
    const Py_ssize_t num_rows = size_of(rows);
    object.offsets.resize(static_cast<size_t>(num_rows));
    for (Py_ssize_t i = 0; i < num_rows; i++) {
        object.offsets[static_cast<size_t>(i)] = integer_of(item_of(rows, i));
    }
    const int samples = PyObject_IsTrue(item_of(entry, SAMPLES));
    const Entry values = {
        integer_of(item_of(entry, REQUEST)), slot,         integer_of(item_of(entry, START)),
        integer_of(item_of(entry, COUNT)),   samples != 0,
    };
    object.slots.add(values, object.offsets);
}

const Batch& lay_out_entries(SlotsObject& object, PyObject* entries) {
    object.slots.begin();
    for (Py_ssize_t i = 0, size = size_of(entries); i < size; i++) {
        add_entry(object, item_of(entries, i));
    }
    return object.slots.batch();
}

PyObject* tuple_of(const std::vector<int64_t>& values) {
    PyObject* tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
    for (size_t i = 0; i < values.size(); i++) {
        PyObject* item = PyLong_FromLongLong(values[i]);
        if (item == nullptr || PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), item) < 0) {
            Py_DECREF(tuple);
            throw PythonError{};
        }
    }
    return tuple;
}

// (tokens of the entries, notes)
PyObject* finished(Slots& slots) {
    slots.finish();
    const long notes = FAULTS * slots.has_faults() | SCORES * slots.has_scores() | PROMPT * slots.has_prompt();
    return checked(Py_BuildValue("(Nl)", tuple_of(slots.tokens()), notes));
}

// program, entries
PyObject* step(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 2);
    SlotsObject& object = self_of<SlotsObject>(self);
    const ProgramParts parts = program_of(arguments.object(0));
    require(
        parts.program.finished() && parts.program.output_value().features == object.vocab_size,
        "the program is not finished, or its head has another vocabulary"
    );
    const Batch& batch = lay_out_entries(object, arguments.object(1));
    {
        const Busy busy(parts.runtime);
        const WithoutGil unlocked;
        const Stopwatch watch(object.seconds);  // waiting for the interpreter's lock is not the kernels' time
        parts.program.step(batch, [&](const LogitPart& part, std::vector<Call>& calls) {
            object.slots.read_logits(*parts.runtime.table, part, calls);
        });
    }
    return finished(object.slots);
}

template <class T>
PyObject* bytes_of(const T* data, int64_t count) {
    return checked(
        PyBytes_FromStringAndSize(reinterpret_cast<const char*>(data), count * static_cast<int64_t>(sizeof(T)))
    );
}

// entries: the arrays of a step, for programs that are not recorded; see `read`.
PyObject* lay_out(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 1);
    const Batch& batch = lay_out_entries(self_of<SlotsObject>(self), arguments.object(0));
    return checked(Py_BuildValue(
        "(NNNNNNN)", bytes_of(batch.token_ids, batch.num_tokens), bytes_of(batch.positions, batch.num_tokens),
        bytes_of(batch.slot_mapping, batch.num_tokens), bytes_of(batch.query_start, batch.num_seqs + 1),
        bytes_of(batch.seq_lens, batch.num_seqs), bytes_of(batch.block_table, batch.num_seqs * batch.table_stride),
        bytes_of(batch.logit_rows, batch.num_logit_rows)
    ));
}

// runtime, logits: samples from the logits of the step that was laid out last.
PyObject* read(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 2);
    SlotsObject& object = self_of<SlotsObject>(self);
    if (!PyObject_TypeCheck(arguments.object(0), runtime_type)) {
        PyErr_SetString(PyExc_TypeError, "a Runtime is expected");
        throw PythonError{};
    }
    RuntimeObject& runtime = self_of<RuntimeObject>(arguments.object(0));
    View logits(arguments.object(1), 4, "logits");
    logits.contiguous("logits").at_least(object.slots.batch().num_logit_rows * object.vocab_size, "logits");
    {
        const Busy busy(runtime);
        const WithoutGil unlocked;
        const Stopwatch watch(object.seconds);  // waiting for the interpreter's lock is not the kernels' time
        std::vector<Call> calls;
        const int64_t rows = object.slots.batch().num_logit_rows;
        object.slots.read_logits(*runtime.table, {logits.data<float>(), object.vocab_size, 0, rows}, calls);
        runtime.pool.run(calls.data(), static_cast<int64_t>(calls.size()));
    }
    return finished(object.slots);
}

// (entry, token, logprob, rank, ((token, logprob), ...))
PyObject* score_of(int64_t entry, const TokenScores& scores) {
    PyObject* top = checked(PyTuple_New(static_cast<Py_ssize_t>(scores.num_top)));
    for (int64_t i = 0; i < scores.num_top; i++) {
        PyObject* pair = Py_BuildValue("(Ld)", static_cast<long long>(scores.top_ids[i]), scores.top[i]);
        if (pair == nullptr || PyTuple_SetItem(top, static_cast<Py_ssize_t>(i), pair) < 0) {
            Py_DECREF(top);
            throw PythonError{};
        }
    }
    return checked(Py_BuildValue(
        "(LLdLN)", static_cast<long long>(entry), static_cast<long long>(scores.token), scores.logprob,
        static_cast<long long>(scores.rank), top
    ));
}

PyObject* score_list(const std::vector<std::pair<int64_t, TokenScores>>& all) {
    PyObject* list = checked(PyList_New(0));
    for (const auto& [entry, scores] : all) {
        PyObject* item = nullptr;
        try {
            item = score_of(entry, scores);
        } catch (const PythonError&) {
            Py_DECREF(list);
            throw;
        }
        const int failed = PyList_Append(list, item);
        Py_DECREF(item);
        if (failed != 0) {
            Py_DECREF(list);
            throw PythonError{};
        }
    }
    return list;
}

PyObject* scores(PyObject* self, PyObject* const*, Py_ssize_t) {
    return score_list(self_of<SlotsObject>(self).slots.scores());
}

PyObject* prompt_scores(PyObject* self, PyObject* const*, Py_ssize_t) {
    return score_list(self_of<SlotsObject>(self).slots.prompt_scores());
}

PyObject* faults(PyObject* self, PyObject* const*, Py_ssize_t) {
    return tuple_of(self_of<SlotsObject>(self).slots.faults());
}

PyObject* slots_seconds(PyObject* self, void*) { return PyFloat_FromDouble(self_of<SlotsObject>(self).seconds); }

PyMethodDef slots_methods[] = {
    {"free", fast<free_slot>(), METH_FASTCALL, nullptr},
    {"admit", fast<admit>(), METH_FASTCALL, nullptr},
    {"step", fast<step>(), METH_FASTCALL, nullptr},
    {"lay_out", fast<lay_out>(), METH_FASTCALL, nullptr},
    {"read", fast<read>(), METH_FASTCALL, nullptr},
    {"scores", fast<scores>(), METH_FASTCALL, nullptr},
    {"prompt_scores", fast<prompt_scores>(), METH_FASTCALL, nullptr},
    {"faults", fast<faults>(), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef slots_members[] = {
    {"seconds", slots_seconds, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

}  // namespace

PyTypeObject* make_slots_type() {
    PyType_Slot slots_slots[] = {
        {Py_tp_new, slot(slots_new)},
        {Py_tp_dealloc, slot(deallocate<SlotsObject>)},
        {Py_tp_methods, slots_methods},
        {Py_tp_getset, slots_members},
        {0, nullptr},
    };
    return make_type("paged_kernels._native.Slots", sizeof(Instance<SlotsObject>), slots_slots);
}

}  // namespace paged::binding
