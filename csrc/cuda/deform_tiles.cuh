// How the kernels of deform_conv2d divide an image's samples among blocks.
#pragma once

#include "../deform_sample.h"
#include "accumulate.cuh"
#include "channel_tile.cuh"

namespace truncdet {

TRUNCDET_HD int64_t tiles_of_places(const DeformShape& s) {
  return (s.places() + kTile - 1) / kTile;
}

// Tiles of one image.
TRUNCDET_HD int64_t deform_tiles(const DeformShape& s) {
  return s.groups * tiles_of_places(s) * s.taps();
}

// The taps of a tile come one after the other, since they touch much the same cells.
struct DeformTile {
  int64_t group, tap, first_place;

  __device__ DeformTile(int64_t t, const DeformShape& s) {
    // t = (group * tiles of places + tile of places) * taps + tap
    const int64_t rest = t / s.taps(), tiles = tiles_of_places(s);
    tap = t - rest * s.taps();
    group = rest / tiles;
    first_place = (rest - group * tiles) * kTile;
  }
};

// Tiles along x, images along y; neither may be empty.
inline dim3 deform_grid(const DeformShape& s) {
  const int64_t tiles = deform_tiles(s);
  return dim3(static_cast<unsigned>(tiles < kMaxBlocks ? tiles : kMaxBlocks),
              static_cast<unsigned>(s.images < kMaxSegmentBlocks ? s.images : kMaxSegmentBlocks));
}

}  // namespace truncdet
