// mma.sync and ldmatrix, with the fragment layouts of the PTX manual.
#include <bit>

#include <cuda_fp16.h>

#include "sanitizers.h"
#include "scheduler.h"

namespace emulator {
namespace {

float widened(Half type, uint32_t bits) {
  if (type == Half::kBFloat16) return std::bit_cast<float>(bits << 16);
  __half_raw raw;
  raw.x = static_cast<unsigned short>(bits);
  return __half2float(__half(raw));
}

}  // namespace

// d[16, 8] += a[16, 16] b[16, 8].  Lane 4 g + t holds rows g and g + 8 of a (columns 2 t, 2 t + 1
// and the same + 8), column g of b (rows likewise), and columns 2 t, 2 t + 1 of rows g and g + 8 of
// d.
void mma_m16n8k16(Half type, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  Place place) {
  const uint32_t own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const Lanes lanes = meet(~0u, WarpOp::kMma, own, sizeof own, place);
  if (lanes.live != ~0u) fail("mma in a warp of which lanes have exited", place);
  const auto get = [&](unsigned from, unsigned reg, unsigned high) {
    uint32_t word;
    __builtin_memcpy(&word, lanes.deposit[from] + 4 * reg, 4);
    return widened(type, high ? word >> 16 : word & 0xffff);
  };
  const unsigned g = lane() / 4, t = lane() % 4;
  for (unsigned k = 0; k < 16; ++k) {
    const unsigned pair = k % 8 / 2, high = k % 2, half = k / 8;
    const float row[2] = {get(g * 4 + pair, 2 * half, high), get(g * 4 + pair, 2 * half + 1, high)};
    const float column[2] = {get((2 * t) * 4 + pair, 4 + half, high),
                             get((2 * t + 1) * 4 + pair, 4 + half, high)};
    for (int i = 0; i < 4; ++i) d[i] = __builtin_fmaf(row[i / 2], column[i % 2], d[i]);
  }
}

// Matrix m of 8 x 8 has the row addresses that lanes 8 m to 8 m + 7 bring.
void load_matrices(uint32_t* r, int count, bool transposed, const void* row, Place place) {
  if (reinterpret_cast<uintptr_t>(row) % 16) fail("ldmatrix: a row is not 16-byte aligned", place);
  const Lanes lanes = meet(~0u, WarpOp::kLoadMatrix, &row, sizeof row, place);
  if (lanes.live != ~0u) fail("ldmatrix in a warp of which lanes have exited", place);
  const unsigned g = lane() / 4, t = lane() % 4;
  for (int m = 0; m < count; ++m) {
    r[m] = 0;
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned y = transposed ? 2 * t + i : g, x = transposed ? g : 2 * t + i;
      const uint16_t* p;
      __builtin_memcpy(&p, lanes.deposit[8 * m + y], sizeof p);
      note_read(p + x, sizeof *p);
      r[m] |= static_cast<uint32_t>(p[x]) << 16 * i;
    }
  }
}

}  // namespace emulator
