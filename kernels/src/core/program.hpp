// A model's step as a flat list of kernel calls over buffers: recorded once, replayed by one call per step.
//
// Values are recorded by number; `finish` fuses what can be fused and gives values that do not live at the same time
// the same memory. A value has one row per token of the step or, behind `select`, per asked row of logits.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "memory.hpp"
#include "paged/kernels.h"
#include "pool.hpp"
#include "shared_prefix.hpp"

namespace paged {

// Arrays of one step, as pagedcli's ForwardBatch has them.
struct Batch {
    const int64_t* token_ids;     // [num_tokens]
    const int64_t* positions;     // [num_tokens]
    const int64_t* slot_mapping;  // [num_tokens]
    const int32_t* query_start;   // [num_seqs + 1]
    const int32_t* seq_lens;      // [num_seqs]
    const int32_t* block_table;   // [num_seqs, table_stride]
    const int64_t* logit_rows;    // [num_logit_rows]
    int64_t num_tokens, num_seqs, table_stride, num_logit_rows;
};

// Some rows of a step's logits, once they are computed.
struct LogitPart {
    const float* logits;
    int64_t stride, first, count;
};

// Adds the kernel calls that read a part of the logits; they run right after those that write it.
using LogitReader = std::function<void(const LogitPart&, std::vector<Call>&)>;

enum class OpKind {
    embedding,
    norm,
    linear,
    rope,
    attention,
    gated,
    add,
    select,
    prepare,
    quantized_linear,
    quantized_embedding
};

struct Heads {
    int64_t num_heads, num_kv_heads, head_dim;
};

// Keys and values of one layer.
struct Cache {
    char* key;
    char* value;
    int64_t plane_bytes;     // of all keys; of all values
    int64_t num_blocks = 0;  // follows
};

// One recorded op; which fields count depends on the kind.
struct Op {
    OpKind kind;
    int inputs[2] = {-1, -1};
    int outputs[2] = {-1, -1};
    const void* weight = nullptr;  // packed, or floats of a norm
    const float* bias = nullptr;
    const float* cos = nullptr;
    const float* sin = nullptr;
    const float* q_norm = nullptr;
    const float* k_norm = nullptr;
    int64_t size = 0;  // vocabulary, positions of the angles, or window
    float number = 0;  // eps or scale
    int activation = 0;
    bool gated = false;
    Heads heads = {0, 0, 0};
    Cache cache = {nullptr, nullptr, 0, 0};
    bool partial = false;  // a linear that writes only columns [column, column + size) of its output
    int64_t column = 0;
    PagedQuantizedWeight quantized = {nullptr, nullptr, nullptr, 0, 0, 0, 0, 0, 0};
    const int32_t* columns = nullptr;  // of a weight with its own order of input features
    int32_t row_kind = PAGED_ROW_F32;
};

struct Value {
    int64_t features;
    int32_t dtype;
    bool per_logit_row;
    int slot = -1;
};

class Program {
public:
    Program(const PagedTable& table, Pool& pool, int32_t dtype, int64_t block_size);

    int embedding(const void* table, int64_t table_bytes, int64_t vocab_size, int64_t hidden_size);
    // Without a residual (-1) there is no sum (-1).
    std::pair<int, int> norm(int x, int residual, const float* weight, int64_t weight_size, float eps);
    int linear(
        int x, const void* weight, int64_t weight_bytes, int64_t out_features, const float* bias, bool float32_out
    );
    // A value of x's rows whose columns the `_into` ops write, part by part.
    int allocate(int x, int64_t features, bool float32_out);
    void linear_into(
        int x, const void* weight, int64_t weight_bytes, int64_t out_features, const float* bias, int out,
        int64_t column
    );
    int quantized_linear(
        int x, const PagedQuantizedWeight& weight, const int32_t* columns, const float* bias, bool float32_out,
        int32_t row_kind
    );
    void quantized_linear_into(
        int x, const PagedQuantizedWeight& weight, const int32_t* columns, const float* bias, int32_t row_kind, int out,
        int64_t column
    );
    int quantized_embedding(const PagedQuantizedWeight& table, int64_t hidden_size);
    int rope(int qkv, const Heads& heads, const Op& angles, const Cache& cache);
    int attention(int q, const Heads& heads, float scale, int64_t window, const Cache& cache);
    int gated(int gate_up, int activation);
    int add(int x, int residual);
    int select(int x);
    void finish(int output, bool fuse);

