// Blocks that walk over the channels of a tile of locations: a location a lane, a channel a warp.
//
// Tensors that lie channels first are read so, and the sums over channels that come out are those
// of channel_sum.h.
#pragma once

#include "../channel_sum.h"
#include "launch.cuh"

namespace truncdet {

constexpr int kTile = 32;                        // locations of a tile, one a lane
constexpr int kWarps = 8;                        // of a block, unless there are fewer channels
constexpr int kRounds = kChannelLanes / kWarps;  // channels of a warp in a step of kChannelLanes
static_assert(kRounds == 4, "the lanes' sum below is written for four channels a thread");

inline unsigned tile_threads(int64_t channels) {
  return static_cast<unsigned>(kTile *
                               (channels < 1 ? 1 : (channels < kWarps ? channels : kWarps)));
}

// The sum over channels of each location, given to its lane of the first warp. `lanes[r]` of a
// thread is channel_sum's lane number warp + kWarps * r; warps the block does not have count as +0.
// All threads of the block must call it.
template <class C>
__device__ C add_rounds(const C (&lanes)[kRounds], C (*partial)[kTile]) {
  const int lane = threadIdx.x % kTile, warp = threadIdx.x / kTile;
  // Lanes 16 apart, then 8 apart, are this thread's own; 4, 2 and 1 apart are other warps'.
  partial[warp][lane] = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
  __syncthreads();
  for (int half = kWarps / 2; half > 0; half /= 2) {
    if (warp < half) {
      const bool other = warp + half < static_cast<int>(blockDim.x / kTile);
      partial[warp][lane] += other ? partial[warp + half][lane] : C(0);
    }
    __syncthreads();
  }
  return warp == 0 ? partial[0][lane] : C(0);
}

}  // namespace truncdet
