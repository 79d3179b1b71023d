// Checks the kernels without Python, for sanitizers and for machines that are emulated: every variant whose library
// lies beside the program and that this machine runs.
//
// Every array is a heap block of exactly its size, so that the address sanitizer sees each step beyond it. Results are
// compared with plain loops in double precision, and rows with themselves in other company, bit by bit. The calls go
// through the thread pool, so that the thread sanitizer sees it at work.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../src/core/gptq.hpp"
#include "../src/core/isa.hpp"
#include "../src/core/pool.hpp"
#include "paged/kernels.h"

namespace {

int failures = 0, checks = 0;

void expect(bool condition, const std::string& what) {
    checks++;
    if (!condition) {
        failures++;
        std::printf("FAILED %s\n", what.c_str());
    }
}

// Numbers of about -1 to 1, the same everywhere.
class Numbers {
public:
    explicit Numbers(uint64_t seed) : state_(seed * 2654435761u + 88172645463325252u) {}
    double next() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return static_cast<double>(state_ >> 11) / 4503599627370496.0 - 1.0;
    }

private:
    uint64_t state_;
};

uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Elements of either dtype in a heap block of exactly their size.
class Array {
public:
    Array(int32_t dtype, int64_t count) : dtype_(dtype), count_(count), data_(new char[bytes()]) {
        std::memset(data_.get(), 0, bytes());
    }
    Array& fill(uint64_t seed, double scale = 1.0) {
        Numbers numbers(seed);
        for (int64_t i = 0; i < count_; i++) {
            set(i, static_cast<float>(numbers.next() * scale));
        }
        return *this;
    }
    void set(int64_t i, float value) {
        if (dtype_ == PAGED_F32) {
            std::memcpy(data_.get() + 4 * i, &value, 4);
        } else {
            const uint16_t half = to_bf16(value);
            std::memcpy(data_.get() + 2 * i, &half, 2);
        }
    }
    double get(int64_t i) const {
        if (dtype_ == PAGED_F32) {
            float value;
            std::memcpy(&value, data_.get() + 4 * i, 4);
            return static_cast<double>(value);
        }
        uint16_t half;
        std::memcpy(&half, data_.get() + 2 * i, 2);
        return static_cast<double>(from_bf16(half));
    }
    void* data() const { return data_.get(); }
    int64_t count() const { return count_; }
    size_t bytes() const { return static_cast<size_t>(count_) * (dtype_ == PAGED_F32 ? 4 : 2); }
    bool same(const Array& other) const {
        return bytes() == other.bytes() && std::memcmp(data(), other.data(), bytes()) == 0;
    }

private:
    int32_t dtype_;
    int64_t count_;
    std::unique_ptr<char[]> data_;
};

struct Checker {
    const PagedTable& table;
    paged::Pool& pool;
    int32_t dtype;

    std::string name(const std::string& op) const {
        return std::string(table.isa) + (dtype == PAGED_F32 ? " float32 " : " bfloat16 ") + op;
    }

    void call(const PagedKernel& kernel, const void* params) const {
        const paged::Call one{&kernel, params};
        pool.run(&one, 1);
    }

    bool close(double got, double want, double terms) const {
        const double unit = dtype == PAGED_F32 ? 1e-5 : 1.2e-2;
        return std::abs(got - want) <= unit * (std::abs(want) + terms) + 1e-6;
    }

    Array pack(const Array& weight, int64_t rows, int64_t columns) const {
        Array packed(dtype, (rows + 15) / 16 * 16 * ((columns + 31) / 32 * 32));
        PagedPack params{weight.data(), nullptr, packed.data(), rows, 0, columns, dtype, dtype};
        call(table.pack, &params);
        return packed;
    }

    Array linear(
        const Array& x, const Array& packed, const Array& bias, int64_t rows, int64_t depth, int64_t outputs, bool gated
    ) const {
        const int64_t columns = gated ? outputs / 2 : outputs;
        Array out(dtype, rows * columns);
        PagedLinear params{};
        params.x = x.data();
        params.weight = packed.data();
        params.bias = static_cast<const float*>(bias.data());
        params.out = out.data();
        params.rows = rows;
        params.in_features = params.x_stride = depth;
        params.out_features = outputs;
        params.out_stride = columns;
        params.dtype = params.out_dtype = dtype;
        params.gated = gated;
        call(table.linear, &params);
        return out;
    }

