// Recording of programs: shapes are checked here, once, so that the kernels need not.
#include <algorithm>
#include <sstream>

#include "error.hpp"
#include "program.hpp"

namespace paged {

namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int64_t item_bytes(int32_t dtype) { return dtype == PAGED_F32 ? 4 : 2; }

std::string text(int64_t number) { return std::to_string(number); }

bool whole_linear(const Op& op) {
    return (op.kind == OpKind::linear || op.kind == OpKind::quantized_linear) && !op.partial;
}

}  // namespace

Program::Program(const PagedTable& table, Pool& pool, int32_t dtype, int64_t block_size)
    : table_(table), pool_(pool), dtype_(dtype), block_size_(block_size) {
    require(dtype == PAGED_F32 || dtype == PAGED_BF16, "the dtype of a program is float32 or bfloat16");
    require(block_size >= 1, "block_size is " + text(block_size) + ": at least 1");
}

const Value& Program::at(int value) const {
    require(value >= 0 && static_cast<size_t>(value) < values_.size(), "value " + text(value) + " does not exist");
    return values_[static_cast<size_t>(value)];
}

int Program::new_value(int64_t features, int32_t dtype, bool per_logit_row) {
    require(!finished_, "the program is finished: nothing can be recorded any more");
    require(features >= 1, "a value has " + text(features) + " features: at least 1");
    values_.push_back({features, dtype, per_logit_row});
    return static_cast<int>(values_.size()) - 1;
}

void Program::check_packed(int64_t bytes, int64_t out_features, int64_t in_features) const {
    const int64_t expected =
        round_up(out_features, PAGED_BLOCK_N) * round_up(in_features, PAGED_BLOCK_K) * item_bytes(dtype_);
    require(
        bytes == expected, "a packed weight has " + text(bytes) + " bytes, expected " + text(expected) + " for " +
                               text(out_features) + " x " + text(in_features)
    );
}

Cache Program::whole_blocks(const Cache& cache, const Heads& heads) const {
    require(
        heads.head_dim >= 2 && heads.head_dim % 2 == 0 && heads.head_dim <= 1024,
        "head_dim is " + text(heads.head_dim) + ": even, at most 1024"
    );
    require(
        heads.num_kv_heads >= 1 && heads.num_heads % heads.num_kv_heads == 0,
        text(heads.num_heads) + " heads are no multiple of " + text(heads.num_kv_heads) + " key-value heads"
    );
    const int64_t block_bytes = heads.num_kv_heads * block_size_ * heads.head_dim * item_bytes(dtype_);
    require(
        cache.plane_bytes % block_bytes == 0,
        "the keys' " + text(cache.plane_bytes) + " bytes are no whole blocks of " + text(block_bytes)
    );
    return {cache.key, cache.value, cache.plane_bytes, cache.plane_bytes / block_bytes};
}

int Program::embedding(const void* table, int64_t table_bytes, int64_t vocab_size, int64_t hidden_size) {
    check_packed(table_bytes, vocab_size, hidden_size);
    Op op{OpKind::embedding};
    op.weight = table;
    op.size = vocab_size;
    op.outputs[0] = new_value(hidden_size, dtype_, false);
    ops_.push_back(op);
    return op.outputs[0];
}

std::pair<int, int> Program::norm(int x, int residual, const float* weight, int64_t weight_size, float eps) {
    const Value value = at(x);
    require(
        value.features == weight_size,
        "a norm's weight has " + text(weight_size) + " elements, its input " + text(value.features) + " features"
    );
    Op op{OpKind::norm};
    op.inputs[0] = x;
    op.weight = weight;
    op.number = eps;
    op.outputs[0] = new_value(value.features, dtype_, value.per_logit_row);
    if (residual >= 0) {
        const Value other = at(residual);
        require(
            other.features == value.features && other.per_logit_row == value.per_logit_row,
            "a norm's input and residual differ in shape"
        );
        op.inputs[1] = residual;
        op.outputs[1] = new_value(value.features, dtype_, value.per_logit_row);
    }
    ops_.push_back(op);
    return {op.outputs[0], op.outputs[1]};
}

int Program::linear(
    int x, const void* weight, int64_t weight_bytes, int64_t out_features, const float* bias, bool float32_out
) {
    const Value value = at(x);
    check_packed(weight_bytes, out_features, value.features);
    Op op{OpKind::linear};
    op.inputs[0] = x;
    op.weight = weight;
    op.bias = bias;
    op.outputs[0] = new_value(out_features, float32_out ? int32_t{PAGED_F32} : dtype_, value.per_logit_row);
    ops_.push_back(op);
    return op.outputs[0];
}

