// Decoding with keys of 256 and values of 256 dimensions.
#include "decode.cuh"

namespace attnkit::cuda {
template cudaError_t decode_dims<256, 256>(const DecodeParams&, cudaStream_t);
}  // namespace attnkit::cuda
