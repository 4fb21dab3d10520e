// The channel between Prague's group generator and its clients: its tags, counted from the channel's base, and its
// name.
#pragma once

namespace torchext {

inline constexpr int kGeneratorRequestTag = 0;
inline constexpr int kGeneratorDeliveryTag = 1;
// As errors name it.
inline constexpr const char* kGeneratorName = "the group generator";

}  // namespace torchext
