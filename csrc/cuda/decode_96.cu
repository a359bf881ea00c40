// Decoding with keys of 96 and values of 96 dimensions.
#include "decode.cuh"

namespace attnkit::cuda {
template cudaError_t decode_dims<96, 96>(const DecodeParams&, cudaStream_t);
}  // namespace attnkit::cuda
