// gather and index_select on CUDA. Values are moved as words, whatever their type.
#include "../pick.h"
#include "scatter_params.cuh"

namespace truncdet {
namespace {

template <class Word>
struct PickParams {
  IndexMap map;  // of words
  const Word* input;
  Word* out;
  unsigned* sticky;
  unsigned bit;
};

template <class Word>
__global__ void pick_kernel(PickParams<Word> p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t total = p.map.elements();
  bool bad = false;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < total;
       at += stride) {
    // at = row * width + column
    const int64_t row = p.map.by_width.quotient(at), column = at - row * p.map.width;
    const int64_t key = p.map.key(row, column);
    bad |= key < 0;
    p.out[at] = key < 0 ? Word() : p.input[key * p.map.width + column];
  }
  if (bad && p.bit != 0) set_sticky(p.sticky, static_cast<StickyBit>(p.bit));
}

// A row of `inner` elements as words of `sizeof(Word)` bytes.
template <class Word>
void pick(const Tensor& input, const Tensor& index, const PickShape& s, int64_t bit,
          const Tensor& out) {
  const auto strides = index.strides();
  const int64_t width = s.inner * static_cast<int64_t>(input.element_size()) / sizeof(Word);
  const IndexMap map(const_data<int64_t>(index), {strides[0], strides[1], strides[2]}, s.outer,
                     s.cells, s.count, width);
  pick_kernel<Word><<<blocks_for(map.elements()), kThreads, 0, current_stream(input)>>>(
      {map, const_data<Word>(input), mutable_data<Word>(out), sticky_word(),
       static_cast<unsigned>(bit)});
  TRUNCDET_LAUNCH_CHECK();
}

Tensor pick_cuda(Tensor input, Tensor index, int64_t bit) {
  const PickShape shape = pick_shape(input, index);
  const DeviceGuard guard(input.get_device_index());
  input = torch::stable::contiguous(input);
  Tensor out = torch::stable::new_empty(input, index.sizes());
  if (out.numel() == 0) return out;
  // One index for a whole row moves it in the largest words that fit; else elements move alone.
  const bool rows = shape.inner == 1 || index.strides()[2] == 0;
  const size_t element = input.element_size(), row = element * shape.inner;
  const auto fits = [&](size_t bytes) {
    return element == bytes || (rows && element < bytes && row % bytes == 0 &&
                                is_aligned(input.const_data_ptr(), bytes));
  };
  if (fits(16)) {
    pick<uint4>(input, index, shape, bit, out);
  } else if (fits(8)) {
    pick<uint64_t>(input, index, shape, bit, out);
  } else if (fits(4)) {
    pick<uint32_t>(input, index, shape, bit, out);
  } else if (fits(2)) {
    pick<uint16_t>(input, index, shape, bit, out);
  } else {
    pick<uint8_t>(input, index, shape, bit, out);
  }
  return out;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) { m.impl("_pick", TORCH_BOX(&truncdet::pick_cuda)); }
