// Digests of words on the CPU.
#include "../digest.h"

namespace truncdet {
namespace {

void digest_words_cpu(Tensor words, Tensor sums, int64_t slot, int64_t start) {
  check_digest(words, sums, slot, start);
  uint64_t total = 0;
  TRUNCDET_DISPATCH_WORDS(words.element_size(), [&] {
    const word_t* from = const_data<word_t>(words);
    const int64_t count = words.numel();
    for (int64_t i = 0; i < count; ++i) total += digest_term(from[i], start + i);
  });
  mutable_data<uint64_t>(sums)[slot] += total;
}

}  // namespace
}  // namespace truncdet

STABLE_TORCH_LIBRARY_IMPL(truncdet, CPU, m) {
  m.impl("_digest_words", TORCH_BOX(&truncdet::digest_words_cpu));
}
