// The gradient of a RoI operator by owners: a block owns a rectangle of cells of a few channels,
// adds what its image's RoIs send there in shared memory, and writes every cell once. No buffer
// beside the output, and no atomics on it.
//
// Unlike the gather of RoIAlign, which keeps its sums in registers, this one suits contributions
// that are few for the cells there are, and whose cells only the data tells.
#pragma once

#include "roi_align_statistics.cuh"
#include "rounding.cuh"
#include "shared_sum.cuh"
#include "vector.cuh"

namespace truncdet {

// Shared memory for the sums of a tile. Four blocks with as much and a little scratch fit a
// multiprocessor of compute capability 9.0; every architecture since 7.5 grants a block 64 KB.
constexpr int64_t kTileBytes = 48 << 10;
constexpr int kTileBlocks = 4;

struct TilePlan {
  int channels;       // of a block
  int height, width;  // cells of a tile; the width is a multiple of 4
  int plane;          // cells of one channel, some of which pad
  int tiles_y, tiles_x;
  int64_t groups;  // of channels

  TRUNCDET_HD int cells() const { return channels * plane; }
};

// Tiles of at most `cells` cells, all channels together: the whole map, or about a square.
inline TilePlan tile_plan(const RoiAlignShape& shape, int64_t channels, int64_t cells) {
  TilePlan plan{};
  plan.channels = static_cast<int>(channels < shape.channels ? channels : shape.channels);
  // Channels lie in different banks where the lanes of a warp have one each.
  const int64_t padding = plan.channels > 1 ? 4 : 0;
  const int64_t room = cells / plan.channels - padding;
  int64_t width = (shape.width + 3) / 4 * 4;
  if (width * shape.height > room) {
    int64_t side = 4;
    while ((side + 4) * (side + 4) <= room) side += 4;
    const int64_t across = (shape.width + side - 1) / side;
    width = ((shape.width + across - 1) / across + 3) / 4 * 4;
  }
  int64_t height = room / width < shape.height ? room / width : shape.height;
  const int64_t down = (shape.height + height - 1) / height;
  height = (shape.height + down - 1) / down;
  plan.height = static_cast<int>(height);
  plan.width = static_cast<int>(width);
  plan.plane = static_cast<int>(height * width + padding);
  plan.tiles_y = static_cast<int>(down);
  plan.tiles_x = static_cast<int>((shape.width + width - 1) / width);
  plan.groups = (shape.channels + plan.channels - 1) / plan.channels;
  return plan;
}

template <class T>
struct TileParams {
  using C = typename Format<T>::Compute;
  T* out;
  RoiAlignShape shape;
  ImageStrides stride;
  bool channels_last;
  RoiStatistics<C> statistics;
  int64_t bins;  // of one RoI that can reach one cell
  TilePlan plan;
  Divider by_channels, by_height, by_width, by_quads;

  TileParams(const Tensor& output, const RoiAlignShape& s, bool last, const RoiStatistics<C>& found,
             int64_t bins_of_cell, int64_t channels, int64_t bytes)
      : out(mutable_data<T>(output)),
        shape(s),
        stride(image_strides(s, last)),
        channels_last(last),
        statistics(found),
        bins(bins_of_cell),
        plan(tile_plan(s, channels, bytes / (2 * static_cast<int64_t>(sizeof(C))))),
        by_channels(plan.channels, plan.cells()),
        by_height(plan.height, plan.cells()),
        by_width(plan.width, plan.cells()),
        by_quads(plan.width / 4, plan.cells()) {}
};

// What a block owns.
struct Tile {
  int64_t image, channel;
  int channels, y, x, height, width;
};

// The RoIs that may be an image's: those of others are among them where lists do not pay.
struct RoiSpan {
  const RoiBounds* list;
  int64_t count;
};
template <class C>
__device__ __forceinline__ RoiSpan image_rois(const RoiStatistics<C>& statistics, int64_t image,
                                              int64_t rois) {
  if (statistics.list == nullptr) return {statistics.bounds, rois};
  const ImageStatistics<C> own = statistics.images[image];
  return {statistics.list + own.offset, own.count};
}

// Adds to the sums of a tile, or notes the cells that a NaN or an infinity reaches.
template <class C, bool kFlags>
struct TileAdder {
  static constexpr int kWords = std::is_same_v<C, double> ? 4 : 2;  // of a cell
  uint32_t* words;  // [kWords][cells]: low and high half of either limb; flags: [cells]
  int cells;
  Quantiser<C> quantiser;
  C low_power, high_power;  // whose product is 2^-e times the quantiser's unit

