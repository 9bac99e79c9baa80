// The weights of an axis as tables in device memory, made by one small launch before the gather.
#pragma once

#include "../resample_host.h"
#include "launch.cuh"

namespace truncdet {

template <class C>
struct DeviceAxis {
  ResampleAxis<C> axis;
  C* weights;            // [out, taps]
  int32_t* first;        // [out]: the first cell of an output
  OutputRange* outputs;  // [in]
};

template <class C>
struct DeviceTables {
  DeviceAxis<C> axis[3];

  // Every part starts at a whole number of doubles.
  static int64_t rounded(int64_t bytes) { return (bytes + 7) / 8 * 8; }
  static int64_t weight_bytes(const ResampleAxis<C>& a) {
    return rounded(int64_t(a.out) * a.taps() * int64_t(sizeof(C)));
  }
  static int64_t first_bytes(const ResampleAxis<C>& a) {
    return rounded(int64_t(a.out) * int64_t(sizeof(int32_t)));
  }

  int64_t bytes() const {
    int64_t total = 0;
    for (const DeviceAxis<C>& table : axis) {
      total += weight_bytes(table.axis) + first_bytes(table.axis) +
               int64_t(table.axis.in) * int64_t(sizeof(OutputRange));
    }
    return total;
  }

  void place(void* memory) {
    char* at = static_cast<char*>(memory);
    for (DeviceAxis<C>& table : axis) {
      table.weights = reinterpret_cast<C*>(at);
      at += weight_bytes(table.axis);
      table.first = reinterpret_cast<int32_t*>(at);
      at += first_bytes(table.axis);
      table.outputs = reinterpret_cast<OutputRange*>(at);
      at += int64_t(table.axis.in) * int64_t(sizeof(OutputRange));
    }
  }
};

template <class C>
__global__ void __launch_bounds__(kThreads) resample_tables_kernel(DeviceTables<C> tables) {
  const DeviceAxis<C>& table = tables.axis[blockIdx.y];
  const ResampleAxis<C>& a = table.axis;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < int64_t(a.in) + a.out;
       i += int64_t(gridDim.x) * kThreads) {
    // i counts the cells first, then the outputs.
    if (i < a.in) {
      table.outputs[i] = outputs_of(a, static_cast<int32_t>(i));
      continue;
    }
    const int32_t o = static_cast<int32_t>(i - a.in);
    const OutputWeights<C> found = output_weights(a, o);
    table.first[o] = found.first;
    for (int tap = 0; tap < a.taps(); ++tap) {
      table.weights[int64_t(o) * a.taps() + tap] = found.weight[tap];
    }
  }
}

template <class C>
void fill_tables(const DeviceTables<C>& tables, cudaStream_t stream) {
  int64_t longest = 1;
  for (const DeviceAxis<C>& table : tables.axis) {
    const int64_t items = int64_t(table.axis.in) + table.axis.out;
    if (items > longest) longest = items;
  }
  resample_tables_kernel<<<dim3(blocks_for(longest), 3), kThreads, 0, stream>>>(tables);
  TRUNCDET_LAUNCH_CHECK();
}

// Quotient and remainder of numbers that nearly always fit in 32 bits, where division is cheap.
__device__ inline int64_t divide(int64_t number, int64_t by, int64_t* rest) {
  const int64_t quotient = ((number | by) >> 32) == 0
                               ? int64_t(static_cast<uint32_t>(number) / static_cast<uint32_t>(by))
                               : number / by;
  *rest = number - quotient * by;
  return quotient;
}

}  // namespace truncdet
