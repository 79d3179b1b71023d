// Memory that asynchronous copies touch is touched on behalf of the kernel: this file is compiled with the sanitizers
// that the kernels are compiled with.
#include "state.hpp"

namespace emulation {

void spoil(const Copy& copy) {
    auto* destination = static_cast<volatile unsigned char*>(copy.destination);
    for (int i = 0; i < copy.bytes; i++)
        destination[i] = 0xff;
}

void apply(const Copy& copy) {
    auto* destination = static_cast<volatile char*>(copy.destination);
    const auto* source = static_cast<const volatile char*>(copy.source);
    for (int i = 0; i < copy.bytes; i++)
        destination[i] = i < copy.valid ? source[i] : char{0};
}

}  // namespace emulation
