// 64-bit sums in shared memory, where only 32-bit atomics are native.
#pragma once

#include <cstdint>

namespace truncdet {

// A 64-bit add of two native 32-bit ones: the second takes the carry of the first, and whatever
// interleaves, all carries arrive.
__device__ __forceinline__ void add_shared(uint32_t* low, uint32_t* high, int64_t value) {
  const uint32_t part = static_cast<uint32_t>(value);
  const uint32_t before = atomicAdd(low, part);
  const uint32_t carry = before + part < part ? 1u : 0u;
  const uint32_t rest = static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32) + carry;
  if (rest != 0) atomicAdd(high, rest);
}

__device__ __forceinline__ int64_t shared_sum(uint32_t low, uint32_t high) {
  return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
}

}  // namespace truncdet
