// Sums at vertices, in two passes over the pixels: the largest contribution to each row of values
// (the row of a vertex is a segment with a scale of its own), then integer sums, then one rounding.
//
// Pixels of one triangle lie side by side, so a warp takes a patch of 8 x 4 pixels and lanes with
// the same key (triangle or vertex) add up among themselves before one of them goes to memory.
// Integer sums have the same bits in any grouping.
#pragma once

#include "../render_pixel.h"
#include "prepare.cuh"

namespace truncdet {

constexpr unsigned kAllLanes = 0xffffffffu;

// A contiguous tensor of rows of four values that one load can take.
inline Tensor packed(const Tensor& tensor) {
  const Tensor whole = torch::stable::contiguous(tensor);
  return is_aligned(whole.const_data_ptr(), kPackBytes) ? whole : torch::stable::clone(whole);
}

inline Tensor new_bytes(const Tensor& beside, int64_t bytes) {
  return torch::stable::empty({&bytes, 1}, ScalarType::Byte, std::nullopt, beside.device(),
                              std::nullopt, std::nullopt);
}

template <class C>
__device__ __forceinline__ void load_four(const C* from, C* to) {
  const Pack<C, 4> pack = load_pack<C, 4>(from);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = pack.at[i];
}
template <class C>
__device__ __forceinline__ void store_four(const C* from, C* to) {
  Pack<C, 4> pack;
#pragma unroll
  for (int i = 0; i < 4; ++i) pack.at[i] = from[i];
  *reinterpret_cast<Pack<C, 4>*>(to) = pack;
}

// Where a thread's pixel lies: a warp covers 8 x 4 pixels, a block of kThreads 16 x 16.
struct PixelTiles {
  static constexpr int kSide = 16;
  int64_t images, height, width;
  int64_t across, down, total;  // tiles of a row, rows of tiles, tiles of all images
  Divider by_across, by_down;

  PixelTiles(int64_t images, int64_t height, int64_t width)
      : images(images),
        height(height),
        width(width),
        across((width + kSide - 1) / kSide),
        down((height + kSide - 1) / kSide),
        total(images * down * across),
        by_across(across, total + 1),
        by_down(down, total + 1) {}
  unsigned blocks() const { return static_cast<unsigned>(total < kMaxBlocks ? total : kMaxBlocks); }
};

struct TilePixel {
  int64_t image, index;  // index: of all images' pixels
  int64_t x, y;
  bool inside;  // the last tiles reach beyond the image
};

// The pixel of this thread in tile number `tile` = (image * down + row) * across + column.
__device__ __forceinline__ TilePixel tile_pixel(const PixelTiles& t, int64_t tile) {
  const int64_t row = t.by_across.quotient(tile), column = tile - row * t.across;
  const int64_t image = t.by_down.quotient(row);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t x = column * PixelTiles::kSide + warp % 2 * 8 + lane % 8;
  const int64_t y = (row - image * t.down) * PixelTiles::kSide + warp / 2 * 4 + lane / 8;
  return {image, (image * t.height + y) * t.width + x, x, y, x < t.width && y < t.height};
}

// Lanes that hold the same key. All 32 lanes of a warp make it together and call its members
// together; lanes that are not active stay alone and hold nothing.
class WarpGroup {
 public:
  __device__ __forceinline__ WarpGroup(bool active, uint64_t key) {
    const unsigned lane = threadIdx.x % 32;
    unsigned later = __match_any_sync(kAllLanes, active ? key : ~uint64_t(0));
    if (!active) later = 1u << lane;
    // A tree over the ranks inside the group: in every round the lanes of even rank take over what
    // the next one holds, and those of odd rank are done.
    unsigned rank = __popc(later & ((1u << lane) - 1u));
    leader_ = active && rank == 0;
    later &= ~((2u << lane) - 1u);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      next_[r] = __ffs(static_cast<int>(later)) - 1;
      if (__any_sync(kAllLanes, later != 0)) rounds_ = r + 1;
      later &= __ballot_sync(kAllLanes, (rank & 1u) == 0);
      rank /= 2;
    }
  }

  // The one lane of the group that acts for all.
  __device__ __forceinline__ bool leader() const { return leader_; }

  // The leader gets the sum, modulo 2^64, or the maximum over its group; the others get nothing
  // that can be used.
  __device__ __forceinline__ int64_t sum(int64_t value) const {
    auto word = static_cast<unsigned long long>(value);
    each_round([&](int next) {
      const auto other = __shfl_sync(kAllLanes, word, next & 31);
      if (next >= 0) word += other;
    });
    return static_cast<int64_t>(word);
  }
  __device__ __forceinline__ uint32_t max(uint32_t value) const { return largest(value); }
  __device__ __forceinline__ uint64_t max(uint64_t value) const {
    return largest(static_cast<unsigned long long>(value));
  }

 private:
  static constexpr int kRounds = 5;

  template <class F>
  __device__ __forceinline__ void each_round(F f) const {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (r < rounds_) f(next_[r]);  // the number of rounds is the warp's
    }
  }
  template <class W>
  __device__ __forceinline__ W largest(W word) const {
    each_round([&](int next) {
      const W other = __shfl_sync(kAllLanes, word, next & 31);
      if (next >= 0 && other > word) word = other;
    });
    return word;
  }

  int next_[kRounds];  // -1: nobody
  int rounds_ = 0;
  bool leader_;
};

