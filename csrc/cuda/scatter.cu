// scatter_add and index_add, and weighted rows added to rows, by int64 atomics.
#include "../accumulate_rows.h"
#include "../scatter.h"
#include "scatter_launch.cuh"

namespace truncdet {
namespace {

// The buffers of one call; a second segment keeps the statistics of weights.
constexpr int64_t kSegments = 2;

template <class C>
struct Buffers {
  Tensor memory;
  Accumulator<C> sums;

  Buffers(const Tensor& out, bool two_limbs) {
    const int64_t bytes = Accumulator<C>::bytes(out.numel(), kSegments, two_limbs);
    memory = torch::stable::empty({&bytes, 1}, ScalarType::Byte, std::nullopt, out.device(),
                                  std::nullopt, std::nullopt);
    sums = Accumulator<C>(memory.mutable_data_ptr(), out.numel(), kSegments, two_limbs, out);
  }
};

// `input` and `out` are of T, or of T's compute type.
template <class T>
void finish(const Accumulator<typename Format<T>::Compute>& sums,
            const ScaleSource<typename Format<T>::Compute>& scale, const Tensor& input,
            const Tensor& src, const Tensor& out, cudaStream_t stream) {
  using C = typename Format<T>::Compute;
  const int64_t cells = input.numel();
  if (input.scalar_type() == src.scalar_type()) {
    launch_finish<T>({sums, scale, const_data<T>(input), mutable_data<T>(out), 1, cells}, stream);
  } else {
    launch_finish<C>({sums, scale, const_data<C>(input), mutable_data<C>(out), 1, cells}, stream);
  }
}

template <class T>
void accumulate(const Tensor& input, const Tensor& index, const Tensor& src, const ScatterShape& s,
                bool exact, int64_t bit, const Tensor& out) {
  using C = typename Format<T>::Compute;
  const cudaStream_t stream = current_stream(input);
  const Buffers<C> buffers(out, needs_two_limbs<C>(exact));
  const T* values = const_data<T>(src);
  const int bits = headroom(s.count);
  const AmaxParams<T> amax{values, 1, s.contributions(), buffers.sums.amax, buffers.sums.nonfinite};
  launch_prepare(buffers.sums, out.numel(), kSegments, amax, AmaxParams<T>{}, stream);
  const IndexMap map(const_data<int64_t>(index), {s.index_outer, s.index_count, s.index_inner},
                     s.outer, s.cells, s.count, s.inner);
  launch_add<T>({map, values, nullptr, map.rows(), nullptr, nullptr, bits, buffers.sums,
                 sticky_word(), static_cast<unsigned>(bit)},
                input, stream);
  finish<T>(buffers.sums, {buffers.sums.amax, bits}, input, src, out, stream);
}

Tensor accumulate_cuda(Tensor input, Tensor index, Tensor src, bool exact, int64_t bit) {
  const ScatterShape shape = scatter_shape(input, index, src);
  const DeviceGuard guard(input.get_device_index());
  input = torch::stable::contiguous(input);
  src = torch::stable::contiguous(src);
  Tensor out = torch::stable::empty_like(input);
  TRUNCDET_DISPATCH(src.scalar_type(), "_accumulate",
                    [&] { accumulate<scalar_t>(input, index, src, shape, exact, bit, out); });
  return out;
}

template <class T>
void accumulate_rows(const Tensor& input, const Tensor& index, const Tensor& src,
                     const Tensor& rows, const std::optional<Tensor>& weights, const RowsShape& s,
                     const Tensor& out) {
  using C = typename Format<T>::Compute;
  const cudaStream_t stream = current_stream(input);
  const Buffers<C> buffers(out, needs_two_limbs<C>(false));
  const T* values = const_data<T>(src);
  const T* factors = weights.has_value() ? const_data<T>(*weights) : nullptr;
  auto* const amax = buffers.sums.amax;
  auto* const factor_amax = factors != nullptr ? amax + 1 : nullptr;
  const AmaxParams<T> of_values{values, 1, s.sources * s.columns, amax, buffers.sums.nonfinite};
  AmaxParams<T> of_factors{};
  if (factors != nullptr) of_factors = {factors, 1, s.count, factor_amax, buffers.sums.nonfinite};
  launch_prepare(buffers.sums, out.numel(), kSegments, of_values, of_factors, stream);
  const int bits = headroom(s.count);
  const IndexMap map(const_data<int64_t>(index), {0, 1, 0}, 1, s.cells, s.count, s.columns);
  launch_add<T>({map, values, const_data<int64_t>(rows), s.sources, factors, factor_amax, bits,
                 buffers.sums, sticky_word(), 0u},
                input, stream);
  finish<T>(buffers.sums, {amax, bits, nullptr, factor_amax}, input, src, out, stream);
}

Tensor accumulate_rows_cuda(Tensor input, Tensor index, Tensor src, Tensor rows,
                            std::optional<Tensor> weights) {
  const RowsShape shape = rows_shape(input, index, src, rows, weights);
  const DeviceGuard guard(input.get_device_index());
  for (Tensor* tensor : {&input, &index, &src, &rows}) {
    *tensor = torch::stable::contiguous(*tensor);
  }
  if (weights.has_value()) weights = torch::stable::contiguous(*weights);
  Tensor out = torch::stable::empty_like(input);
  TRUNCDET_DISPATCH(src.scalar_type(), "_accumulate_rows", [&] {
    accumulate_rows<scalar_t>(input, index, src, rows, weights, shape, out);
  });
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("_accumulate", TORCH_BOX(&truncdet::accumulate_cuda));
  m.impl("_accumulate_rows", TORCH_BOX(&truncdet::accumulate_rows_cuda));
}
