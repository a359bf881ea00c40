// Arrays as the kernels take them, filled from doubles and read back; threads to run them on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "problem.h"

namespace native {

using attnkit::Array;

inline int64_t bytes_of(DType dtype) {
  if (dtype == DType::kFloat64) return 8;
  if (dtype == DType::kFloat32) return 4;
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? 2 : 1;
}

// float8_e4m3fn: its NaN has all bits set but the sign.
inline double from_fp8(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 0x7f) == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return bits & 0x80 ? -size : size;
}

// A number that the type holds exactly, NaN or infinity.
inline void encode(double x, DType dtype, unsigned char* to) {
  const auto single = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &single, 4);
  uint16_t half = static_cast<uint16_t>(bits >> 16);
  switch (dtype) {
    case DType::kFloat64:
      std::memcpy(to, &x, 8);
      return;
    case DType::kFloat32:
      std::memcpy(to, &single, 4);
      return;
    case DType::kFloat16: {
      const uint16_t sign = half & 0x8000;
      if (!std::isfinite(x))
        half = std::isnan(x) ? 0x7e00 : 0x7c00;
      else
        half = x == 0 ? 0 : static_cast<uint16_t>((bits >> 13 & 0x3ffff) - (112 << 10));
      half |= sign;
      std::memcpy(to, &half, 2);
      return;
    }
    case DType::kBFloat16:
      std::memcpy(to, &half, 2);
      return;
    default:  // bool and the integers
      *to = static_cast<unsigned char>(static_cast<int>(x));
  }
}

inline double decode(const unsigned char* from, DType dtype) {
  double x = 0;
  float single;
  uint16_t half;
  uint32_t bits;
  switch (dtype) {
    case DType::kFloat64:
      std::memcpy(&x, from, 8);
      return x;
    case DType::kFloat32:
      std::memcpy(&single, from, 4);
      return single;
    case DType::kBFloat16:
      std::memcpy(&half, from, 2);
      bits = static_cast<uint32_t>(half) << 16;
      std::memcpy(&single, &bits, 4);
      return single;
    case DType::kFloat16: {
      std::memcpy(&half, from, 2);
      const int exponent = half >> 10 & 31, mantissa = half & 1023;
      if (exponent == 31)
        x = mantissa ? std::numeric_limits<double>::quiet_NaN()
                     : std::numeric_limits<double>::infinity();
      else
        x = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
      return half & 0x8000 ? -x : x;
    }
    case DType::kInt8:
      return static_cast<int8_t>(*from);
    case DType::kFloat8:
      return from_fp8(*from);
    default:
      return *from;
  }
}

// A [batch, head, row, column] array with memory of its own; all NaN (or 255) until filled.
class Tensor {
 public:
  Tensor() = default;
  // With `by_rows`, in memory it is [batch, row, head, column].
  Tensor(int64_t batch, int64_t heads, int64_t rows, int64_t columns, DType dtype,
         bool by_rows = false)
      : bytes(batch * heads * rows * columns * native::bytes_of(dtype), 0xff),
        sizes_{batch, heads, rows, columns} {
    array.dtype = dtype;
    array.batch = heads * rows * columns;
    array.head = by_rows ? columns : rows * columns;
    array.row = by_rows ? heads * columns : columns;
    array.column = 1;
    array.data = bytes.data();
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  Tensor(Tensor&&) = default;  // the bytes stay where they are
  Tensor& operator=(Tensor&&) = default;

  // One of the same shape and type, of dense memory.
  Tensor like() const { return Tensor(sizes_[0], sizes_[1], sizes_[2], sizes_[3], array.dtype); }

  unsigned char* at(int64_t b, int64_t h, int64_t r, int64_t c) {
    return bytes.data() + (b * array.batch + h * array.head + r * array.row + c * array.column) *
                              native::bytes_of(array.dtype);
  }
  Tensor& fill(const std::vector<double>& values) {
    for_each([&](int64_t n, unsigned char* to) { encode(values[n], array.dtype, to); });
    return *this;
  }
  Tensor& clear() {
    std::fill(bytes.begin(), bytes.end(), 0);
    return *this;
  }
  std::vector<double> values() {
    std::vector<double> all;
    for_each([&](int64_t, const unsigned char* from) { all.push_back(decode(from, array.dtype)); });
    return all;
  }
  explicit operator bool() const { return array.data != nullptr; }

  Array array;
  std::vector<unsigned char> bytes;

 private:
  template <class F>
  void for_each(const F& body) {
    int64_t n = 0;
    for (int64_t b = 0; b < sizes_[0]; ++b)
      for (int64_t h = 0; h < sizes_[1]; ++h)
        for (int64_t r = 0; r < sizes_[2]; ++r)
          for (int64_t c = 0; c < sizes_[3]; ++c) body(n++, at(b, h, r, c));
  }
  int64_t sizes_[4] = {};
};

// One thread for every worker, as a pool would have them.
inline void run_on_threads(void (*body)(void*, int), void* context, int workers) {
  std::vector<std::thread> threads;
  for (int w = 1; w < workers; ++w) threads.emplace_back(body, context, w);
  body(context, 0);
  for (std::thread& t : threads) t.join();
}

inline attnkit::Team team_of(int threads) { return {threads, run_on_threads}; }

}  // namespace native
