// Decoding with keys of 192 and values of 192 dimensions.
#include "decode.cuh"

namespace attnkit::cuda {
template cudaError_t decode_dims<192, 192>(const DecodeParams&, cudaStream_t);
}  // namespace attnkit::cuda