  __device__ __forceinline__ TileAdder(uint32_t* sums, int count, const Scale<C>& scale)
      : words(sums), cells(count), quantiser(scale) {
    // Between -126 and 211 in float32, between -1022 and 1136 in float64.
    const int power = -scale.quantum(), most = Format<C>::kMaxExponent;
    low_power = power_of_two(C(0), power < most ? power : most);
    high_power = power_of_two(C(0), power < most ? 0 : power - most);
  }

  __device__ __forceinline__ C normalise(C raw) const {
    return is_finite(raw) ? quantiser.normalise(raw) : C(0);
  }

  // `contribution` is of normalise(raw), with a weight that is not zero.
  __device__ __forceinline__ void add(int cell, C contribution, C raw) const {
    if constexpr (kFlags) {
      flag(cell, raw);
    } else {
      const int64_t rounded = quantiser.quantise(contribution);
      add_limbs(cell, rounded,
                kWords == 4 ? quantiser.quantise_rest(contribution, rounded) : int64_t(0));
    }
  }

  // The same with a weight of one: both scalings are exact, and so is their product.
  __device__ __forceinline__ void add_whole(int cell, C raw) const {
    if constexpr (kFlags) {
      flag(cell, raw);
    } else {
      const C scaled = is_finite(raw) ? raw * low_power * high_power : C(0);
      const int64_t rounded = round_to_int64(scaled);
      const C rest = (scaled - static_cast<C>(rounded)) * quantiser.unit;
      add_limbs(cell, rounded, kWords == 4 ? round_to_int64(rest) : int64_t(0));
    }
  }

