// The inner steps of GPTQ on arrays of Python.
#include "../core/gptq.hpp"

#include "objects.hpp"

namespace paged::binding {

namespace {

template <class T>
void run_strip(
    const View& state, const View& unit, const View& scales, const View& zeros, const View& groups, const View& errors,
    const View& codes, int64_t top
) {
    constexpr int64_t item = sizeof(T);
    GptqStrip<T> strip{};
    strip.state = state.data<T>();
    strip.unit = unit.data<T>();
    strip.scales = scales.data<T>();
    strip.zeros = zeros.data<T>();
    strip.groups = groups.data<int64_t>();
    strip.errors = errors.data<T>();
    strip.codes = codes.data<uint8_t>();
    strip.features = state.size(0);
    strip.columns = state.size(1);
    strip.state_stride = state.stride_bytes(0) / item;
    strip.unit_stride = unit.stride_bytes(0) / item;
    strip.top = static_cast<T>(top);
    const WithoutGil unlocked;
    gptq_strip(strip);
}

template <class T>
void run_losses(
    const View& weights, const View& scales, const View& zeros, const View& importance, const View& losses, int64_t top
) {
    GptqGroups<T> groups{};
    groups.weights = weights.data<T>();
    groups.scales = scales.data<T>();
    groups.zeros = zeros.data<T>();
    groups.importance = importance.data<T>();
    groups.losses = losses.data<T>();
    groups.rows = weights.size(0);
    groups.size = weights.size(1);
    groups.top = static_cast<T>(top);
    const WithoutGil unlocked;
    gptq_losses(groups);
}

// Bytes of an element of weights: 4 or 8.
int64_t item_bytes(const View& weights, const char* shape) {
    require(weights.dimensions() == 2 && weights.count() > 0, shape);
    const int64_t item = weights.bytes() / weights.count();
    require(item == 4 || item == 8, "weights are float32 or float64");
    return item;
}

int64_t largest_code(int64_t top) {
    require(top >= 1 && top <= 255, "codes from 0 to " + std::to_string(top));
    return top;
}

bool is_matrix(const View& view, int64_t rows, int64_t columns, int64_t item) {
    return view.dimensions() == 2 && view.size(0) == rows && view.size(1) == columns &&
           (columns <= 1 || view.stride_bytes(1) == item);
}

}  // namespace

// state, unit, scales, zeros, groups, errors, codes, top
PyObject* gptq_strip_of(PyObject*, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 8);
    View state(arguments.object(0), 0, "state");
    const int64_t item = item_bytes(state, "state is [features, columns]");
    const int64_t features = state.size(0), columns = state.size(1);
    View unit(arguments.object(1), item, "unit"), scales(arguments.object(2), item, "scales");
    View zeros(arguments.object(3), item, "zeros"), groups(arguments.object(4), 8, "groups");
    View errors(arguments.object(5), item, "errors", true), codes(arguments.object(6), 1, "codes", true);
    const int64_t top = largest_code(arguments.integer(7));
    require(is_matrix(state, features, columns, item), "a feature's weights lie side by side");
    require(is_matrix(unit, features, features, item), "unit is [features, features]");
    scales.contiguous("scales");
    zeros.contiguous("zeros");
    require(
        scales.dimensions() == 2 && scales.size(1) == columns && zeros.count() == scales.count(),
        "scales and zero points are [groups, columns]"
    );
    errors.contiguous("errors").at_least(features * columns, "errors");
    codes.contiguous("codes").at_least(features * columns, "codes");
    groups.contiguous("groups").at_least(features, "groups");
    for (int64_t i = 0; i < features; i++) {
        const int64_t group = groups.data<int64_t>()[i];
        require(group >= 0 && group < scales.size(0), "group " + std::to_string(group));
    }
    const auto run = item == 4 ? run_strip<float> : run_strip<double>;
    run(state, unit, scales, zeros, groups, errors, codes, top);
    return none();
}

// weights, scales, zeros, importance, losses, top
PyObject* gptq_losses_of(PyObject*, PyObject* const* values, Py_ssize_t count) {
    const Arguments arguments(values, count, 6);
    View weights(arguments.object(0), 0, "weights");
    const int64_t item = item_bytes(weights, "weights are [rows, features of a group]");
    View scales(arguments.object(1), item, "scales"), zeros(arguments.object(2), item, "zeros");
    View importance(arguments.object(3), item, "importance"), losses(arguments.object(4), item, "losses", true);
    weights.contiguous("weights");
    scales.contiguous("scales").at_least(weights.size(0), "scales");
    zeros.contiguous("zeros").at_least(weights.size(0), "zeros");
    importance.contiguous("importance").at_least(weights.size(1), "importance");
    losses.contiguous("losses").at_least(weights.size(0), "losses");
    const auto run = item == 4 ? run_losses<float> : run_losses<double>;
    run(weights, scales, zeros, importance, losses, largest_code(arguments.integer(5)));
    return none();
}

}  // namespace paged::binding