    void check_linear(int64_t rows, int64_t depth, int64_t outputs) const {
        Array x(dtype, rows * depth), weight(dtype, outputs * depth), bias(PAGED_F32, outputs);
        x.fill(1);
        weight.fill(2);
        bias.fill(3);
        const Array packed = pack(weight, outputs, depth);
        const Array out = linear(x, packed, bias, rows, depth, outputs, false);
        bool right = true;
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t n = 0; n < outputs; n++) {
                double sum = bias.get(n), terms = 0;
                for (int64_t k = 0; k < depth; k++) {
                    sum += x.get(r * depth + k) * weight.get(n * depth + k);
                    terms += std::abs(x.get(r * depth + k) * weight.get(n * depth + k));
                }
                right = right && close(out.get(r * outputs + n), sum, terms * 0.05);
            }
        }
        expect(
            right, name("linear " + std::to_string(rows) + "x" + std::to_string(depth) + "x" + std::to_string(outputs))
        );
        Array last(dtype, depth);
        std::memcpy(last.data(), static_cast<char*>(x.data()) + x.bytes() - last.bytes(), last.bytes());
        const Array alone = linear(last, packed, bias, 1, depth, outputs, false);
        expect(
            std::memcmp(alone.data(), static_cast<char*>(out.data()) + out.bytes() - alone.bytes(), alone.bytes()) == 0,
            name("linear of a row alone")
        );
        if (outputs % 32 == 0) {
            linear(x, packed, bias, rows, depth, outputs, true);
        }
    }

    // Linears and norms of one row in turn, in one run and one by one. A norm is done by who finishes its linear.
    void check_chain() const {
        constexpr int64_t SIZE = 96;
        constexpr size_t LINKS = 150;
        Array weight(dtype, SIZE * SIZE), ones(PAGED_F32, SIZE), start(dtype, SIZE);
        weight.fill(11);
        start.fill(12);
        for (int64_t i = 0; i < SIZE; i++) {
            ones.set(i, 1.0f);
        }
        const Array packed = pack(weight, SIZE, SIZE);
        Array x(dtype, SIZE), y(dtype, SIZE);
        PagedLinear linear{};
        linear.x = x.data();
        linear.weight = packed.data();
        linear.out = y.data();
        linear.rows = 1;
        linear.in_features = linear.out_features = linear.x_stride = linear.out_stride = SIZE;
        linear.dtype = linear.out_dtype = dtype;
        PagedNorm norm{};
        norm.x = y.data();
        norm.weight = static_cast<const float*>(ones.data());
        norm.out = x.data();
        norm.rows = 1;
        norm.features = norm.x_stride = norm.out_stride = SIZE;
        norm.eps = 1e-5f;
        norm.dtype = dtype;
        const paged::Ahead ahead{
            {static_cast<const char*>(packed.data()), nullptr}, static_cast<int64_t>(packed.bytes())
        };
        std::vector<paged::Call> calls;
        for (size_t link = 0; link < LINKS; link++) {
            calls.push_back({&table.linear, &linear, ahead});
            calls.push_back({&table.norm, &norm, ahead});
        }
        std::memcpy(x.data(), start.data(), x.bytes());
        for (const paged::Call& one : calls) {
            pool.run(&one, 1);
        }
        Array alone(dtype, SIZE);
        std::memcpy(alone.data(), x.data(), x.bytes());
        for (int round = 0; round < 20; round++) {
            std::memcpy(x.data(), start.data(), x.bytes());
            pool.run(calls.data(), static_cast<int64_t>(calls.size()));
            expect(x.same(alone), name("chain in one run"));
        }
    }

    // Codes in a heap block of exactly their size, with scales and zero points, and what they stand for.
    struct Quantized {
        std::unique_ptr<uint8_t[]> codes;
        std::unique_ptr<uint16_t[]> halves;
        std::unique_ptr<uint8_t[]> zeros;
        std::unique_ptr<float[]> offsets;
        PagedQuantizedWeight packed;
        std::vector<double> weight;
    };

    Quantized quantize(int64_t outputs, int64_t depth, int32_t bits, int64_t group, bool float_offsets) const {
        const int64_t padded = (depth + 63) / 64 * 64, blocks = (outputs + 15) / 16;
        const int64_t groups = (depth + group - 1) / group, packed_groups = (padded + group - 1) / group;
        const int64_t cells = blocks * 16 * packed_groups;
        Quantized q;
        q.codes = std::make_unique<uint8_t[]>(static_cast<size_t>(blocks * 16 * padded * bits / 8));
        q.halves = std::make_unique<uint16_t[]>(static_cast<size_t>(cells));
        q.zeros = std::make_unique<uint8_t[]>(static_cast<size_t>(float_offsets ? 0 : cells));
        q.offsets = std::make_unique<float[]>(static_cast<size_t>(float_offsets ? cells : 0));
        std::vector<uint8_t> codes(static_cast<size_t>(outputs * depth));
        std::vector<uint8_t> zeros(static_cast<size_t>(outputs * groups));
        std::vector<float> scales(zeros.size()), offsets(zeros.size());
        Numbers numbers(21);
        for (uint8_t& code : codes) {
            code = static_cast<uint8_t>((numbers.next() + 1) * 0.49999 * (1 << bits));
        }
        for (size_t i = 0; i < zeros.size(); i++) {
            zeros[i] = static_cast<uint8_t>((numbers.next() + 1) * 0.49999 * (1 << bits));
            offsets[i] = static_cast<float>(numbers.next());
            scales[i] = static_cast<float>(1 + static_cast<int>(i % 7)) / 256.0f;
        }
        q.weight.resize(codes.size());
        for (size_t i = 0; i < codes.size(); i++) {
            const auto row = static_cast<int64_t>(i) / depth, g = static_cast<int64_t>(i) % depth / group;
            const auto at = static_cast<size_t>(row * groups + g);
            const double scale = static_cast<double>(scales[at]);
            q.weight[i] =
                float_offsets ? codes[i] * scale + static_cast<double>(offsets[at]) : (codes[i] - zeros[at]) * scale;
        }
        void* other = float_offsets ? static_cast<void*>(q.offsets.get()) : q.zeros.get();
        const void* stored = float_offsets ? static_cast<const void*>(offsets.data()) : zeros.data();
        PagedQuantizedPack params{codes.data(),  scales.data(), stored, nullptr,      q.codes.get(), q.halves.get(),
                                  other,         outputs,       0,      depth,        padded,        groups,
                                  packed_groups, bits,          1,      float_offsets};
        call(table.quantized_pack, &params);
        q.packed = {q.codes.get(), q.halves.get(), other, outputs, padded, group, bits, 1, float_offsets};
        return q;
    }

    Array quantized_linear(const Quantized& q, const Array& x, int64_t rows, int64_t depth, int32_t kind) const {
        const int64_t padded = q.packed.depth, outputs = q.packed.out_features;
        // Enough for the scales of blocks of 16.
        const int64_t stride = kind == PAGED_ROW_INT8 ? padded + padded / 2 : padded * (kind == PAGED_ROW_F32 ? 4 : 2);
        auto prepared = std::make_unique<char[]>(static_cast<size_t>(rows * stride));
        PagedPrepare rows_in{x.data(), nullptr, prepared.get(), rows, depth, padded, q.packed.group_size,
                             depth,    stride,  dtype,          kind};
        call(table.prepare, &rows_in);
        Array out(PAGED_F32, rows * outputs);
        PagedQuantizedLinear params{};
        params.x = prepared.get();
        params.weight = &q.packed;
        params.out = out.data();
        params.rows = rows;
        params.x_stride = stride;
        params.out_stride = outputs;
        params.kind = kind;
        params.out_dtype = PAGED_F32;
        call(table.quantized_linear, &params);
        if (outputs % 32 == 0) {
            Array gated(PAGED_F32, rows * outputs / 2);
            params.out = gated.data();
            params.out_stride = outputs / 2;
            params.gated = 1;
            call(table.quantized_linear, &params);
        }
        return out;
    }

    void check_quantized(
        int64_t rows, int64_t depth, int64_t outputs, int32_t bits, int64_t group, bool offsets
    ) const {
        const Quantized q = quantize(outputs, depth, bits, group, offsets);
        Array x(dtype, rows * depth);
        x.fill(22);
        for (int32_t kind : {PAGED_ROW_F32, PAGED_ROW_BF16, PAGED_ROW_INT8}) {
            const Array out = quantized_linear(q, x, rows, depth, kind);
            bool right = true;
            for (int64_t r = 0; r < rows; r++) {
                for (int64_t n = 0; n < outputs; n++) {
                    double sum = 0, sizes = 0;
                    for (int64_t k = 0; k < depth; k++) {
                        const double weight = q.weight[static_cast<size_t>(n * depth + k)];
                        sum += x.get(r * depth + k) * weight;
                        sizes += std::abs(weight);
                    }
                    // Rows are at most 1: a step of int8 is 1 / 127, those of bfloat16 are smaller.
                    const double unit = kind == PAGED_ROW_F32 ? 1e-4 : kind == PAGED_ROW_BF16 ? 1.0 / 128 : 0.51 / 127;
                    right = right && std::abs(out.get(r * outputs + n) - sum) <= unit * sizes + 1e-4;
                }
            }
            const std::string label = "quantized linear " + std::to_string(bits) + " bits, rows of kind " +
                                      std::to_string(kind) + ", " + std::to_string(rows) + "x" + std::to_string(depth) +
                                      "x" + std::to_string(outputs);
            expect(right, name(label));
            Array last(dtype, depth);
            std::memcpy(last.data(), static_cast<char*>(x.data()) + x.bytes() - last.bytes(), last.bytes());
            const Array alone = quantized_linear(q, last, 1, depth, kind);
            expect(
                std::memcmp(
                    alone.data(), static_cast<char*>(out.data()) + out.bytes() - alone.bytes(), alone.bytes()
                ) == 0,
                name(label + ", a row alone")
            );
        }
        const std::vector<int64_t> ids{0, outputs - 1};
        Array rows_out(PAGED_F32, 2 * depth);
        PagedQuantizedEmbedding read{&q.packed, ids.data(), rows_out.data(), 2, depth, depth, PAGED_F32};
        call(table.quantized_embedding, &read);
        bool right = true;
        for (int64_t k = 0; k < depth; k++) {
            right = right && std::abs(rows_out.get(k) - q.weight[static_cast<size_t>(k)]) <= 1e-5;
            right =
                right &&
                std::abs(rows_out.get(depth + k) - q.weight[static_cast<size_t>((outputs - 1) * depth + k)]) <= 1e-5;
        }
        expect(right, name("rows of a quantized table"));
    }

    void check_norm(int64_t rows, int64_t features) const {
        Array x(dtype, rows * features), residual(dtype, rows * features), weight(PAGED_F32, features);
        x.fill(4);
        residual.fill(5);
        weight.fill(6);
        Array out(dtype, rows * features), sum(dtype, rows * features);
        PagedNorm params{x.data(),   residual.data(), static_cast<const float*>(weight.data()),
                         out.data(), sum.data(),      rows,
                         features,   features,        features,
                         features,   features,        1e-5f,
                         dtype};
        call(table.norm, &params);
        bool right = true;
        for (int64_t r = 0; r < rows; r++) {
            double squares = 0;
            for (int64_t i = 0; i < features; i++) {
                squares += sum.get(r * features + i) * sum.get(r * features + i);
                right = right &&
                        close(sum.get(r * features + i), x.get(r * features + i) + residual.get(r * features + i), 0);
            }
            for (int64_t i = 0; i < features; i++) {
                const double want = sum.get(r * features + i) /
                                    std::sqrt(squares / static_cast<double>(features) + 1e-5) * weight.get(i);
                right = right && close(out.get(r * features + i), want, 0);
            }
        }
        expect(right, name("norm of " + std::to_string(features)));
        Array gated(dtype, rows * features / 2);
        PagedGated gate{x.data(), gated.data(), rows, features / 2, features, features / 2, PAGED_SILU, dtype};
        call(table.gated, &gate);
        for (int64_t i = 0; features % 2 == 0 && i < rows * features / 2; i++) {
            const int64_t at = i / (features / 2) * features + i % (features / 2);
            const double value = x.get(at), want = value / (1 + std::exp(-value)) * x.get(at + features / 2);
            expect(close(gated.get(i), want, 0), name("gated"));
        }
    }

    // Rows [begin, length) of one sequence of `length` tokens.
    Array attend(
        const Array& q, const Array& key, const Array& value, const std::vector<int32_t>& blocks, int64_t begin,
        int64_t length, int64_t heads, int64_t kv_heads, int64_t size, int64_t block_size, int64_t window
    ) const {
        const int64_t rows = length - begin, width = heads * size;
        Array queries(dtype, rows * width), out(dtype, rows * width);
        const size_t item = dtype == PAGED_F32 ? 4 : 2;
        std::memcpy(
            queries.data(), static_cast<char*>(q.data()) + static_cast<size_t>(begin * width) * item, queries.bytes()
        );
        const std::vector<int32_t> starts{0, static_cast<int32_t>(rows)}, lens{static_cast<int32_t>(length)};
        PagedAttention p{};
        p.q = queries.data();
        p.key = key.data();
        p.value = value.data();
        p.block_table = blocks.data();
        p.query_start = starts.data();
        p.seq_lens = lens.data();
        p.out = out.data();
        p.rows = rows;
        p.num_seqs = 1;
        p.table_stride = static_cast<int64_t>(blocks.size());
        p.num_heads = heads;
        p.num_kv_heads = kv_heads;
        p.head_dim = size;
        p.block_size = block_size;
        p.q_stride = p.out_stride = width;
        p.window = window;
        p.scale = 0.3f;
        p.dtype = dtype;
        p.tile_rows = table.attention_tile_rows(&p);
        std::vector<int64_t> tiles;
        for (int64_t first = 0; first < rows; first += p.tile_rows) {
            tiles.push_back(first);
        }
        p.tiles = tiles.data();
        p.num_tiles = static_cast<int64_t>(tiles.size());
        call(table.attention, &p);
        p.num_splits = (length + PAGED_SPLIT_TOKENS - 1) / PAGED_SPLIT_TOKENS;
        Array parts(PAGED_F32, rows * heads * p.num_splits * (size + 2)), joined(dtype, rows * width);
        p.partial = static_cast<float*>(parts.data());
        p.out = joined.data();
        call(table.attention, &p);
        call(table.attention_join, &p);
        expect(joined.same(out), name("attention in parts"));
        if (rows == 1 && window == 0 && length >= PAGED_SPLIT_TOKENS) {
            attend_shared(p, out);
        }
        return out;
    }

    // The decode of `p`, whose answer is known, as three sequences over the same blocks, of which the second one does
    // not share.
    void attend_shared(PagedAttention p, const Array& known) const {
        const int64_t width = p.num_heads * p.head_dim, splits = p.seq_lens[0] / PAGED_SPLIT_TOKENS;
        Array queries(dtype, 3 * width), out(dtype, 3 * width), joined(dtype, 3 * width);
        std::vector<int32_t> blocks;
        blocks.reserve(static_cast<size_t>(3 * p.table_stride));  // no room behind the last table
        for (size_t i = 0; i < 3; i++) {
            std::memcpy(static_cast<char*>(queries.data()) + i * known.bytes(), p.q, known.bytes());
            blocks.insert(blocks.end(), p.block_table, p.block_table + p.table_stride);
        }
        const std::vector<int32_t> starts{0, 1, 2, 3}, lens(3, p.seq_lens[0]), members{0, 2};
        const std::vector<int32_t> shared_splits{static_cast<int32_t>(splits), 0, static_cast<int32_t>(splits)};
        const std::vector<int64_t> tiles{0, int64_t{1} << 32, int64_t{2} << 32};
        std::vector<PagedSharedPart> shared;
        for (int32_t split = 0; split < splits; split++) {
            shared.push_back({2, split, 0, 2});
        }
        Array parts(PAGED_F32, 3 * p.num_heads * p.num_splits * (p.head_dim + 2));
        Array shared_parts(PAGED_F32, 3 * p.num_heads * splits * (p.head_dim + 2));
        p.q = queries.data();
        p.block_table = blocks.data();
        p.query_start = starts.data();
        p.seq_lens = lens.data();
        p.out = out.data();
        p.rows = p.num_seqs = p.num_tiles = 3;
        p.tiles = tiles.data();
        p.partial = nullptr;
        p.shared = shared.data();
        p.num_shared = p.most_shared = splits;
        p.members = members.data();
        p.shared_splits = shared_splits.data();
        p.shared_partial = static_cast<float*>(shared_parts.data());
        call(table.attention_shared, &p);
        call(table.attention, &p);
        p.partial = static_cast<float*>(parts.data());
        p.out = joined.data();
        call(table.attention, &p);
        call(table.attention_join, &p);
        bool same = joined.same(out);
        for (size_t i = 0; i < 3; i++) {
            same = same &&
                   std::memcmp(static_cast<char*>(out.data()) + i * known.bytes(), known.data(), known.bytes()) == 0;
        }
        expect(same, name("attention over shared blocks"));
    }

    void check_attention(
        int64_t length, int64_t heads, int64_t kv_heads, int64_t size, int64_t block_size, int64_t window
    ) const {
        const int64_t num_blocks = (length + block_size - 1) / block_size,
                      cells = num_blocks * kv_heads * block_size * size;
        Array q(dtype, length * heads * size), key(dtype, cells), value(dtype, cells);
        q.fill(7);
        key.fill(8);
        value.fill(9);
        std::vector<int32_t> blocks;
        for (int64_t i = 0; i < num_blocks; i++) {
            blocks.push_back(static_cast<int32_t>(num_blocks - 1 - i));
        }
        const Array out = attend(q, key, value, blocks, 0, length, heads, kv_heads, size, block_size, window);
        auto cell = [&](int64_t head, int64_t at) {
            return ((blocks[static_cast<size_t>(at / block_size)] * kv_heads + head) * block_size + at % block_size) *
                   size;
        };
        bool right = true;
        for (int64_t row = 0; row < length; row += 1 + length / 40) {
            for (int64_t h = 0; h < heads; h++) {
                const int64_t kv = h / (heads / kv_heads), low = window > 0 && row >= window ? row - window + 1 : 0;
                std::vector<double> sums(static_cast<size_t>(size));
                double total = 0;
                for (int64_t at = low; at <= row; at++) {
                    double score = 0;
                    for (int64_t d = 0; d < size; d++) {
                        score += q.get((row * heads + h) * size + d) * key.get(cell(kv, at) + d);
                    }
                    const double weight = std::exp(score * 0.3);
                    total += weight;
                    for (int64_t d = 0; d < size; d++) {
                        sums[static_cast<size_t>(d)] += weight * value.get(cell(kv, at) + d);
                    }
                }
                for (int64_t d = 0; d < size; d++) {
                    right = right &&
                            close(out.get((row * heads + h) * size + d), sums[static_cast<size_t>(d)] / total, 0.5);
                }
            }
        }
        expect(right, name("attention of " + std::to_string(length)));
        const Array last = attend(q, key, value, blocks, length - 1, length, heads, kv_heads, size, block_size, window);
        expect(
            std::memcmp(last.data(), static_cast<char*>(out.data()) + out.bytes() - last.bytes(), last.bytes()) == 0,
            name("attention of a row alone")
        );
    }

    void check_rope(int64_t rows, int64_t heads, int64_t kv_heads, int64_t size, int64_t block_size) const {
        const int64_t all = heads + 2 * kv_heads, num_blocks = (rows + block_size - 1) / block_size;
        Array qkv(dtype, rows * all * size), q(dtype, rows * heads * size), cos(PAGED_F32, rows * size / 2),
            sin(PAGED_F32, rows * size / 2);
        Array norm(PAGED_F32, size), key(dtype, num_blocks * kv_heads * block_size * size), value(dtype, key.count());
        qkv.fill(10);
        norm.fill(11);
        for (int64_t i = 0; i < cos.count(); i++) {
            cos.set(i, static_cast<float>(std::cos(0.1 * static_cast<double>(i))));
            sin.set(i, static_cast<float>(std::sin(0.1 * static_cast<double>(i))));
        }
        std::vector<int64_t> positions, slots;
        for (int64_t row = 0; row < rows; row++) {
            positions.push_back(row);
            slots.push_back(row);
        }
        PagedRope p{};
        p.qkv = qkv.data();
        p.positions = positions.data();
        p.slot_mapping = slots.data();
        p.cos = static_cast<const float*>(cos.data());
        p.sin = static_cast<const float*>(sin.data());
        p.q_norm = p.k_norm = static_cast<const float*>(norm.data());
        p.q = q.data();
        p.key = key.data();
        p.value = value.data();
        p.rows = rows;
        p.num_heads = heads;
        p.num_kv_heads = kv_heads;
        p.head_dim = size;
        p.block_size = block_size;
        p.qkv_stride = all * size;
        p.q_stride = heads * size;
        p.norm_eps = 1e-6f;
        p.dtype = dtype;
        call(table.rope, &p);
        bool right = true;
        for (int64_t row = 0; row < rows; row++) {
            const int64_t from = row * all * size;
            double squares = 0;
            for (int64_t d = 0; d < size; d++) {
                squares += qkv.get(from + d) * qkv.get(from + d);
            }
            const double factor = 1 / std::sqrt(squares / static_cast<double>(size) + 1e-6);
            for (int64_t d = 0; d < size / 2; d++) {
                const double low = qkv.get(from + d) * factor * norm.get(d),
                             high = qkv.get(from + size / 2 + d) * factor * norm.get(size / 2 + d);
                const double c = cos.get(row * size / 2 + d), s = sin.get(row * size / 2 + d);
                right =
                    right && close(q.get(row * heads * size + d), low * c - high * s, std::abs(low) + std::abs(high));
            }
        }
        expect(right, name("rope"));
    }

    void check_sampling(int64_t size) const {
        Array logits(PAGED_F32, 8 * size);
        logits.fill(12, 3.0);
        std::vector<PagedSampleRow> rows(8);
        std::vector<int64_t> tokens(8), faults(8), ranks(8), top_ids(40);
        std::vector<double> logprobs(8), top(40);
        const std::vector<int32_t> known{1, 2, 3, 1};
        for (int64_t i = 0; i < 8; i++) {
            PagedSampleRow& row = rows[static_cast<size_t>(i)];
            row = {};
            row.logit_row = i;
            row.temperature = i % 2;
            row.top_p = i % 3 == 1 ? 0.8 : 1.0;
            row.top_k = i % 4 == 3 ? 5 : 0;
            row.repetition_penalty = i == 6 ? 1.5 : 1.0;
            row.frequency_penalty = i == 7 ? 0.5 : 0.0;
            row.tokens = known.data();
            row.position = 4;
            row.num_allowed = -1;
            row.num_top = 5;
        }
        PagedSample p{
            static_cast<const float*>(logits.data()),
            rows.data(),
            8,
            size,
            size,
            5,
            tokens.data(),
            faults.data(),
            logprobs.data(),
            ranks.data(),
            top_ids.data(),
            top.data()
        };
        call(table.sample, &p);
        int64_t best = 0;
        for (int64_t i = 1; i < size; i++) {
            best = logits.get(i) > logits.get(best) ? i : best;
        }
        expect(tokens[0] == best && ranks[0] == 1 && (size < 5 || top_ids[0] == best), name("greedy"));
        for (int64_t i = 0; i < 8; i++) {
            expect(faults[static_cast<size_t>(i)] == 0 && tokens[static_cast<size_t>(i)] < size, name("sampled token"));
        }
    }

    void all() const {
        for (int64_t rows : {1, 2, 5, 17, 33, 97}) {
            check_linear(rows, 33, 50);
            check_linear(rows, 64, 96);
        }
        check_linear(3, 1, 1);
        check_linear(130, 70, 20);
        check_chain();
        for (int64_t rows : {1, 3, 7, 18, 37, 70}) {
            check_quantized(rows, 100, 33, 4, 32, false);
            check_quantized(rows, 192, 64, 4, 128, true);
            check_quantized(rows, 130, 20, 8, 48, false);
        }
        check_quantized(300, 64, 96, 4, 64, false);
        check_quantized(5, 40, 16, 8, 16, true);
        check_norm(5, 1);
        check_norm(5, 50);
        check_norm(3, 64);
        check_attention(1, 1, 1, 2, 1, 0);
        check_attention(45, 3, 1, 64, 16, 0);
        check_attention(300, 4, 2, 10, 8, 0);
        check_attention(256, 4, 2, 10, 8, 0);
        check_attention(290, 2, 2, 80, 32, 20);
        check_rope(5, 3, 1, 64, 2);
        check_rope(3, 2, 2, 6, 16);
        if (dtype == PAGED_F32) {
            check_sampling(1);
            check_sampling(77);
            check_sampling(3000);
        }
    }
};

