// Digests of words on CUDA: one pass at the speed of the memory, no host synchronisation, and one
// launch for many tensors.
#include "../digest.h"

#include "launch.cuh"

namespace truncdet {
namespace {

constexpr int kVectorBytes = 16;
constexpr int64_t kVectorsPerThread = 4;
constexpr int64_t kMaxDigestBlocks = 2048;  // of one tensor
// Tensors of one launch: the table is an argument of the kernel, and those have 4 KiB.
constexpr int kFew = 8, kMany = 128;

// What a launch reads: tensor i is done by the blocks from first[i] to first[i + 1].
template <int kTensors>
struct Table {
  const void* words[kTensors];
  int64_t count[kTensors];
  unsigned first[kTensors + 1];
  uint8_t bytes[kTensors];  // of a word
  int tensors;
};

template <class T>
struct alignas(kVectorBytes) Words {
  T word[kVectorBytes / sizeof(T)];
};

// A thread's part of the sum. A view may start anywhere, but at a multiple of its own element:
// words before the first multiple of 16 bytes and after the last whole vector are taken one by one,
// the rest in loads of 16 bytes.
template <class T>
__device__ uint64_t part_of(const T* words, int64_t count, int64_t start, int64_t thread,
                            int64_t stride) {
  constexpr int kEach = kVectorBytes / sizeof(T);
  const int past = static_cast<int>(reinterpret_cast<uintptr_t>(words) % kVectorBytes / sizeof(T));
  const int64_t lead = past == 0 ? 0 : kEach - past;
  const int64_t begin = lead < count ? lead : count;
  const int64_t vectors = (count - begin) / kEach;
  uint64_t total = 0;
  const Words<T>* whole = reinterpret_cast<const Words<T>*>(words + begin);
  for (int64_t at = thread; at < vectors; at += stride) {
    const Words<T> loaded = whole[at];
    for (int i = 0; i < kEach; ++i) {
      total += digest_term(loaded.word[i], start + begin + at * kEach + i);
    }
  }
  const int64_t end = begin + vectors * kEach, single = begin + (count - end);
  for (int64_t at = thread; at < single; at += stride) {
    const int64_t i = at < begin ? at : end + (at - begin);
    total += digest_term(words[i], start + i);
  }
  return total;
}

template <int kTensors>
__global__ void digest_kernel(const __grid_constant__ Table<kTensors> table, int64_t start,
                              unsigned long long* sums) {
  // The last tensor whose first block is not after this one; tensors without words have no block.
  int mine = 0, above = table.tensors;
  while (above - mine > 1) {
    const int middle = (mine + above) / 2;
    if (table.first[middle] <= blockIdx.x) {
      mine = middle;
    } else {
      above = middle;
    }
  }
  const int64_t local = blockIdx.x - table.first[mine];
  const int64_t blocks = table.first[mine + 1] - table.first[mine];
  const int64_t thread = local * blockDim.x + threadIdx.x, stride = blocks * blockDim.x;
  const void* words = table.words[mine];
  const int64_t count = table.count[mine];
  uint64_t total = 0;
  switch (table.bytes[mine]) {
    case 1:
      total = part_of(static_cast<const uint8_t*>(words), count, start, thread, stride);
      break;
    case 2:
      total = part_of(static_cast<const int16_t*>(words), count, start, thread, stride);
      break;
    case 4:
      total = part_of(static_cast<const int32_t*>(words), count, start, thread, stride);
      break;
    default:
      total = part_of(static_cast<const int64_t*>(words), count, start, thread, stride);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    total += __shfl_down_sync(0xffffffffu, static_cast<unsigned long long>(total), offset);
  }
  __shared__ unsigned long long block;
  if (threadIdx.x == 0) block = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicAdd(&block, static_cast<unsigned long long>(total));
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(sums + mine, block);
}

unsigned blocks_of(const Tensor& tensor) {
  const int64_t count = tensor.numel();
  if (count == 0) return 0;
  const int64_t vectors = count * tensor.element_size() / kVectorBytes;
  const int64_t items = vectors > 0 ? vectors / kVectorsPerThread + 1 : count;
  const int64_t wanted = (items + kThreads - 1) / kThreads;
  return static_cast<unsigned>(wanted < kMaxDigestBlocks ? wanted : kMaxDigestBlocks);
}

// Digests `tensors` of them, whose sums lie one after the other; all are on the current device.
template <int kTensors>
void launch(const Tensor* from, int tensors, int64_t start, unsigned long long* sums,
            cudaStream_t stream) {
  Table<kTensors> table;
  unsigned blocks = 0;
  for (int i = 0; i < tensors; ++i) {
    const int64_t bytes = from[i].element_size();
    TRUNCDET_DISPATCH_WORDS(bytes, [&] { table.words[i] = const_data<word_t>(from[i]); });
    table.count[i] = from[i].numel();
    table.bytes[i] = static_cast<uint8_t>(bytes);
    table.first[i] = blocks;
    blocks += blocks_of(from[i]);
  }
  table.first[tensors] = blocks;
  table.tensors = tensors;
  if (blocks == 0) return;
  digest_kernel<kTensors><<<blocks, kThreads, 0, stream>>>(table, start, sums);
  TRUNCDET_LAUNCH_CHECK();
}

unsigned long long* slot_of(const Tensor& sums, int64_t slot) {
  return reinterpret_cast<unsigned long long*>(mutable_data<int64_t>(sums)) + slot;
}

void digest_words_cuda(Tensor words, Tensor sums, int64_t slot, int64_t start) {
  check_digest(words, sums, slot, start);
  const DeviceGuard guard(words.get_device_index());
  launch<1>(&words, 1, start, slot_of(sums, slot), current_stream(words));
}

void digest_many_cuda(std::vector<Tensor> tensors, Tensor sums, int64_t slot) {
  check_digest_many(tensors, sums, slot);
  if (tensors.empty()) return;
  const DeviceGuard guard(sums.get_device_index());
  const cudaStream_t stream = current_stream(sums);
  unsigned long long* sum = slot_of(sums, slot);
  const size_t count = tensors.size();
  if (count == 1) return launch<1>(tensors.data(), 1, 0, sum, stream);
  if (count <= kFew) return launch<kFew>(tensors.data(), static_cast<int>(count), 0, sum, stream);
  for (size_t done = 0; done < count; done += kMany) {
    const size_t left = count - done, taken = left < kMany ? left : kMany;
    launch<kMany>(tensors.data() + done, static_cast<int>(taken), 0, sum + done, stream);
  }
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CUDA, m) {
  m.impl("_digest_words", TORCH_BOX(&truncdet::digest_words_cuda));
  m.impl("_digest_many", TORCH_BOX(&truncdet::digest_many_cuda));
}
