#!/usr/bin/env bash
# Build the tests of the CPU kernels without torch, and run them.
#   tests/native/run.sh plain    [words of names...]   with CXX, or g++
#   tests/native/run.sh clang    [words of names...]
#   tests/native/run.sh thread   [words of names...]   under ThreadSanitizer
#   tests/native/run.sh address  [words of names...]   under AddressSanitizer and UndefinedBehaviorSanitizer
#   tests/native/run.sh aarch64  [words of names...]   for 64-bit Arm, under emulation
# A mode whose tools are missing says so in a line and counts as passed.  MAX_JOBS: compilers at a time.
set -euo pipefail
cd "$(dirname "$0")/../.."
mode=${1:-plain}
[ $# = 0 ] || shift
compiler=${CXX:-g++}
flags="-O1"
run=()
sources=(csrc/cpu/instruction_set.cpp csrc/cpu/memory.cpp tests/native/{main,problem,attention,decode}.cpp)
all=(csrc/cpu/isa_*.cpp)
# What sanitizers and another compiler look for hardly depends on the instruction set.
some=(csrc/cpu/isa_{portable,avx512_bf16,wide_tiles}.cpp tests/native/absent.cpp)
case $mode in
  plain) sources+=("${all[@]}") ;;
  clang)
    compiler=${CLANG:-clang++}
    sources+=("${some[@]}")
    ;;
  thread)
    flags="-O1 -g1 -fsanitize=thread"
    sources+=("${some[@]}")
    export NATIVE_THREADS=${NATIVE_THREADS:-3}
    ;;
  address)
    flags="-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
    sources+=("${some[@]}")
    export NATIVE_THREADS=${NATIVE_THREADS:-2}
    ;;
  aarch64)
    compiler=aarch64-linux-gnu-g++
    flags="-O2 -static"
    sources+=("${some[@]}")
    run=(qemu-aarch64-static)
    export NATIVE_THREADS=${NATIVE_THREADS:-2}  # emulated threads are slow
    ;;
  *)
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
for tool in "$compiler" ${run[@]+"${run[@]}"}; do
  command -v "$tool" >/dev/null || { echo "native $mode: skipped, there is no $tool"; exit 0; }
done
base=build/native/$mode
mkdir -p "$base"
if ! echo 'int main() {}' | $compiler $flags -x c++ - -o "$base/probe" 2>"$base/probe.log"; then
  echo "native $mode: skipped, $compiler cannot link with $flags: $(tail -n 1 "$base/probe.log")"
  exit 0
fi

# -psabi: vectors are only passed between functions of one file
export BUILD="$compiler $flags -std=c++20 -fno-math-errno -ffp-contract=fast -Wall -Wno-psabi -pthread"
# what GCC 12 says of its own headers' undefined vectors
[ "$mode" = clang ] || BUILD+=" -Wno-uninitialized -Wno-maybe-uninitialized"
objects=() stale=()
for source in "${sources[@]}"; do
  object=$base/$(basename "$source" .cpp).o
  objects+=("$object")
  needs=(csrc/*.h csrc/cpu/*)
  [[ $source != tests/* ]] || needs+=(tests/native/*)
  # the formula needs no watching, and would take most of the time
  [ "$source" != tests/native/problem.cpp ] || object+=" -O2 -fno-sanitize=all"
  [ "${object%% *}" -nt "$(ls -t "${needs[@]}" | head -n 1)" ] || stale+=("$source $object")
done
if [ ${#stale[@]} -gt 0 ]; then
  echo "native $mode: compiling ${#stale[@]} files"
  printf '%s\n' "${stale[@]}" |
    xargs -P "${MAX_JOBS:-$(nproc)}" -L 1 sh -c '$BUILD -c "$0" -o "$@"'
fi
$BUILD "${objects[@]}" -o "$base/native"
if [ "$mode" = thread ]; then
  # A check that cannot fail proves nothing: chunks that do not wait for their turn have to be seen.
  planted=$base/planted
  rm -rf "$planted"
  mkdir "$planted"
  cp -r csrc "$planted"
  sed -i 's/while (__atomic_load_n(gate, __ATOMIC_ACQUIRE) != c) yield();//' "$planted/csrc/cpu/backward.inl"
  cmp -s {,"$planted/"}csrc/cpu/backward.inl && { echo "native $mode: no race could be planted"; exit 1; }
  $BUILD -c "$planted/csrc/cpu/isa_portable.cpp" -o "$planted/isa_portable.o"
  $BUILD "${objects[@]/#*isa_portable.o/$planted/isa_portable.o}" -o "$planted/native"
  "$planted/native" 'a long head' >"$planted/log" 2>&1 && status=0 || status=$?
  [ "$status" != 0 ] && grep -q 'WARNING: ThreadSanitizer: data race' "$planted/log" &&
    grep -q '#[0-9].* attnkit::portable::Backward' "$planted/log" ||
    { echo "native $mode: a planted race was not seen (status $status, see $planted/log)"; exit 1; }
  echo "native $mode: a planted race is seen"
fi
echo "native $mode: running"
exec ${run[@]+"${run[@]}"} "$base/native" "$@"
