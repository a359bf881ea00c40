// Names of types, for messages.
#pragma once

#include "problem.h"

namespace native {

inline const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat64:
      return "float64";
    case DType::kInt8:
      return "int8";
    case DType::kFloat8:
      return "float8";
    default:
      return "bool";
  }
}

}  // namespace native
