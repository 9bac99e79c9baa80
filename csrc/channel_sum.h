// Sums over channels in one fixed association, which a CPU loop, a warp with a channel a lane and a
// block with a location a lane can all follow: lane j of 32 adds the channels j, j + 32, ... in
// ascending order, starting from +0, then the lanes are added in halves, 16 and 16 down to 1 and 1.
#pragma once

#include "fixedpoint.h"

namespace truncdet {

constexpr int kChannelLanes = 32;

// The sum of all lanes; overwrites them. Addition commutes, so only the pairing matters.
template <class C>
TRUNCDET_HD C add_lanes(C* lanes) {
  for (int half = kChannelLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
  }
  return lanes[0];
}

}  // namespace truncdet
