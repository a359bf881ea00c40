// The head dims of keys and of values that there are kernels for; one decode_*.cu for each.
#pragma once

#ifndef ATTNKIT_HEAD_DIMS
#define ATTNKIT_HEAD_DIMS(X) \
  X(64, 64) X(80, 80) X(96, 96) X(128, 128) X(192, 192) X(256, 256) X(192, 128)
#endif
