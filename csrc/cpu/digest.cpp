// Digests of words on the CPU.
#include "../digest.h"

namespace truncdet {
namespace {

uint64_t sum_of(const Tensor& words, int64_t start) {
  uint64_t total = 0;
  TRUNCDET_DISPATCH_WORDS(words.element_size(), [&] {
    const word_t* from = const_data<word_t>(words);
    const int64_t count = words.numel();
    for (int64_t i = 0; i < count; ++i) total += digest_term(from[i], start + i);
  });
  return total;
}

void digest_words_cpu(Tensor words, Tensor sums, int64_t slot, int64_t start) {
  check_digest(words, sums, slot, start);
  mutable_data<uint64_t>(sums)[slot] += sum_of(words, start);
}

void digest_many_cpu(std::vector<Tensor> tensors, Tensor sums, int64_t slot) {
  check_digest_many(tensors, sums, slot);
  uint64_t* sum = mutable_data<uint64_t>(sums) + slot;
  for (const Tensor& tensor : tensors) *sum++ += sum_of(tensor, 0);
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("_digest_words", TORCH_BOX(&truncdet::digest_words_cpu));
  m.impl("_digest_many", TORCH_BOX(&truncdet::digest_many_cpu));
}