 private:
  __device__ __forceinline__ void add_limbs(int cell, int64_t high, int64_t low) const {
    add_shared(words + cell, words + cells + cell, high);
    if constexpr (kWords == 4) {
      uint32_t* const rest = words + 2 * cells + cell;
      add_shared(rest, rest + cells, low);
    }
  }
  __device__ __forceinline__ void flag(int cell, C raw) const {
    const uint32_t seen = nonfinite_flag(raw);
    if (seen != 0) atomicOr(words + cell, seen);
  }
};

// Calls store(cell of the tile, place in the output) for every cell, neighbours of the output by
// neighbouring threads.
template <class T, class Store>
__device__ __forceinline__ void for_each_tile_cell(const TileParams<T>& p, const Tile& tile,
                                                   const Store& store) {
  const TilePlan& plan = p.plan;
  const int cells = plan.channels * plan.height * plan.width;
  for (int i = threadIdx.x; i < cells; i += kThreads) {
    // i = (c * height + y) * width + x, or (y * width + x) * channels + c
    int c, at;
    if (p.channels_last) {
      at = static_cast<int>(p.by_channels.small_quotient(i));
      c = i - at * plan.channels;
    } else {
      const int row = static_cast<int>(p.by_width.small_quotient(i));
      c = static_cast<int>(p.by_height.small_quotient(row));
      at = i - c * plan.height * plan.width;
    }
    const int y = static_cast<int>(p.by_width.small_quotient(at)), x = at - y * plan.width;
    if (c >= tile.channels || y >= tile.height || x >= tile.width) continue;
    store(c * plan.plane + at, tile.image * p.stride.image + (tile.channel + c) * p.stride.channel +
                                   (tile.y + y) * p.stride.row + (tile.x + x) * p.stride.column);
  }
}

// Rounds the sums of a tile and writes them, four neighbours at a time where addresses allow.
template <class T, class C>
__device__ __forceinline__ void write_tile(const TileParams<T>& p, const Tile& tile,
                                           const uint32_t* words, const Scale<C>& scale) {
  constexpr bool kTwoLimbs = std::is_same_v<C, double>;
  const TilePlan& plan = p.plan;
  const int cells = plan.cells();
  const Rounding<T> rounding(scale);
  const auto value = [&](int cell) {
    const int64_t high = shared_sum(words[cell], words[cells + cell]);
    const int64_t low =
        kTwoLimbs ? shared_sum(words[2 * cells + cell], words[3 * cells + cell]) : int64_t(0);
    return rounding(high, low);
  };
  const bool packed = !p.channels_last && p.shape.width % 4 == 0 &&
                      reinterpret_cast<uintptr_t>(p.out) % sizeof(Pack<T, 4>) == 0;
  if (!packed) {
    for_each_tile_cell(p, tile, [&](int cell, int64_t place) { p.out[place] = value(cell); });
    return;
  }
  const int quads = plan.width / 4;
  for (int i = threadIdx.x; i < plan.channels * plan.height * quads; i += kThreads) {
    // i = (c * height + y) * quads + x / 4
    const int row = static_cast<int>(p.by_quads.small_quotient(i)), x = 4 * (i - row * quads);
    const int c = static_cast<int>(p.by_height.small_quotient(row)), y = row - c * plan.height;
    if (c >= tile.channels || y >= tile.height || x >= tile.width) continue;
    const int cell = c * plan.plane + y * plan.width + x;
    Pack<T, 4> quad;
#pragma unroll
    for (int j = 0; j < 4; ++j) quad.at[j] = value(cell + j);
    T* const target = p.out + tile.image * p.stride.image + (tile.channel + c) * p.stride.channel +
                      (tile.y + y) * p.stride.row + (tile.x + x);
    *reinterpret_cast<Pack<T, 4>*>(target) = quad;
  }
}

__device__ __forceinline__ void clear_words(uint32_t* words, int count) {
  for (int i = threadIdx.x; i < count / 4; i += kThreads) {
    reinterpret_cast<uint4*>(words)[i] = make_uint4(0, 0, 0, 0);
  }
}

// source.visit(params, tile, scratch, adder) adds everything that reaches the tile. All threads
// take part; it may meet barriers.
template <class T, class Source>
__global__ void __launch_bounds__(kThreads,
                                  sizeof(typename Format<T>::Compute) == 4 ? kTileBlocks : 1)
    roi_tile_kernel(TileParams<T> p, Source source) {
  using C = typename Format<T>::Compute;
  extern __shared__ uint4 tile_memory[];
  uint32_t* const words = reinterpret_cast<uint32_t*>(tile_memory);
  const TilePlan& plan = p.plan;
  const int cells = plan.cells();
  constexpr int kWords = TileAdder<C, false>::kWords;
  void* const scratch = words + kWords * cells;
  const int64_t tiles = int64_t(plan.tiles_y) * plan.tiles_x;
  for (int64_t item = blockIdx.x; item < tiles * plan.groups * p.shape.images; item += gridDim.x) {
    // item = (image * groups + group) * tiles + tile
    const int64_t number = item / tiles, image = number / plan.groups;
    const int tile_number = static_cast<int>(item - number * tiles);
    const int64_t channel = (number - image * plan.groups) * plan.channels;
    const int row = tile_number / plan.tiles_x;
    const int y = row * plan.height, x = (tile_number - row * plan.tiles_x) * plan.width;
    const Tile tile{image,
                    channel,
                    static_cast<int>(min(int64_t(plan.channels), p.shape.channels - channel)),
                    y,
                    x,
                    min(plan.height, static_cast<int>(p.shape.height) - y),
                    min(plan.width, static_cast<int>(p.shape.width) - x)};
    const auto scale = [&] { return p.statistics.images[image].scale(p.bins); };
    clear_words(words, kWords * cells);
    __syncthreads();
    source.visit(p, tile, scratch, TileAdder<C, false>(words, cells, scale()));
    __syncthreads();
    write_tile<T>(p, tile, words, scale());
    __syncthreads();
    if (p.statistics.nonfinite[image] == 0) continue;  // the same for the whole block
    clear_words(words, cells);
    __syncthreads();
    source.visit(p, tile, scratch, TileAdder<C, true>(words, cells, scale()));
    __syncthreads();
    for_each_tile_cell(p, tile, [&](int cell, int64_t place) {
      if (words[cell] != 0) p.out[place] = nonfinite_value<T>(words[cell]);
    });
    __syncthreads();
  }
}

template <class T, class Source>
void launch_tile_sums(const TileParams<T>& params, const Source& source, cudaStream_t stream) {
  using C = typename Format<T>::Compute;
  const TilePlan& plan = params.plan;
  const int bytes = 4 * TileAdder<C, false>::kWords * plan.cells() + Source::kScratchBytes;
  const auto kernel = roi_tile_kernel<T, Source>;
  // Beyond 48 KB a block needs permission.
  TRUNCDET_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int64_t blocks = int64_t(plan.tiles_y) * plan.tiles_x * plan.groups * params.shape.images;
  kernel<<<blocks_for(blocks, 1), kThreads, bytes, stream>>>(params, source);
  TRUNCDET_LAUNCH_CHECK();
}

}  // namespace truncdet
