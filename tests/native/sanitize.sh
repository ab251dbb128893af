#!/usr/bin/env bash
# sanitize.sh [CASES]: the kernels without Python under the sanitizers, CASES random cases of each op.
#
# AddressSanitizer + UBSan run with OpenMP and with every instruction set of this processor, after a check that they
# report planted faults. ThreadSanitizer does not see into OpenMP: it runs with plain threads, portable kernels only.
set -euo pipefail
cd "$(dirname "$0")/../.."
cases=${1:-100}

isas=(portable)
grep -qsw avx2 /proc/cpuinfo && isas+=(avx2)
grep -qsw avx512bw /proc/cpuinfo && grep -qsw avx512vl /proc/cpuinfo && isas+=(avx512)
x86=$(IFS=';'; echo "${isas[*]:1}")

build() { # build NAME FLAGS OPTIONS...
  cmake -G Ninja -S . -B "build/sanitize-$1" -DCMAKE_BUILD_TYPE=None -DSDM_PYTHON=OFF -DSDM_NATIVE_TEST=ON \
    -DSDM_EXACT_SCRATCH=ON -DCMAKE_CXX_FLAGS="-O1 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all $2" "${@:3}" > /dev/null
  ninja --quiet -C "build/sanitize-$1" native_test
}

# The checks left out double the time of the build and find what AddressSanitizer finds at run time.
outline=
"${CXX:-c++}" --version | grep -qi clang || outline="--param asan-instrumentation-with-call-threshold=0"
build address "-fsanitize=address,undefined -fno-sanitize=null,alignment,object-size,vptr,pointer-overflow $outline" \
  -DSDM_X86_ISAS="$x86"
build thread "-fsanitize=thread" -DSDM_OPENMP=OFF -DSDM_X86_ISAS=

test=src/sdm/native/native_test
for isa in "${isas[@]}"; do
  echo "address,undefined, $isa:"
  SDM_ISA=$isa "build/sanitize-address/$test" faults
  SDM_ISA=$isa "build/sanitize-address/$test" "$cases"
done
echo "thread:"
"build/sanitize-thread/$test" "$cases"
