// Decoding with keys of 64 and values of 64 dimensions.
#include "decode.cuh"

namespace attnkit::cuda {
template cudaError_t decode_dims<64, 64>(const DecodeParams&, cudaStream_t);
}  // namespace attnkit::cuda