// A strip of GPTQ against the plain update: each error is taken from all later features at once. Bit by bit.
void check_gptq(int64_t features, int64_t columns) {
    Numbers numbers(static_cast<uint64_t>(columns));
    const auto floats = [&](int64_t count, float low, float high) {
        std::vector<float> made(static_cast<size_t>(count));
        for (float& value : made) {
            value = low + (high - low) * static_cast<float>(0.5 * numbers.next() + 0.5);
        }
        return made;
    };
    std::vector<float> left = floats(features * columns, -1, 1), unit = floats(features * features, -0.1f, 0.1f);
    const std::vector<float> state = left, scales = floats(2 * columns, 0.05f, 0.3f);
    std::vector<float> zeros = floats(2 * columns, 0, 15), errors(left.size());
    std::vector<uint8_t> codes(left.size());
    std::vector<int64_t> groups(static_cast<size_t>(features));
    for (float& zero : zeros) {
        zero = std::nearbyint(zero);
    }
    for (int64_t i = 0; i < features; i++) {
        groups[static_cast<size_t>(i)] = i * 2 / features;
    }
    paged::gptq_strip(
        paged::GptqStrip<float>{
            state.data(), unit.data(), scales.data(), zeros.data(), groups.data(), errors.data(), codes.data(),
            features, columns, columns, features, 15.0f
        }
    );
    bool right = true;
    for (int64_t i = 0; i < features; i++) {
        for (int64_t c = 0; c < columns; c++) {
            const auto at = static_cast<size_t>(i * columns + c);
            const auto group = static_cast<size_t>(i * 2 / features * columns + c);
            const float code = std::nearbyint(left[at] / scales[group]) + zeros[group];
            const float kept = code < 0 ? 0 : code > 15 ? 15 : code;
            const float error = left[at] - (kept - zeros[group]) * scales[group];
            right = right && static_cast<float>(codes[at]) == kept && errors[at] == error;
            for (int64_t j = i + 1; j < features; j++) {
                left[static_cast<size_t>(j * columns + c)] -= unit[static_cast<size_t>(i * features + j)] * error;
            }
        }
    }
    expect(right, "gptq " + std::to_string(features) + " x " + std::to_string(columns));
}

