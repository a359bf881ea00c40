// What the machine can do: the roofs that benchmarks draw.

// Runs `iterations` of independent multiply-adds; returns the floating-point operations done.
inline int64_t probe_fma(int64_t iterations) {
  constexpr int kChains = kRegisterRows * kColumns;  // as many as a register tile has
  Vec<float> c[kChains];
#pragma GCC unroll 32
  for (int i = 0; i < kChains; ++i) c[i] = splat(1.0f + static_cast<float>(i));
  const Vec<float> a = splat(0.999f), b = splat(0.001f);
  for (int64_t n = 0; n < iterations; ++n)
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) c[i] = c[i] * a + b;
  Vec<float> sum = c[0];
  for (int i = 1; i < kChains; ++i) sum += c[i];
  float lane[kLanes<float>];
  store(lane, sum);
  asm volatile("" : : "g"(lane) : "memory");  // the result counts as used
  return iterations * kChains * kLanes<float> * 2;
}

inline double probe_read(const void* data, int64_t bytes) {
  constexpr int kStreams = 8;
  const auto* p = static_cast<const float*>(data);
  const int64_t n = bytes / 4, step = kStreams * kLanes<float>;
  Vec<float> sum[kStreams] = {};
  int64_t i = 0;
  for (; i + step <= n; i += step)
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; ++s) sum[s] += load(p + i + s * kLanes<float>);
  double total = 0;
  for (int s = 0; s < kStreams; ++s) total += sum_lanes<float>(sum[s]);
  for (; i < n; ++i) total += p[i];
  return total;
}
