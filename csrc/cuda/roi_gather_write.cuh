// A tile's sums, or the cells a NaN or an infinity reached, to the gradient image.
#pragma once

#include "roi_gather_plan.cuh"
#include "rounding.cuh"

namespace truncdet {

// Where a cell of the output is.
template <class T>
__device__ __forceinline__ T* output_cell(const GatherParams<T>& params, int64_t image,
                                          int64_t channel, int y, int x) {
  const RoiAlignShape& shape = params.shape;
  const int64_t cell = y * shape.width + x;
  return params.out + (params.channels_last
                           ? (image * shape.cells() + cell) * shape.channels + channel
                           : (image * shape.channels + channel) * shape.cells() + cell);
}

// The values of cells with flags; others keep what is there.
template <class T, int kPerLane, int kWidth>
__device__ __forceinline__ void write_flags(const GatherParams<T>& params, const GatherTile& tile,
                                            int64_t image,
                                            const unsigned (&flags)[kPerLane][kWidth]) {
  const int lane = threadIdx.x % 32, y = tile.y + static_cast<int>(threadIdx.x) / 32;
  if (y >= params.shape.height) return;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
    for (int x = 0; x < kWidth; ++x) {
      if (flags[i][x] == 0 || 32 * i + lane >= tile.channels || tile.x + x >= params.shape.width) {
        continue;
      }
      *output_cell(params, image, tile.channel + 32 * i + lane, y, tile.x + x) =
          nonfinite_value<T>(flags[i][x]);
    }
  }
}

// Rounds the sums of a tile and writes them, through shared memory, so that a warp writes runs of
// neighbours in either memory order.
template <class T, int kPerLane, int kWidth>
__device__ __forceinline__ void write_sums(const GatherParams<T>& params, const GatherTile& tile,
                                           int64_t image, bool any_hit, float* shared,
                                           const int64_t (&sums)[kPerLane][kWidth]) {
  constexpr int kStage = kWidth + 1;  // padded row of the transposition
  const RoiAlignShape& shape = params.shape;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int y = tile.y + warp;
  const int quantum = tile.scale.quantum();
  // Four neighbours at a time where addresses allow.
  const bool packed = std::is_same_v<T, float> && !params.channels_last && shape.width % 4 == 0 &&
                      reinterpret_cast<uintptr_t>(params.out) % 16 == 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    T* stage = reinterpret_cast<T*>(shared) + warp * 32 * kStage;
    __syncwarp();
    if (!any_hit) {
      // Nothing touches the tile: +0 everywhere.
#pragma unroll
      for (int x = 0; x < kWidth; ++x) stage[lane * kStage + x] = T{};
    } else if (std::is_same_v<T, float> && quantum >= Format<float>::kMinExponent) {
      const float unit = power_of_two(0.f, quantum);
#pragma unroll
      for (int x = 0; x < kWidth; ++x) {
        stage[lane * kStage + x] = round_normal<T>(sums[i][x], unit);
      }
    } else {
#pragma unroll
      for (int x = 0; x < kWidth; ++x) stage[lane * kStage + x] = round_any<T>(sums[i][x], quantum);
    }
    __syncwarp();
    if (y >= shape.height) continue;
    const int channels = tile.channels - 32 * i, cells = static_cast<int>(shape.width) - tile.x;
    if (params.channels_last) {
      T* target = output_cell(params, image, tile.channel + 32 * i + lane, y, tile.x);
#pragma unroll
      for (int x = 0; x < kWidth; ++x) {
        if (lane < channels && x < cells) target[x * shape.channels] = stage[lane * kStage + x];
      }
    } else if (packed) {
      constexpr int kPacks = kWidth / 4;  // of a row
      const int x = lane % kPacks * 4;
      T* target = output_cell(params, image, tile.channel + 32 * i + lane / kPacks, y, tile.x + x);
#pragma unroll
      for (int c = 0; c < 32; c += 32 / kPacks) {
        const float* from =
            reinterpret_cast<const float*>(stage) + (c + lane / kPacks) * kStage + x;
        if (c + lane / kPacks < channels && x < cells) {
          *reinterpret_cast<float4*>(target + c * shape.cells()) =
              make_float4(from[0], from[1], from[2], from[3]);
        }
      }
    } else {
      const int x = lane % kWidth;
      T* target = output_cell(params, image, tile.channel + 32 * i + lane / kWidth, y, tile.x + x);
#pragma unroll
      for (int c = 0; c < 32; c += 32 / kWidth) {
        if (c + lane / kWidth < channels && x < cells) {
          target[c * shape.cells()] = stage[(c + lane / kWidth) * kStage + x];
        }
      }
    }
  }
}

}  // namespace truncdet
