// Quantized linears and tables in programs: their rows are prepared once for all that want them alike.
#include <algorithm>

#include "error.hpp"
#include "program.hpp"

namespace paged {

namespace {

std::string text(int64_t number) { return std::to_string(number); }

// Weights with groups of this size see the same blocks of int8 rows.
int64_t block_key(const PagedQuantizedWeight& weight) {
    const int64_t group = std::min(weight.group_size, weight.depth);
    const bool whole = group % PAGED_INT8_BLOCK == 0 || group == weight.depth;
    return group > PAGED_INT8_BLOCK && whole ? PAGED_INT8_BLOCK : group;
}

// Scales of an int8 row.
int64_t num_blocks(const PagedQuantizedWeight& weight) {
    const int64_t group = std::min(weight.group_size, weight.depth);
    const int64_t block = std::min<int64_t>(group, PAGED_INT8_BLOCK), per_group = (group + block - 1) / block;
    const int64_t groups = (weight.depth + group - 1) / group, last = weight.depth - (groups - 1) * group;
    return (groups - 1) * per_group + (last + block - 1) / block;
}

}  // namespace

int Program::prepare_rows(int x, const PagedQuantizedWeight& weight, const int32_t* columns, int32_t row_kind) {
    const Value value = at(x);
    const bool as_it_is = columns == nullptr && value.features == weight.depth;
    if (row_kind != PAGED_ROW_INT8 && as_it_is && value.dtype == (row_kind == PAGED_ROW_F32 ? PAGED_F32 : PAGED_BF16)) {
        return x;
    }
    for (const Op& op : ops_) {
        if (op.kind == OpKind::prepare && op.inputs[0] == x && op.columns == columns && op.row_kind == row_kind &&
            op.quantized.depth == weight.depth &&
            (row_kind != PAGED_ROW_INT8 || block_key(op.quantized) == block_key(weight))) {
            return op.outputs[0];
        }
    }
    Op op{OpKind::prepare};
    op.inputs[0] = x;
    op.quantized = weight;
    op.columns = columns;
    op.row_kind = row_kind;
    const int64_t features = row_kind == PAGED_ROW_INT8 ? weight.depth / 4 + 2 * num_blocks(weight) : weight.depth;
    const int32_t dtype = row_kind == PAGED_ROW_BF16 ? PAGED_BF16 : PAGED_F32;
    op.outputs[0] = new_value(features, dtype, value.per_logit_row);
    ops_.push_back(op);
    return op.outputs[0];
}

Op Program::quantized_op(int x, const PagedQuantizedWeight& weight, const int32_t* columns, int32_t row_kind) {
    require(row_kind >= PAGED_ROW_F32 && row_kind <= PAGED_ROW_INT8, "rows are float32, bfloat16 or int8: 0, 1 or 2");
    const Value value = at(x);
    require(
        columns != nullptr || (value.features <= weight.depth && value.features > weight.depth - PAGED_QUANTIZED_K),
        "a quantized weight has " + text(weight.depth) + " padded input features, its input " + text(value.features)
    );
    for (int64_t k = 0; columns != nullptr && k < weight.depth; k++) {
        require(
            columns[k] < value.features,
            "input feature " + text(columns[k]) + " of " + text(value.features) + " in a quantized weight"
        );
    }
    Op op{OpKind::quantized_linear};
    op.inputs[0] = prepare_rows(x, weight, columns, row_kind);
    op.quantized = weight;
    op.row_kind = row_kind;
    op.size = weight.out_features;
    return op;
}

void Program::check_part(int x, int64_t out_features, int out, int64_t column) const {
    require(!finished_, "the program is finished: nothing can be recorded any more");
    require(
        at(x).per_logit_row == at(out).per_logit_row && column >= 0 && column + out_features <= at(out).features,
        "columns " + text(column) + " to " + text(column + out_features) + " of a value of " + text(at(out).features)
    );
}

int Program::allocate(int x, int64_t features, bool float32_out) {
    return new_value(features, float32_out ? int32_t{PAGED_F32} : dtype_, at(x).per_logit_row);
}

void Program::linear_into(
    int x, const void* weight, int64_t weight_bytes, int64_t out_features, const float* bias, int out, int64_t column
) {
    check_packed(weight_bytes, out_features, at(x).features);
    check_part(x, out_features, out, column);
    Op op{OpKind::linear};
    op.inputs[0] = x;
    op.weight = weight;
    op.bias = bias;
    op.outputs[0] = out;
    op.partial = true;
    op.column = column;
    op.size = out_features;
    ops_.push_back(op);
}

int Program::quantized_linear(
    int x, const PagedQuantizedWeight& weight, const int32_t* columns, const float* bias, bool float32_out,
    int32_t row_kind
) {
    Op op = quantized_op(x, weight, columns, row_kind);
    op.bias = bias;
    op.outputs[0] = allocate(x, weight.out_features, float32_out);
    ops_.push_back(op);
    return op.outputs[0];
}

void Program::quantized_linear_into(
    int x, const PagedQuantizedWeight& weight, const int32_t* columns, const float* bias, int32_t row_kind, int out,
    int64_t column
) {
    check_part(x, weight.out_features, out, column);
    Op op = quantized_op(x, weight, columns, row_kind);
    op.bias = bias;
    op.outputs[0] = out;
    op.partial = true;
    op.column = column;
    ops_.push_back(op);
}

int Program::quantized_embedding(const PagedQuantizedWeight& table, int64_t hidden_size) {
    require(
        hidden_size >= 1 && hidden_size <= table.depth,
        "a table has " + text(table.depth) + " padded features, its rows " + text(hidden_size)
    );
    Op op{OpKind::quantized_embedding};
    op.quantized = table;
    op.size = table.out_features;
    op.outputs[0] = new_value(hidden_size, dtype_, false);
    ops_.push_back(op);
    return op.outputs[0];
}

void Program::resolve_quantized(const Op& op, const Batch& batch) {
    const int in = op.inputs[0], other = op.inputs[1], out = op.outputs[0];
    const int64_t rows = rows_of(at(out), batch);
    auto row_bytes = [&](int value) { return stride(value) * (at(value).dtype == PAGED_F32 ? 4 : 2); };
    if (op.kind == OpKind::prepare) {
        push(table_.prepare).prepare = {
            data(in),
            op.columns,
            data(out),
            rows,
            at(in).features,
            op.quantized.depth,
            op.quantized.group_size,
            stride(in),
            row_bytes(out),
            at(in).dtype,
            op.row_kind,
        };
    } else if (op.kind == OpKind::quantized_linear) {
        push(table_.quantized_linear).quantized_linear = {
            data(in),      &op.quantized, op.bias,       other < 0 ? nullptr : data(other),
            part(op),      rows,          row_bytes(in), other < 0 ? 0 : stride(other),
            stride(out),   op.row_kind,   at(out).dtype, op.gated,
            op.activation,
        };
    } else {
        push(table_.quantized_embedding).quantized_embedding = {
            &op.quantized, batch.token_ids, data(out), rows, at(out).features, stride(out), dtype_,
        };
    }
}

}  // namespace paged
