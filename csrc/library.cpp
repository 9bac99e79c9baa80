// The operator that says what was built. Schemas of all other operators live in Python, beside
// their reference implementations.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

#ifndef TRUNCDET_CUDA_ARCHS
#define TRUNCDET_CUDA_ARCHS ""
#endif

namespace truncdet {
namespace {

// "cpu" or "cuda:<architectures>".
std::string build_info() {
#if defined(TRUNCDET_WITH_CUDA)
  return std::string("cuda:") + TRUNCDET_CUDA_ARCHS;
#else
  return "cpu";
#endif
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_FRAGMENT(truncdet, m) { m.def("_build_info() -> str"); }

STABLE_TORCH_LIBRARY_IMPL(truncdet, CompositeExplicitAutograd, m) {
  m.impl("_build_info", TORCH_BOX(&truncdet::build_info));
}
