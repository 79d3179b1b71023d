// Which variants of the kernels this machine runs, and their libraries.
#pragma once

#include <string>
#include <vector>

#include "paged/kernels.h"

namespace paged {

// Best first; only those that are built, lie beside this library and that processor and system support.
std::vector<std::string> available_isas();

// The table of a variant; an empty name: PAGED_CPU_ISA from the environment, else the best one. Libraries stay loaded.
const PagedTable* load_table(std::string isa);

}  // namespace paged
