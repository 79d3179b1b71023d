// Replay of programs: the step's arrays are checked, buffers grow if they must, ops become kernel calls.
#include <algorithm>
#include <chrono>

#include "error.hpp"
#include "program.hpp"

namespace paged {

namespace {

// Attention of so few tiles per thread is cut into splits, so that all threads have work.
constexpr int64_t FEW_TILES = 8;
constexpr int64_t MAX_PARTIAL_BYTES = int64_t{64} << 20;
// Memory for the logits of a step: more rows are computed one part after the other.
constexpr int64_t MAX_LOGIT_BYTES = int64_t{128} << 20;
constexpr int64_t LEAST_LOGIT_ROWS = 32;
// Linears of so few rows wait for their weights.
constexpr int64_t FEW_ROWS = 64;

std::string text(int64_t number) { return std::to_string(number); }

}  // namespace

int64_t Program::rows_of(const Value& value, const Batch& batch) const {
    return value.per_logit_row ? batch.num_logit_rows : batch.num_tokens;
}

int64_t Program::stride(int value) const { return (at(value).features + 31) / 32 * 32; }

void* Program::data(int value) const { return workspace_.data() + slots_[static_cast<size_t>(at(value).slot)].offset; }

void* Program::part(const Op& op) const {
    const int out = op.outputs[0];
    return static_cast<char*>(data(out)) + op.column * (at(out).dtype == PAGED_F32 ? 4 : 2);
}

void* Program::output() const { return data(output_); }

void Program::hold_output(bool held) {
    output_held_ = held;
    if (!held) {
        retired_.clear();
    }
}

void Program::prepare(const Batch& batch, int64_t logit_rows) {
    require(finished_, "the program is not finished");
    check(batch);
    reserve(batch, logit_rows);
    tiles_.clear();
    calls_.clear();
    params_.clear();
    params_.reserve(ops_.size());  // calls point into it
    resolve(batch, false);
}

void Program::run(const Batch& batch) {
    prepare(batch, batch.num_logit_rows);
    resolve(batch, true);
    look_ahead();
    output_rows_ = rows_of(output_value(), batch);
    pool_.run(calls_.data(), static_cast<int64_t>(calls_.size()));
}

void Program::step(const Batch& batch, const LogitReader& reader) {
    require(finished_, "the program is not finished");
    const Value& logits = output_value();
    require(logits.per_logit_row && logits.dtype == PAGED_F32, "a step ends with rows of logits in float32");
    const int64_t all = batch.num_logit_rows, most = logit_rows_at_a_time();
    prepare(batch, std::min(all, most));
    output_rows_ = 0;
    int64_t first = 0;
    do {
        Batch part = batch;
        part.logit_rows += first;
        part.num_logit_rows = std::min(most, all - first);
        if (part.num_logit_rows > 0) {
            resolve(part, true);
            reader({static_cast<const float*>(output()), stride(output_), first, part.num_logit_rows}, calls_);
        }
        look_ahead();
        pool_.run(calls_.data(), static_cast<int64_t>(calls_.size()));
        calls_.clear();
        params_.clear();
        first += most;
    } while (first < all);
}

int64_t Program::logit_rows_at_a_time() const {
    const int64_t row_bytes = stride(output_) * int64_t{sizeof(float)};
    return std::max(LEAST_LOGIT_ROWS, MAX_LOGIT_BYTES / row_bytes / LEAST_LOGIT_ROWS * LEAST_LOGIT_ROWS);
}

std::vector<std::pair<const char*, double>> Program::time_calls(const Batch& batch) {
    prepare(batch, batch.num_logit_rows);
    resolve(batch, true);
    output_rows_ = rows_of(output_value(), batch);
    std::vector<std::pair<const char*, double>> times;
    for (const Call& call : calls_) {
        const auto start = std::chrono::steady_clock::now();
        pool_.run(&call, 1);
        times.emplace_back(
            name_of(call), std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()
        );
    }
    return times;
}

const char* Program::name_of(const Call& call) const {
    const std::pair<const PagedKernel*, const char*> names[] = {
        {&table_.embedding, "embedding"},
        {&table_.norm, "norm"},
        {&table_.linear, "linear"},
        {&table_.rope, "rope"},
        {&table_.attention, "attention"},
        {&table_.attention_shared, "attention_shared"},
        {&table_.attention_join, "attention_join"},
        {&table_.gated, "gated"},
        {&table_.add, "add"},
        {&table_.select, "select"},
        {&table_.prepare, "prepare"},
        {&table_.quantized_linear, "quantized_linear"},
        {&table_.quantized_embedding, "quantized_embedding"},
    };
    for (const auto& [kernel, name] : names) {
        if (call.kernel == kernel) {
            return name;
        }
    }
    return "other";
}

void Program::check(const Batch& batch) const {
    require(batch.num_tokens >= 1 && batch.num_seqs >= 1, "a step has no rows");
    check_sequences(batch);
    for (int64_t i = 0; i < batch.num_logit_rows; i++) {
        const int64_t row = batch.logit_rows[i];
        require(
            row >= 0 && row < batch.num_tokens, "a row of logits is " + text(row) + " of " + text(batch.num_tokens)
        );
    }
    for (const Op& op : ops_) {
        if (op.kind == OpKind::embedding || op.kind == OpKind::quantized_embedding) {
            for (int64_t row = 0; row < batch.num_tokens; row++) {
                require(
                    batch.token_ids[row] >= 0 && batch.token_ids[row] < op.size,
                    "token id " + text(batch.token_ids[row]) + " of a vocabulary of " + text(op.size)
                );
            }
        }
    }
    // One look is enough: all layers have the same cache's blocks and the same angles, or smaller ones are the bound.
    int64_t positions = INT64_MAX, blocks = INT64_MAX;
    for (const Op& op : ops_) {
        positions = op.kind == OpKind::rope ? std::min(positions, op.size) : positions;
        blocks = op.cache.key != nullptr ? std::min(blocks, op.cache.num_blocks) : blocks;
    }
    for (int64_t row = 0; row < batch.num_tokens; row++) {
        require(
            batch.positions[row] >= 0 && batch.positions[row] < positions,
            "position " + text(batch.positions[row]) + " of " + text(positions)
        );
        require(
            batch.slot_mapping[row] >= 0 && batch.slot_mapping[row] / block_size_ < blocks,
            "slot " + text(batch.slot_mapping[row]) + " of " + text(blocks) + " blocks of " + text(block_size_)
        );
    }
    for (int64_t sequence = 0; sequence < batch.num_seqs && blocks != INT64_MAX; sequence++) {
        const int64_t used = (batch.seq_lens[sequence] + block_size_ - 1) / block_size_;
        const int32_t* table = batch.block_table + sequence * batch.table_stride;
        for (int64_t i = 0; i < used; i++) {
            require(table[i] >= 0 && table[i] < blocks, "block " + text(table[i]) + " of " + text(blocks));
        }
    }
}

void Program::check_sequences(const Batch& batch) const {
    require(
        batch.query_start[0] == 0 && batch.query_start[batch.num_seqs] == batch.num_tokens,
        "query_start does not span the step's " + text(batch.num_tokens) + " rows"
    );
    for (int64_t sequence = 0; sequence < batch.num_seqs; sequence++) {
        const int64_t rows = int64_t{batch.query_start[sequence + 1]} - batch.query_start[sequence];
        const int64_t length = batch.seq_lens[sequence], room = batch.table_stride * block_size_;
        require(
            rows >= 1 && rows <= length && length <= room,
            "sequence " + text(sequence) + " has " + text(rows) + " rows and " + text(length) +
                " tokens, its table holds " + text(room) + ": 1 <= rows <= tokens <= table is required"
        );
    }
}

// The workspace keeps the size of the largest step; a larger one gets the next power of two in rows.
void Program::reserve(const Batch& batch, int64_t logit_rows) {
    if (batch.num_tokens <= most_tokens_ && logit_rows <= most_logit_rows_) {
        return;
    }
    auto enough = [](int64_t rows, int64_t now) {
        for (now = std::max<int64_t>(now, 1); now < rows; now *= 2) {
        }
        return now;
    };
    most_tokens_ = enough(batch.num_tokens, most_tokens_);
    const int64_t usual_rows = std::min(enough(logit_rows, most_logit_rows_), logit_rows_at_a_time());
    most_logit_rows_ = std::max({most_logit_rows_, usual_rows, logit_rows});
    int64_t total = 0;
    for (Slot& slot : slots_) {
        slot.offset = total;
        const int64_t bytes = std::max(slot.token_row_bytes * most_tokens_, slot.logit_row_bytes * most_logit_rows_);
        total += (bytes + 4095) / 4096 * 4096 + 128;  // rows of two slots do not meet in the same sets of the caches
    }
    if (output_held_) {
        retired_.push_back(workspace_);
    }
    workspace_ = Memory();
    workspace_ = Memory(static_cast<size_t>(total), true);
}

bool Program::is_per_logit_row(const Op& op) const { return at(op.outputs[0]).per_logit_row; }

// The ops on rows of logits come after all others: parts of those rows go through them one after the other.
void Program::resolve(const Batch& batch, bool per_logit_row) {
    for (const Op& op : ops_) {
        if (is_per_logit_row(op) == per_logit_row) {
            resolve_op(op, batch);
        }
    }
}

// While a call waits for its threads, the weights of the next linear can be on their way.
void Program::look_ahead() {
    Ahead next;
    for (auto call = calls_.rbegin(); call != calls_.rend(); ++call) {
        call->ahead = next;
        if (call->kernel == &table_.linear) {
            const auto& p = *static_cast<const PagedLinear*>(call->params);
            const int64_t depth = (p.in_features + PAGED_BLOCK_K - 1) / PAGED_BLOCK_K * PAGED_BLOCK_K;
            const int64_t bytes =
                p.out_features / PAGED_BLOCK_N * PAGED_BLOCK_N * depth * (p.dtype == PAGED_F32 ? 4 : 2);
            const char* weight = static_cast<const char*>(p.weight);
            next = {{weight, nullptr}, bytes};
            if (p.gated) {
                next = {{weight, weight + bytes / 2}, bytes / 2};
            }
            if (p.rows > FEW_ROWS) {
                next = {};
            }
        } else if (call->kernel == &table_.quantized_linear) {
            next = {};  // another linear than the one before, with less to fetch
        }
    }
}

Program::Params& Program::push(const PagedKernel& kernel) {
    params_.emplace_back();
    calls_.push_back({&kernel, &params_.back()});
    return params_.back();
}

void Program::resolve_op(const Op& op, const Batch& batch) {
    const int in = op.inputs[0], other = op.inputs[1], out = op.outputs[0], sum = op.outputs[1];
    const int64_t rows = rows_of(at(out), batch);
    switch (op.kind) {
        case OpKind::embedding:
            push(table_.embedding).embedding = {
                op.weight, batch.token_ids, data(out), rows, at(out).features, stride(out), dtype_,
            };
            break;
        case OpKind::norm:
            push(table_.norm).norm = {
                data(in),
                other < 0 ? nullptr : data(other),
                static_cast<const float*>(op.weight),
                data(out),
                other < 0 ? nullptr : data(sum),
                rows,
                at(in).features,
                stride(in),
                other < 0 ? 0 : stride(other),
                stride(out),
                other < 0 ? 0 : stride(sum),
                op.number,
                dtype_,
            };
            break;
        case OpKind::linear:
            push(table_.linear).linear = {
                data(in),        op.weight,
                op.bias,         other < 0 ? nullptr : data(other),
                part(op),        rows,
                at(in).features, op.partial ? op.size : op.gated ? 2 * at(out).features : at(out).features,
                stride(in),      other < 0 ? 0 : stride(other),
                stride(out),     dtype_,
                at(out).dtype,   op.gated,
                op.activation,
            };
            break;
        case OpKind::rope:
            push(table_.rope).rope = {
                data(in),
                batch.positions,
                batch.slot_mapping,
                op.cos,
                op.sin,
                op.q_norm,
                op.k_norm,
                data(out),
                op.cache.key,
                op.cache.value,
                rows,
                op.heads.num_heads,
                op.heads.num_kv_heads,
                op.heads.head_dim,
                block_size_,
                stride(in),
                stride(out),
                op.number,
                dtype_,
            };
            break;
        case OpKind::attention:
            resolve_attention(op, batch);
            break;
        case OpKind::gated:
            push(table_.gated).gated = {
                data(in), data(out), rows, at(out).features, stride(in), stride(out), op.activation, dtype_,
            };
            break;
        case OpKind::add:
            push(table_.add).add = {
                data(in),   data(other),   data(out),   rows,   at(out).features,
                stride(in), stride(other), stride(out), dtype_,
            };
            break;
        case OpKind::select:
            push(table_.select).select = {
                data(in), batch.logit_rows, data(out), rows, at(out).features, stride(in), stride(out), dtype_,
            };
            break;
        case OpKind::prepare:
        case OpKind::quantized_linear:
        case OpKind::quantized_embedding:
            resolve_quantized(op, batch);
            break;
    }
}

void Program::resolve_attention(const Op& op, const Batch& batch) {
    const int in = op.inputs[0], out = op.outputs[0];
    params_.emplace_back();
    PagedAttention& params = params_.back().attention;
    params = {};
    params.q = data(in);
    params.key = op.cache.key;
    params.value = op.cache.value;
    params.block_table = batch.block_table;
    params.query_start = batch.query_start;
    params.seq_lens = batch.seq_lens;
    params.out = data(out);
    params.rows = batch.num_tokens;
    params.num_seqs = batch.num_seqs;
    params.table_stride = batch.table_stride;
    params.num_heads = op.heads.num_heads;
    params.num_kv_heads = op.heads.num_kv_heads;
    params.head_dim = op.heads.head_dim;
    params.block_size = block_size_;
    params.q_stride = stride(in);
    params.out_stride = stride(out);
    params.window = op.size;
    params.scale = op.number;
    params.dtype = dtype_;
    params.tile_rows = table_.attention_tile_rows(&params);
    Tiles& tiles = tiles_of(params.tile_rows, batch);
    params.tiles = tiles.all.data();
    params.num_tiles = static_cast<int64_t>(tiles.all.size());
    if (params.window == 0) {  // else it would begin elsewhere for each row
        plan_shared(params, tiles, batch);
    }
    if (params.shared != nullptr) {
        calls_.push_back({&table_.attention_shared, &params});
    }
    plan_splits(params, batch);
    calls_.push_back({&table_.attention, &params});
    if (params.partial != nullptr) {
        calls_.push_back({&table_.attention_join, &params});
    }
}

void Program::plan_splits(PagedAttention& params, const Batch& batch) {
    const int32_t longest = *std::max_element(batch.seq_lens, batch.seq_lens + batch.num_seqs);
    const int64_t splits = (longest + PAGED_SPLIT_TOKENS - 1) / PAGED_SPLIT_TOKENS;
    const int64_t bytes = params.rows * params.num_heads * splits * (params.head_dim + 2) * 4;
    if (splits < 2 || params.num_tiles * params.num_kv_heads >= FEW_TILES * pool_.threads() ||
        bytes > MAX_PARTIAL_BYTES) {
        return;
    }
    make_room(partial_, bytes, &PagedAttention::partial);
    params.partial = reinterpret_cast<float*>(partial_.data());
    params.num_splits = splits;
}

void Program::plan_shared(PagedAttention& params, Tiles& tiles, const Batch& batch) {
    const int64_t split_bytes = params.num_seqs * params.num_heads * (params.head_dim + 2) * 4;
    if (!tiles.shared) {
        tiles.shared = SharedPrefix::of(batch, block_size_, tiles.rows, MAX_PARTIAL_BYTES / split_bytes);
    }
    const SharedPrefix& shared = *tiles.shared;
    if (shared.parts.empty()) {
        return;
    }
    params.shared = shared.parts.data();
    params.num_shared = static_cast<int64_t>(shared.parts.size());
    params.members = shared.members.data();
    params.shared_splits = shared.splits.data();
    params.most_shared = shared.most_splits;
    make_room(shared_partial_, shared.most_splits * split_bytes, &PagedAttention::shared_partial);
    params.shared_partial = reinterpret_cast<float*>(shared_partial_.data());
}

void Program::make_room(Memory& memory, int64_t bytes, float* PagedAttention::* user) {
    if (static_cast<size_t>(bytes) <= memory.size()) {
        return;
    }
    memory = Memory();
    memory = Memory(static_cast<size_t>(2 * bytes), false);
    // Calls that were resolved before this one point to the smaller buffer.
    for (const Call& call : calls_) {
        if (call.kernel == &table_.attention) {
            auto* earlier = const_cast<PagedAttention*>(static_cast<const PagedAttention*>(call.params));
            earlier->*user = earlier->*user == nullptr ? nullptr : reinterpret_cast<float*>(memory.data());
        }
    }
}

Program::Tiles& Program::tiles_of(int64_t rows, const Batch& batch) {
    for (Tiles& tiles : tiles_) {
        if (tiles.rows == rows) {
            return tiles;
        }
    }
    Tiles tiles{rows, {}, {}};
    for (int64_t sequence = 0; sequence < batch.num_seqs; sequence++) {
        const int64_t count = batch.query_start[sequence + 1] - batch.query_start[sequence];
        for (int64_t offset = 0; offset < count; offset += rows) {
            tiles.all.push_back(sequence << 32 | offset);
        }
    }
    tiles_.push_back(std::move(tiles));
    return tiles_.back();
}

}  // namespace paged