// Sums of rows of values: the buffers of one call, carved from one allocation.
template <class C>
struct VertexSums {
  using Word = typename Format<C>::Word;
  int64_t* high = nullptr;        // [rows, components]
  int64_t* low = nullptr;         // [rows, components], or null with one limb
  Word* amax = nullptr;           // [rows] largest finite magnitude word of a contribution
  uint32_t* nonfinite = nullptr;  // not 0 if any contribution is NaN or infinite
  Flags flags;                    // in the output, [rows, components]
  int headroom = 0;
  int64_t cells = 0;

  static constexpr bool kTwoLimbs = std::is_same_v<C, double>;
  static int64_t bytes(int64_t rows, int64_t components) {
    return (kTwoLimbs ? 16 : 8) * rows * components + static_cast<int64_t>(sizeof(Word)) * rows + 4;
  }

  // `memory`: bytes(rows, components) bytes that are zero, aligned to 8. `out`: the results.
  VertexSums(void* memory, int64_t rows, int64_t components, int headroom, const Tensor& out)
      : headroom(headroom), cells(rows * components) {
    high = static_cast<int64_t*>(memory);
    low = kTwoLimbs ? high + cells : nullptr;
    amax = reinterpret_cast<Word*>(high + (kTwoLimbs ? 2 : 1) * cells);
    nonfinite = reinterpret_cast<uint32_t*>(amax + rows);
    flags = {static_cast<char*>(out.mutable_data_ptr()), static_cast<int>(out.element_size())};
  }
  VertexSums() = default;

  __device__ __forceinline__ Quantiser<C> quantiser(int64_t row) const {
    return Quantiser<C>(Scale<C>(exponent_above<C>(amax[row]), headroom));
  }
};

// The first pass. Notes become clear here, by all threads of the launch; they are only written in
// the second pass.
template <class C>
__device__ __forceinline__ void clear_flags(const VertexSums<C>& sums) {
  zero_bytes(sums.flags.output, sums.cells * sums.flags.element,
             static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
             static_cast<int64_t>(gridDim.x) * blockDim.x);
}

// What one thread's contributions to one row look like.
template <class C>
struct LargestContribution {
  typename Format<C>::Word largest = 0;
  bool nonfinite = false;

  __device__ __forceinline__ void see(C contribution) {
    const auto word = magnitude_word<C>(contribution);
    const bool finite = word < infinity_word<C>();
    nonfinite |= !finite;
    largest = finite && word > largest ? word : largest;
  }
};

// All lanes of a warp together; lanes of one group name the same row.
template <class C>
__device__ __forceinline__ void merge_largest(const VertexSums<C>& sums, const WarpGroup& group,
                                              int64_t row, const LargestContribution<C>& seen) {
  const auto word = group.max(seen.largest);
  // Looking first saves most of the atomics where many pixels name one vertex.
  if (group.leader() && word > __ldcg(sums.amax + row)) max_word(sums.amax + row, word);
  if (__any_sync(kAllLanes, seen.nonfinite) && threadIdx.x % 32 == 0) {
    atomicOr(sums.nonfinite, 1u);
  }
}

// The second pass: adds one contribution of every active lane. All lanes of a warp together; lanes
// of one group name the same cell, and those that are not active bring +0.
template <class C>
__device__ __forceinline__ void add_contribution(const VertexSums<C>& sums, const WarpGroup& group,
                                                 int64_t cell, const Quantiser<C>& quantiser,
                                                 C contribution) {
  int64_t high = 0, low = 0;
  if (is_finite(contribution)) {
    const C normal = quantiser.normalise(contribution);
    high = quantiser.quantise(normal);
    if constexpr (VertexSums<C>::kTwoLimbs) low = quantiser.quantise_rest(normal, high);
  } else {
    sums.flags.template add<C>(cell, nonfinite_flag(contribution));
  }
  high = group.sum(high);
  if (group.leader() && high != 0) add_int64(sums.high + cell, high);
  if constexpr (VertexSums<C>::kTwoLimbs) {
    low = group.sum(low);
    if (group.leader() && low != 0) add_int64(sums.low + cell, low);
  }
}

// The final rounding.
template <class C>
__global__ void __launch_bounds__(kThreads)
    vertex_finish_kernel(VertexSums<C> sums, Divider by_components, C* out) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const bool flagged = *sums.nonfinite != 0;
  for (int64_t cell = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       cell < sums.cells; cell += stride) {
    const int64_t row = by_components.quotient(cell);
    const Scale<C> scale(exponent_above<C>(sums.amax[row]), sums.headroom);
    const uint32_t flags = flagged ? sums.flags.read(cell) : 0u;
    constexpr bool kTwoLimbs = VertexSums<C>::kTwoLimbs;
    out[cell] = finish_cell<C>(C(0), sums.high[cell], kTwoLimbs ? sums.low[cell] : 0, kTwoLimbs,
                               flags, scale);
  }
}

template <class C>
void launch_vertex_finish(const VertexSums<C>& sums, int64_t components, const Tensor& out,
                          cudaStream_t stream) {
  if (sums.cells == 0) return;
  vertex_finish_kernel<C><<<blocks_for(sums.cells), kThreads, 0, stream>>>(
      sums, Divider(components, sums.cells), mutable_data<C>(out));
  TRUNCDET_LAUNCH_CHECK();
}

}  // namespace truncdet