// A kernel whose first item waits until the others of its call are done.
struct Stalled {
    static constexpr int64_t ITEMS = 64;
    std::atomic<int64_t> others{0};
    std::atomic<bool> was_alone{false};

    static int64_t items(const void*) { return ITEMS; }
    static int64_t grain(const void*) { return 1; }
    static void run(const void* params, int64_t first, int64_t last, void*) {
        auto& self = *static_cast<Stalled*>(const_cast<void*>(params));
        if (first > 0) {
            self.others += last - first;
            return;
        }
        const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (self.others < ITEMS - 1 && !self.was_alone) {
            self.was_alone = std::chrono::steady_clock::now() > limit;
            std::this_thread::yield();
        }
    }
};

// A thread that the system, or a neighbour on its core, keeps from running holds up the item that it is in, no more.
void check_stalls() {
    const PagedKernel kernel{Stalled::items, Stalled::grain, Stalled::run};
    for (int threads : {2, 3, 5}) {
        paged::Pool pool(threads, {});
        for (int round = 0; round < 20; round++) {
            Stalled calls[2];
            const paged::Call both[] = {{&kernel, &calls[0]}, {&kernel, &calls[1]}};
            pool.run(both, 2);
            const bool held_up = calls[0].was_alone || calls[1].was_alone;
            expect(!held_up, std::to_string(threads) + " threads, one of them stalled");
            if (held_up) {
                return;  // it took a minute
            }
        }
    }
}

}  // namespace

int main() {
    paged::Pool pool(2, {});
    check_stalls();
    check_gptq(1, 1);
    check_gptq(32, 96);
    check_gptq(20, 70);
    for (const std::string& isa : paged::available_isas()) {
        const PagedTable* table = paged::load_table(isa);
        const int before = checks;
        for (int32_t dtype : {PAGED_F32, PAGED_BF16}) {
            Checker{*table, pool, dtype}.all();
        }
        std::printf("%s: %d checks\n", isa.c_str(), checks - before);
    }
    std::printf("%d checks, %d failed\n", checks, failures);
    return failures == 0 && checks > 0 ? 0 : 1;
}