int Program::rope(int qkv, const Heads& heads, const Op& angles, const Cache& cache) {
    const Value value = at(qkv);
    const int64_t expected = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim;
    require(value.features == expected, "qkv has " + text(value.features) + " features, expected " + text(expected));
    require(!value.per_logit_row, "keys are written for all tokens");
    Op op = angles;
    op.kind = OpKind::rope;
    op.inputs[0] = qkv;
    op.heads = heads;
    op.cache = whole_blocks(cache, heads);
    op.outputs[0] = new_value(heads.num_heads * heads.head_dim, dtype_, false);
    ops_.push_back(op);
    return op.outputs[0];
}

int Program::attention(int q, const Heads& heads, float scale, int64_t window, const Cache& cache) {
    const Value value = at(q);
    const Cache blocks = whole_blocks(cache, heads);
    require(
        value.features == heads.num_heads * heads.head_dim && !value.per_logit_row,
        "q has " + text(value.features) + " features, expected " + text(heads.num_heads * heads.head_dim)
    );
    require(heads.num_heads / heads.num_kv_heads <= 1024, "at most 1024 heads share a key-value head");
    Op op{OpKind::attention};
    op.inputs[0] = q;
    op.heads = heads;
    op.number = scale;
    op.size = window;
    op.cache = blocks;
    op.outputs[0] = new_value(value.features, dtype_, false);
    ops_.push_back(op);
    return op.outputs[0];
}

int Program::gated(int gate_up, int activation) {
    const Value value = at(gate_up);
    require(value.features % 2 == 0, "gate_up has " + text(value.features) + " features: an even number");
    Op op{OpKind::gated};
    op.inputs[0] = gate_up;
    op.activation = activation;
    op.outputs[0] = new_value(value.features / 2, dtype_, value.per_logit_row);
    ops_.push_back(op);
    return op.outputs[0];
}

int Program::add(int x, int residual) {
    const Value value = at(x), other = at(residual);
    require(
        value.features == other.features && value.per_logit_row == other.per_logit_row,
        "the terms of a sum differ in shape"
    );
    Op op{OpKind::add};
    op.inputs[0] = x;
    op.inputs[1] = residual;
    op.outputs[0] = new_value(value.features, dtype_, value.per_logit_row);
    ops_.push_back(op);
    return op.outputs[0];
}

int Program::select(int x) {
    const Value value = at(x);
    require(!value.per_logit_row, "the rows of logits were selected already");
    Op op{OpKind::select};
    op.inputs[0] = x;
    op.outputs[0] = new_value(value.features, dtype_, true);
    ops_.push_back(op);
    return op.outputs[0];
}

void Program::finish(int output, bool fuse) {
    at(output);
    require(!finished_, "the program is finished already");
    output_ = output;
    finished_ = true;
    drop_unused();
    if (fuse) {
        fuse_gated();
        fuse_residual();
    }
    assign_slots();
}

// Ops whose results nobody reads: none writes anything else but rope, which fills the cache.
void Program::drop_unused() {
    std::vector<bool> used(values_.size(), false);
    used[static_cast<size_t>(output_)] = true;
    std::vector<Op> kept;
    for (auto op = ops_.rbegin(); op != ops_.rend(); ++op) {
        bool needed = op->kind == OpKind::rope;
        for (int value : op->outputs) {
            needed = needed || (value >= 0 && used[static_cast<size_t>(value)]);
        }
        if (needed) {
            for (int value : op->inputs) {
                if (value >= 0) {
                    used[static_cast<size_t>(value)] = true;
                }
            }
            kept.push_back(*op);
        }
    }
    ops_.assign(kept.rbegin(), kept.rend());
}

// How often each value is read.
std::vector<int> Program::uses() const {
    std::vector<int> counts(values_.size(), 0);
    for (const Op& op : ops_) {
        for (int value : op.inputs) {
            if (value >= 0) {
                counts[static_cast<size_t>(value)]++;
            }
        }
    }
    counts[static_cast<size_t>(output_)]++;
    return counts;
}

// linear + gated, where gate and up are whole blocks and nobody else reads the linear's output.
void Program::fuse_gated() {
    const std::vector<int> counts = uses();
    std::vector<Op> fused;
    for (const Op& op : ops_) {
        Op* before = fused.empty() ? nullptr : &fused.back();
        const bool fits = op.kind == OpKind::gated && before != nullptr && whole_linear(*before) &&
                          before->outputs[0] == op.inputs[0] && counts[static_cast<size_t>(op.inputs[0])] == 1 &&
                          at(op.inputs[0]).features % (2 * PAGED_BLOCK_N) == 0 && at(op.inputs[0]).dtype == dtype_;
        if (fits) {
            before->gated = true;
            before->activation = op.activation;
            before->outputs[0] = op.outputs[0];
        } else {
            fused.push_back(op);
        }
    }
    ops_ = std::move(fused);
}

