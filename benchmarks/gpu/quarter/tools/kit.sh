#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# vLLM 0.32 for a Hopper GPU machine without a network, which has Python 3.12, PyTorch 2.11 or newer
# for CUDA 13, Triton 3.6 or newer and Hugging Face's libraries:
#
#   kit.sh OUT [PART_MIB]     # OUT/part-*, cut at PART_MIB (default 60)
#
# vLLM's libraries use PyTorch's stable ABI, so an older PyTorch than the one they were built with does.
# Left out: FlashAttention 2, FlashMLA, DeepGEMM, kernels of other GPUs and the Rust front end; of what
# is left, `shrink.py` clears the machine code that the questions do not run.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: kit.sh OUT [PART_MIB]}
part_mib=${2:-60}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/whl" "$work/site"

platforms=()
for n in 2_39 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do
  platforms+=(--platform "manylinux_${n}_x86_64")
done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
fetch() {
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" -d "$work/whl" "$@"
}
fetch vllm==0.32.0
fetch -r "$here/kit-requirements.txt"

for wheel in "$work"/whl/*.whl; do
  case $wheel in
    */vllm-*) unzip -q -o "$wheel" -d "$work/site" -x \
      'vllm/vllm_flash_attn/_vllm_fa2_C*' 'vllm/vllm-rs' 'vllm/third_party/deep_gemm/*' \
      'vllm/third_party/fmha_sm100/*' 'vllm/_flashmla*' 'vllm/_flashkda*' 'vllm/_deepselect*' \
      'vllm/_qutlass*' ;;
    *) unzip -q -o "$wheel" -d "$work/site" ;;
  esac
done
rm -rf "$work/whl"
find "$work/site" -name 'tekken*.json' -delete
find "$work/site" -name tests -type d -not -path '*/vllm/*' -prune -exec rm -rf {} +
python3 "$here/shrink.py" "$work"/site/vllm/*.so "$work"/site/vllm/vllm_flash_attn/*.so

rm -f "$out"/part-*
tar -C "$work/site" -c . | xz -T0 -9 | split -b "${part_mib}m" -d -a 1 - "$out/part-"
ls -l "$out"
