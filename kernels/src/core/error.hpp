// The core's one exception: a caller's mistake or a refusal of the system, with the numbers.
#pragma once

#include <stdexcept>
#include <string>

namespace paged {

class Error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// What the caller promises always to keep was not kept: a bug of ours, not a mistake of a user.
class Broken : public std::logic_error {
public:
    using std::logic_error::logic_error;
};

inline void require(bool condition, const std::string& message) {
    if (!condition) {
        throw Error(message);
    }
}

}  // namespace paged
