// The gradient of interpolation and adaptive average pooling on CUDA: tables of the weights, then a
// gather whose shape follows the sizes.
#include "resample_march.cuh"

namespace truncdet {
namespace {

// Planes (outer positions) a thread serves with the weights it has looked up once, where that
// leaves enough threads.
constexpr int64_t kPlanes = 8;
constexpr int64_t kManyCells = 1 << 22;
// Fewer cells than this, with sums over more lines than that, get a warp each.
constexpr int64_t kFewCells = 1 << 18;
constexpr double kManyLines = 8;
// Small blocks spread few items over the device.
constexpr int64_t kFewItems = 1 << 16;
constexpr int kSmallBlock = 64;
// Cells a thread walks over, so many that few outputs are computed by two threads, or fewer of them
// if there are few threads; below this many threads each cell rather has its own.
constexpr int32_t kMaxStrip = 32, kMinStrip = 4;
constexpr int64_t kEnoughThreads = 1 << 18, kFewThreads = 1 << 15;

template <int kKind, int kHeld, class T>
void launch(const ResampleParams<T>& params, cudaStream_t stream) {
  const int64_t groups = (params.shape.outer + params.planes - 1) / params.planes;
  const int64_t items = groups * params.shape.cells();
  const int threads = items < kFewItems ? kSmallBlock : kThreads;
  resample_kernel<kKind, kHeld, T><<<blocks_for(items, threads), threads, 0, stream>>>(params);
  TRUNCDET_LAUNCH_CHECK();
}

template <int kKind, class T>
void launch_wide(const ResampleParams<T>& params, cudaStream_t stream) {
  const unsigned blocks = blocks_for(params.shape.outer * params.shape.cells(), kThreads / kWarp);
  resample_wide_kernel<kKind, T><<<blocks, kThreads, 0, stream>>>(params);
  TRUNCDET_LAUNCH_CHECK();
}

// The axis to walk along: rows of a map, slices of a volume.
template <class T>
MarchParams<T> march_params(const ResampleParams<T>& params) {
  const ResampleShape& s = params.shape;
  const auto& axis = params.tables.axis;
  const auto &walk = axis[params.flat ? 1 : 0], &middle = axis[params.flat ? 0 : 1];
  const int64_t line = s.in[2] * s.inner, out_line = s.out[2] * s.inner;
  const int64_t columns = s.outer * middle.axis.in * line;
  int32_t strip = kMaxStrip;
  const auto strips = [&] { return (walk.axis.in + strip - 1) / strip; };
  while (strip > kMinStrip && columns * strips() < kEnoughThreads) strip /= 2;
  const int64_t items = columns * strips();
  return {walk,
          middle,
          axis[2],
          params.grad,
          params.out,
          s.inner,
          items,
          line,
          out_line,
          strip,
          strips(),
          Divider(line, items),
          Divider(middle.axis.in, items / line),
          Divider(strips(), s.outer * strips()),
          Divider(s.inner, line)};
}

template <int kKind, int kHeld, int kHeldMiddle, class T>
void launch_march(const MarchParams<T>& p, cudaStream_t stream) {
  if (p.inner == 1) {
    resample_march_kernel<kKind, kHeld, kHeldMiddle, true, T>
        <<<blocks_for(p.items), kThreads, 0, stream>>>(p);
  } else {
    resample_march_kernel<kKind, kHeld, kHeldMiddle, false, T>
        <<<blocks_for(p.items), kThreads, 0, stream>>>(p);
  }
  TRUNCDET_LAUNCH_CHECK();
}

// Whether walking pays, and if so the launch. `columns` and `middle`: outputs of a cell. From eight
// times the size on, a linear cell's many outputs take as long either way.
template <int kKind, class T>
bool march(const ResampleParams<T>& params, double middle, double columns, cudaStream_t stream) {
  const MarchParams<T> p = march_params(params);
  if (p.walk.axis.in < kMinStrip || p.items < kFewThreads) return false;
  if constexpr (kKind == kLinear) {
    if (!params.flat) {
      const double most = middle > columns ? middle : columns;
      if (most > 4) return false;
      most <= 2 ? launch_march<kKind, 2, 2>(p, stream) : launch_march<kKind, 4, 4>(p, stream);
      return true;
    }
  }
  if (!params.flat) return false;
  // Taps of an axis: so many outputs at the size itself, twice or four times as many at larger
  // ones.
  constexpr int kTaps = kKind == kLinear ? 2 : 4;
  if (columns <= kTaps) return launch_march<kKind, kTaps, 1>(p, stream), true;
  if (columns <= 2 * kTaps) return launch_march<kKind, 2 * kTaps, 1>(p, stream), true;
  if (columns <= 4 * kTaps) return launch_march<kKind, 4 * kTaps, 1>(p, stream), true;
  return false;
}

// How many outputs use a cell along an axis: an estimate, on which no bit depends.
template <class C>
double expected_outputs(const ResampleAxis<C>& axis) {
  if (axis.copied) return 1;
  if (axis.kind == kAverage) return 1 + static_cast<double>(axis.out) / axis.in;
  return axis.taps() / static_cast<double>(axis.scale);  // infinite for a scale of zero
}

template <int kKind, class T>
void launch_kind(const ResampleParams<T>& params, cudaStream_t stream) {
  const double rows = expected_outputs(params.tables.axis[1].axis);
  const double columns = expected_outputs(params.tables.axis[2].axis);
  if (rows > kManyLines && params.shape.outer * params.shape.cells() < kFewCells) {
    return launch_wide<kKind>(params, stream);
  }
  if constexpr (kKind != kAverage) {
    if (march<kKind>(params, rows, columns, stream)) return;
  }
  if constexpr (kKind == kAverage) {
    launch<kKind, 2>(params, stream);
  } else {
    const double most = rows > columns ? rows : columns;
    if (most <= 4) return launch<kKind, 4>(params, stream);
    if (most <= 8) return launch<kKind, 8>(params, stream);
    launch<kKind, 16>(params, stream);
  }
}

template <class T>
void run(const Tensor& grad, const Tensor& out, const ResampleShape& shape,
         const ResampleArguments& arguments) {
  using C = typename Format<T>::Compute;
  const cudaStream_t stream = current_stream(grad);
  ResampleParams<T> params{shape, {}, const_data<T>(grad), mutable_data<T>(out), kPlanes, false};
  for (int axis = 0; axis < 3; ++axis) {
    params.tables.axis[axis].axis = resample_axis<C>(shape, arguments, axis);
  }
  const int64_t bytes = params.tables.bytes();
  const Tensor memory = torch::stable::empty({&bytes, 1}, ScalarType::Byte, std::nullopt,
                                             grad.device(), std::nullopt, std::nullopt);
  const ResampleAxis<C>& depth = params.tables.axis[0].axis;
  params.flat = depth.copied && depth.out == 1;
  params.tables.place(memory.mutable_data_ptr());
  fill_tables(params.tables, stream);
  if (shape.outer * shape.cells() < kManyCells) params.planes = 1;
  switch (arguments.kind) {
    case kLinear:
      return launch_kind<kLinear>(params, stream);
    case kCubic:
      return launch_kind<kCubic>(params, stream);
    default:
      return launch_kind<kAverage>(params, stream);
  }
}

Tensor resample_backward_cuda(Tensor grad, int64_t depth, int64_t height, int64_t width,
                              int64_t kind, bool align_corners, double scale_depth,
                              double scale_height, double scale_width, int64_t copied) {
  const ResampleArguments arguments{{depth, height, width},
                                    kind,
                                    align_corners,
                                    {scale_depth, scale_height, scale_width},
                                    copied};
  const ResampleShape shape = resample_shape(grad, arguments);
  const DeviceGuard guard(grad.get_device_index());
  Tensor out = empty_cells(grad, shape);
  if (out.numel() == 0) return out;
  TRUNCDET_DISPATCH(grad.scalar_type(), "_resample_backward",
                    [&] { run<scalar_t>(grad, out, shape, arguments); });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("_resample_backward", TORCH_BOX(&truncdet::resample_backward_cuda));
}
