// deform_conv2d, per sample: where one tap of the kernel reads the input, and what it finds there.
// Shared by host and device.
//
// A sample is one (image, offset group, tap, place of the output): bilinear interpolation of the
// group's channels at the tap's regular position plus its offset, times its mask where there is
// one. Formula: Dai et al., "Deformable Convolutional Networks", ICCV 2017, equation 2; the mask:
// Zhu et al., "Deformable ConvNets v2", CVPR 2019, equation 1.
#pragma once

#include "channel_sum.h"
#include "taps.h"

namespace truncdet {

struct DeformShape {
  int64_t images, channels, groups;                       // of offsets
  int64_t size[2], out[2];                                // x, y of the input and of the output
  int64_t kernel[2], stride[2], padding[2], dilation[2];  // x, y

  TRUNCDET_HD int64_t cells() const { return size[0] * size[1]; }
  TRUNCDET_HD int64_t taps() const { return kernel[0] * kernel[1]; }
  TRUNCDET_HD int64_t places() const { return out[0] * out[1]; }
  TRUNCDET_HD int64_t samples() const { return groups * taps() * places(); }  // of an image
  TRUNCDET_HD int64_t group_channels() const { return channels / groups; }
  // A channel's samples are those of its group, and each gives a cell at most weight 1: its four
  // taps are different cells.
  int headroom_bits() const { return headroom(taps() * places()); }

  // The first sample of an image, group and tap; its places follow. The masks lie in this order.
  TRUNCDET_HD int64_t sample(int64_t image, int64_t group, int64_t tap) const {
    return ((image * groups + group) * taps() + tap) * places();
  }
  // The row of the columns with the places of one channel, tap and image.
  TRUNCDET_HD int64_t row(int64_t channel, int64_t tap, int64_t image) const {
    return ((channel * taps() + tap) * images + image) * places();
  }
};

template <class C>
struct DeformSample {
  Axis<C, 2> axis[2];
  bool outside;
};

// A coordinate that is not finite has no taps, and weights that are NaN instead of zero: NaN is
// what it then finds, and infinity what torchvision's formula multiplies with zeros.
template <class C>
TRUNCDET_HD Axis<C, 2> deform_axis(C at, int64_t size) {
  Axis<C, 2> axis = linear_taps(at, size);
  if (!is_finite(at)) axis.weight[0] = axis.weight[1] = canonical_nan<C>();
  return axis;
}

// `offset`: that of y; the one of x is a plane of places later, as torchvision and mmcv have it.
template <class T, class C = typename Format<T>::Compute>
TRUNCDET_HD DeformSample<C> deform_sample(const T* offset, int64_t tap, int64_t place,
                                          const DeformShape& s) {
  const int64_t row = tap / s.kernel[0], column = tap - row * s.kernel[0];
  const int64_t out_y = place / s.out[0], out_x = place - out_y * s.out[0];
  const C y =
      static_cast<C>(out_y * s.stride[1] - s.padding[1] + row * s.dilation[1]) + widen(offset[0]);
  const C x = static_cast<C>(out_x * s.stride[0] - s.padding[0] + column * s.dilation[0]) +
              widen(offset[s.places()]);
  // Written so that NaN is not outside.
  const bool outside =
      y <= C(-1) || y >= static_cast<C>(s.size[1]) || x <= C(-1) || x >= static_cast<C>(s.size[0]);
  return {{deform_axis(x, s.size[0]), deform_axis(y, s.size[1])}, outside};
}

// What a sample finds, without its mask. At -1 the value is zero whatever the cells beside hold,
// but a derivative is not, as in torchvision.
template <class C, class Load>
TRUNCDET_HD Interpolated<C, 2> deform_interpolate(const DeformSample<C>& sample,
                                                  const DeformShape& s, Load load) {
  Interpolated<C, 2> found = interpolate<2>(sample.axis, s.size, load);
  if (sample.outside) found.value = C(0);
  return found;
}

}  // namespace truncdet