    void run(const Batch& batch);

    // As `run`, but the logits are computed some rows at a time and only `reader` sees them: memory for them is bounded
    // however many are asked for. Nothing is there for `output` then.
    void step(const Batch& batch, const LogitReader& reader);

    // As `run`, each call on its own: the name and the seconds of every call, for measurements.
    std::vector<std::pair<const char*, double>> time_calls(const Batch& batch);

    // Of the last run; valid until the next one, and as memory as long as it is held.
    void* output() const;
    void hold_output(bool held);
    int64_t output_rows() const { return output_rows_; }
    bool finished() const { return finished_; }
    const Value& output_value() const { return values_[static_cast<size_t>(output_)]; }
    int64_t features(int value) const { return at(value).features; }
    std::string describe() const;
    int64_t workspace_bytes() const;

private:
    struct Slot {
        int64_t token_row_bytes = 0, logit_row_bytes = 0;
        int64_t offset = 0;  // in the workspace
    };
    union Params {
        PagedEmbedding embedding;
        PagedNorm norm;
        PagedLinear linear;
        PagedRope rope;
        PagedAttention attention;
        PagedGated gated;
        PagedAdd add;
        PagedSelect select;
        PagedPrepare prepare;
        PagedQuantizedLinear quantized_linear;
        PagedQuantizedEmbedding quantized_embedding;
    };
    // Tiles of the step's rows, and what its decodes share, for layers whose tiles have so many rows. What is shared is
    // found when the first layer asks that has no window.
    struct Tiles {
        int64_t rows;
        std::vector<int64_t> all;
        std::optional<SharedPrefix> shared;
    };

    const Value& at(int value) const;
    void check_packed(int64_t bytes, int64_t out_features, int64_t in_features) const;
    int prepare_rows(int x, const PagedQuantizedWeight& weight, const int32_t* columns, int32_t row_kind);
    Op quantized_op(int x, const PagedQuantizedWeight& weight, const int32_t* columns, int32_t row_kind);
    void check_part(int x, int64_t out_features, int out, int64_t column) const;
    Cache whole_blocks(const Cache& cache, const Heads& heads) const;
    int new_value(int64_t features, int32_t dtype, bool per_logit_row);
    std::vector<int> uses() const;
    void fuse_gated();
    void fuse_residual();
    void drop_unused();
    void assign_slots();
    void assign_op(size_t index, const std::vector<size_t>& last_use, std::vector<int>& free);
    int take_slot(const Value& value, std::vector<int>& free);

    void prepare(const Batch& batch, int64_t logit_rows);
    int64_t logit_rows_at_a_time() const;
    const char* name_of(const Call& call) const;
    void check(const Batch& batch) const;
    void check_sequences(const Batch& batch) const;
    void reserve(const Batch& batch, int64_t logit_rows);
    void resolve(const Batch& batch, bool per_logit_row);
    bool is_per_logit_row(const Op& op) const;
    void resolve_op(const Op& op, const Batch& batch);
    void resolve_quantized(const Op& op, const Batch& batch);
    void resolve_attention(const Op& op, const Batch& batch);
    void plan_splits(PagedAttention& params, const Batch& batch);
    void plan_shared(PagedAttention& params, Tiles& tiles, const Batch& batch);
    void make_room(Memory& memory, int64_t bytes, float* PagedAttention::* user);
    void look_ahead();
    Tiles& tiles_of(int64_t rows, const Batch& batch);
    Params& push(const PagedKernel& kernel);
    int64_t rows_of(const Value& value, const Batch& batch) const;
    int64_t stride(int value) const;
    void* data(int value) const;
    void* part(const Op& op) const;  // where its output begins

    const PagedTable& table_;
    Pool& pool_;
    int32_t dtype_;
    int64_t block_size_;
    std::vector<Op> ops_;
    std::vector<Value> values_;
    std::vector<Slot> slots_;
    Memory workspace_;
    int64_t most_tokens_ = 0, most_logit_rows_ = 0;  // that the workspace has room for
    std::vector<Memory> retired_;
    bool output_held_ = false;
    int output_ = -1;
    int64_t output_rows_ = 0;
    bool finished_ = false;

    std::vector<Params> params_;
    std::vector<Call> calls_;
    std::vector<Tiles> tiles_;
    Memory partial_, shared_partial_;
};

}  // namespace paged
