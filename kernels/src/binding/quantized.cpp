// Quantized weights as arguments, and their packing.
#include "objects.hpp"

namespace paged::binding {

namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void check_bytes(const Memory& memory, int64_t expected, const char* name) {
    require(
        static_cast<int64_t>(memory.size()) == expected, std::string(name) + " of a quantized weight have " +
                                                             std::to_string(memory.size()) + " bytes, expected " +
                                                             std::to_string(expected)
    );
}

}  // namespace

QuantizedArguments::QuantizedArguments(const Arguments& arguments, Py_ssize_t first) : weight{}, columns(nullptr) {
    const Memory &codes = memory_of(arguments.object(first)), &scales = memory_of(arguments.object(first + 1)),
                 &zeros = memory_of(arguments.object(first + 2));
    weight.codes = reinterpret_cast<const uint8_t*>(codes.data());
    weight.scales = scales.data();
    weight.zeros = zeros.data();
    weight.out_features = arguments.integer(first + 4);
    weight.depth = arguments.integer(first + 5);
    weight.group_size = arguments.integer(first + 6);
    weight.bits = static_cast<int32_t>(arguments.integer(first + 7));
    weight.half_scales = arguments.truth(first + 8);
    weight.float_offsets = arguments.truth(first + 9);
    require(weight.bits == 4 || weight.bits == 8, "packed codes have 4 or 8 bits");
    require(
        weight.out_features >= 1 && weight.depth >= PAGED_QUANTIZED_K && weight.depth % PAGED_QUANTIZED_K == 0,
        "a quantized weight is " + std::to_string(weight.out_features) + " x " + std::to_string(weight.depth) +
            ": whole numbers of " + std::to_string(PAGED_QUANTIZED_K) + " input features"
    );
    require(
        weight.group_size >= 16 && weight.group_size % 16 == 0,
        "a group has " + std::to_string(weight.group_size) + " input features: a multiple of 16"
    );
    const int64_t padded = round_up(weight.out_features, PAGED_BLOCK_N);
    const int64_t groups = padded * (round_up(weight.depth, weight.group_size) / weight.group_size);
    check_bytes(codes, padded * weight.depth * weight.bits / 8, "the codes");
    check_bytes(scales, groups * (weight.half_scales ? 2 : 4), "the scales");
    check_bytes(zeros, groups * (weight.float_offsets ? 4 : 1), "the zero points");
    if (arguments.object(first + 3) != Py_None) {
        const Memory& order = memory_of(arguments.object(first + 3));
        check_bytes(order, weight.depth * 4, "the columns");
        columns = reinterpret_cast<const int32_t*>(order.data());
    }
}

// A weight's ten arguments, row_offset, in_features, codes [rows, in_features] uint8, scales [rows, groups] float32,
// zeros [rows, groups] uint8 or float32
PyObject* pack_quantized(PyObject* self, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, QuantizedArguments::COUNT + 5);
    const QuantizedArguments packed(arguments, 0);
    const PagedQuantizedWeight& weight = packed.weight;
    PagedQuantizedPack params{};
    params.codes = const_cast<uint8_t*>(weight.codes);
    params.scales = const_cast<void*>(weight.scales);
    params.zeros = const_cast<void*>(weight.zeros);
    params.columns = packed.columns;
    params.depth = weight.depth;
    params.bits = weight.bits;
    params.half_scales = weight.half_scales;
    params.float_offsets = weight.float_offsets;
    params.row_offset = arguments.integer(10);
    params.in_features = arguments.integer(11);
    params.packed_groups = round_up(weight.depth, weight.group_size) / weight.group_size;
    View codes(arguments.object(12), 1, "codes"), scales(arguments.object(13), 4, "scales");
    View zeros(arguments.object(14), weight.float_offsets ? 4 : 1, "zeros");
    require(codes.dimensions() == 2 && scales.dimensions() == 2, "codes and scales have rows");
    params.rows = codes.size(0);
    params.groups = scales.size(1);
    params.source = codes.contiguous("codes").data<uint8_t>();
    params.source_scales = scales.contiguous("scales").data<float>();
    params.source_zeros = zeros.contiguous("zeros").data<void>();
    require(
        params.row_offset >= 0 && params.row_offset + params.rows <= weight.out_features && params.in_features >= 1 &&
            (params.columns != nullptr || params.in_features <= weight.depth) && params.groups <= params.packed_groups,
        "rows " + std::to_string(params.row_offset) + " to " + std::to_string(params.row_offset + params.rows) +
            " do not fit a quantized weight of " + std::to_string(weight.out_features)
    );
    require(
        codes.size(1) == params.in_features && scales.size(0) == params.rows &&
            zeros.count() == params.rows * params.groups,
        "codes, scales and zero points differ in shape"
    );
    for (int64_t k = 0; params.columns != nullptr && k < params.depth; k++) {
        require(params.columns[k] < params.in_features, "input feature " + std::to_string(params.columns[k]));
    }
    RuntimeObject& runtime = self_of<RuntimeObject>(self);
    const Busy busy(runtime);
    const WithoutGil unlocked;
    runtime.run(runtime.table->quantized_pack, &params);
    return nullptr;
}

}  // namespace paged::binding
