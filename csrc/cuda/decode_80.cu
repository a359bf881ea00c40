// Decoding with keys of 80 and values of 80 dimensions.
#include "decode.cuh"

namespace attnkit::cuda {
template cudaError_t decode_dims<80, 80>(const DecodeParams&, cudaStream_t);
}  // namespace attnkit::cuda
