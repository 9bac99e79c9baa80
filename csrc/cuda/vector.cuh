// Index arithmetic and loads that are cheap on a GPU.
#pragma once

#include <cstdint>

namespace truncdet {

constexpr int kPackBytes = 16;  // the widest load of one thread

// Consecutive elements that one instruction loads. The address must be a multiple of the size.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount < kPackBytes ? sizeof(T) * kCount : kPackBytes) Pack {
  T at[kCount];
};
template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* address) {
  return *reinterpret_cast<const Pack<T, kCount>*>(address);
}
inline bool is_aligned(const void* address, size_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// Division of numbers in [0, limit) by a divisor that a whole launch shares: a multiplication and a
// shift where 31 bits are enough. Granlund and Montgomery, "Division by invariant integers using
// multiplication", PLDI 1994, figure 4.1.
class Divider {
 public:
  Divider(int64_t divisor, int64_t limit) : divisor_(divisor < 1 ? 1 : divisor) {
    constexpr int64_t kSmall = int64_t(1) << 31;
    small_ = divisor_ < kSmall && limit <= kSmall;
    if (!small_) return;
    while ((int64_t(1) << shift_) < divisor_) ++shift_;
    const uint64_t beyond = (uint64_t(1) << shift_) - static_cast<uint64_t>(divisor_);
    magic_ = static_cast<uint32_t>((beyond << 32) / static_cast<uint64_t>(divisor_) + 1);
  }

  __device__ __forceinline__ int64_t quotient(int64_t number) const {
    return small_ ? small_quotient(static_cast<uint32_t>(number)) : number / divisor_;
  }
  // For a limit of at most 2^31: no branch.
  __device__ __forceinline__ uint32_t small_quotient(uint32_t number) const {
    return (__umulhi(number, magic_) + number) >> shift_;  // the sum stays below 2^32
  }

 private:
  int64_t divisor_;
  uint32_t magic_ = 0;
  int shift_ = 0;
  bool small_;
};

}  // namespace truncdet
