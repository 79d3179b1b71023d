#include "isa.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>

#include "error.hpp"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#endif

namespace paged {

namespace {

#if defined(__x86_64__)

// Tiles need the processor, the system's saving of their registers, and a permission that is asked for once a process.
bool amx_allowed() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & (1u << 22)) || !(d & (1u << 24)) || !(d & (1u << 25))) {
        return false;
    }
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) {
        return false;
    }
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    constexpr unsigned tile_state = (1u << 17) | (1u << 18);
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return (low & tile_state) == tile_state && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512cd");
}

bool supported(const std::string& isa) {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (isa == "avx2") {
        return avx2;
    }
    if (isa == "avx512") {
        return avx2 && has_avx512();
    }
    const bool bf16 =
        avx2 && has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (isa == "avx512bf16") {
        return bf16;
    }
    if (isa == "amx") {
        return bf16 && amx_allowed();
    }
    return isa == "portable";
}

#elif defined(__aarch64__)

// NEON is part of every 64-bit Arm, its dot product of int8 of most.
bool supported(const std::string& isa) {
    return isa == "neon" || isa == "portable" || (isa == "neondot" && (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0);
}

#else

bool supported(const std::string& isa) { return isa == "portable"; }

#endif

const std::vector<std::string>& known() {
    static const std::vector<std::string> names{"amx", "avx512bf16", "avx512", "avx2", "neondot", "neon", "portable"};
    return names;
}

std::string folder() {
    Dl_info info;
    require(
        dladdr(reinterpret_cast<void*>(&folder), &info) != 0 && info.dli_fname != nullptr,
        "the folder of the native kernels cannot be found"
    );
    std::string path = info.dli_fname;
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : path.substr(0, slash);
}

std::string library(const std::string& isa) { return folder() + "/_cpu_" + isa + ".so"; }

bool built(const std::string& isa) { return access(library(isa).c_str(), R_OK) == 0; }

std::string joined(const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& name : names) {
        text += (text.empty() ? "" : ", ") + name;
    }
    return text.empty() ? "none" : text;
}

std::string choose(std::string isa) {
    const char* wanted = std::getenv("PAGED_CPU_ISA");
    const bool from_environment = isa.empty() && wanted != nullptr && *wanted != '\0';
    if (from_environment) {
        isa = wanted;
    }
    const std::vector<std::string> available = available_isas();
    require(!available.empty(), "no library of CPU kernels lies in " + folder() + ": build them again");
    if (isa.empty()) {
        return available.front();
    }
    for (const std::string& name : available) {
        if (name == isa) {
            return isa;
        }
    }
    throw Error(
        (from_environment ? "PAGED_CPU_ISA is '" : "the instruction set is '") + isa +
        "': this machine and build run " + joined(available)
    );
}

}  // namespace

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const std::string& isa : known()) {
        if (built(isa) && supported(isa)) {
            names.push_back(isa);
        }
    }
    return names;
}

const PagedTable* load_table(std::string isa) {
    const std::string path = library(choose(std::move(isa)));
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    require(handle != nullptr, "cannot load " + path);
    auto function = reinterpret_cast<PagedTableFunction>(dlsym(handle, "paged_cpu_table"));
    require(function != nullptr, path + " is no library of CPU kernels");
    const PagedTable* table = function();
    require(
        table->abi_version == PAGED_ABI_VERSION, path + " has ABI version " + std::to_string(table->abi_version) +
                                                     ", expected " + std::to_string(PAGED_ABI_VERSION) +
                                                     ": build the kernels again"
    );
    return table;
}

}  // namespace paged
