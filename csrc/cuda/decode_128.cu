// Decoding with keys of 128 and values of 128 dimensions.
#include "decode.cuh"

namespace attnkit::cuda {
template cudaError_t decode_dims<128, 128>(const DecodeParams&, cudaStream_t);
}  // namespace attnkit::cuda
