// The table of this variant: the library's only export.
#include "tables.hpp"

#define PAGED_TEXT_(x) #x
#define PAGED_TEXT(x) PAGED_TEXT_(x)

namespace paged::PAGED_VARIANT {
namespace {

// Filled when it is first asked for, not at load time: the kernels are constants of other files.
PagedTable make_table() {
    return {
        PAGED_ABI_VERSION,
        PAGED_TEXT(PAGED_VARIANT),
        EMBEDDING,
        NORM,
        LINEAR,
        ROPE,
        ATTENTION,
        ATTENTION_SHARED,
        ATTENTION_JOIN,
        GATED,
        ADD,
        SELECT,
        PACK,
        SAMPLE,
        LOGPROBS,
        attention_tile_rows,
        PREPARE,
        QUANTIZED_LINEAR,
        QUANTIZED_EMBEDDING,
        QUANTIZED_PACK,
    };
}

}  // namespace
}  // namespace paged::PAGED_VARIANT

extern "C" __attribute__((visibility("default"))) const PagedTable* paged_cpu_table() {
    static const PagedTable table = paged::PAGED_VARIANT::make_table();
    return &table;
}