// linear + norm of the sum with a residual: the linear writes the sum, rounded once, and the norm reads only that.
void Program::fuse_residual() {
    const std::vector<int> counts = uses();
    for (size_t index = 1; index < ops_.size(); index++) {
        Op &before = ops_[index - 1], &op = ops_[index];
        const bool fits = op.kind == OpKind::norm && op.inputs[1] >= 0 && whole_linear(before) && !before.gated &&
                          before.outputs[0] == op.inputs[0] && op.inputs[1] != op.inputs[0] &&
                          counts[static_cast<size_t>(op.inputs[0])] == 1 && at(op.inputs[0]).dtype == dtype_;
        if (fits) {
            before.inputs[1] = op.inputs[1];
            before.outputs[0] = op.outputs[1];
            op.inputs[0] = op.outputs[1];
            op.inputs[1] = op.outputs[1] = -1;
        }
    }
}

void Program::assign_slots() {
    constexpr size_t never = static_cast<size_t>(-1);
    std::vector<size_t> last_use(values_.size(), never);
    for (size_t index = 0; index < ops_.size(); index++) {
        for (int value : ops_[index].inputs) {
            if (value >= 0) {
                last_use[static_cast<size_t>(value)] = index;
            }
        }
    }
    last_use[static_cast<size_t>(output_)] = ops_.size();
    for (const Op& op : ops_) {
        // What rows of logits are taken from is read again for each part of them.
        if (op.kind == OpKind::select) {
            last_use[static_cast<size_t>(op.inputs[0])] = ops_.size();
        }
    }
    std::vector<int> free;
    for (size_t index = 0; index < ops_.size(); index++) {
        assign_op(index, last_use, free);
    }
}

void Program::assign_op(size_t index, const std::vector<size_t>& last_use, std::vector<int>& free) {
    const Op& op = ops_[index];
    // What reads a place before it writes it may write over an input that dies here: norms, sums, a linear's residual.
    const bool in_place = op.kind == OpKind::norm || op.kind == OpKind::add;
    const bool residual_in_place = whole_linear(op) && op.inputs[1] >= 0;
    auto release = [&](int value) {
        if (value >= 0 && last_use[static_cast<size_t>(value)] == index) {
            free.push_back(values_[static_cast<size_t>(value)].slot);
        }
    };
    auto release_inputs = [&] {
        release(op.inputs[0]);
        if (op.inputs[1] != op.inputs[0]) {
            release(op.inputs[1]);
        }
    };
    if (in_place) {
        release_inputs();
    } else if (residual_in_place) {
        release(op.inputs[1]);
    }
    for (int value : op.outputs) {
        // Another part of an output has a slot already.
        if (value >= 0 && values_[static_cast<size_t>(value)].slot < 0) {
            values_[static_cast<size_t>(value)].slot = take_slot(values_[static_cast<size_t>(value)], free);
        }
    }
    if (residual_in_place) {
        release(op.inputs[0]);
    } else if (!in_place) {
        release_inputs();
    }
    for (int value : op.outputs) {
        if (value >= 0 && last_use[static_cast<size_t>(value)] == static_cast<size_t>(-1)) {
            free.push_back(values_[static_cast<size_t>(value)].slot);  // nobody reads it
        }
    }
}

// The free slot that grows least, or a new one.
int Program::take_slot(const Value& value, std::vector<int>& free) {
    const int64_t bytes = round_up(value.features, 32) * item_bytes(value.dtype);
    auto row_bytes = [&](Slot& slot) -> int64_t& {
        return value.per_logit_row ? slot.logit_row_bytes : slot.token_row_bytes;
    };
    auto waste = [&](int slot) { return std::abs(row_bytes(slots_[static_cast<size_t>(slot)]) - bytes); };
    if (free.empty()) {
        slots_.emplace_back();
        free.push_back(static_cast<int>(slots_.size()) - 1);
    }
    auto best = std::min_element(free.begin(), free.end(), [&](int a, int b) { return waste(a) < waste(b); });
    const int slot = *best;
    free.erase(best);
    int64_t& size = row_bytes(slots_[static_cast<size_t>(slot)]);
    size = std::max(size, bytes);
    return slot;
}

std::string Program::describe() const {
    static const char* const names[] = {"embedding",
                                        "norm",
                                        "linear",
                                        "rope",
                                        "attention",
                                        "gated",
                                        "add",
                                        "select",
                                        "prepare",
                                        "quantized_linear",
                                        "quantized_embedding"};
    std::ostringstream out;
    for (const Op& op : ops_) {
        out << names[static_cast<int>(op.kind)] << (op.gated ? "+gated" : "");
        for (int value : op.inputs) {
            if (value >= 0) {
                out << " " << value << "[" << at(value).features << "]@" << at(value).slot;
            }
        }
        out << " ->";
        for (int value : op.outputs) {
            if (value >= 0) {
                out << " " << value << "[" << at(value).features << "]@" << at(value).slot;
            }
        }
        out << "\n";
    }
    return out.str();
}

int64_t Program::workspace_bytes() const {
    return static_cast<int64_t>(workspace_.size() + partial_.size() + shared_partial_.size());
}

}  // namespace paged
