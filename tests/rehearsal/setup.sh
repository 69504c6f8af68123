#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What `make rehearse` needs, from the project's root:
#   setup.sh vllm VERSION PYTHON VENV   create VENV with this vLLM for CUDA and this plugin (9 GB)
#   setup.sh driver VENV                compile the fake driver into VENV/fake_driver
set -euo pipefail

part=$1
here=$(cd "$(dirname "$0")" && pwd)

install_vllm() {
  local version=$1 python=$2 venv=$3 torch=2.13.0 torchvision=0.28.0
  if [ "$version" = 0.33 ]; then
    torch=2.14.0 torchvision=0.29.0
  fi
  rm -rf "$venv"
  "$python" -m venv "$venv"
  # `===` takes the index's own build, which is for CUDA: pip may also know a wheel `2.13.0+cpu`,
  # which `==` would prefer.
  "$venv/bin/python" -m pip install -q "torch===$torch" "torchvision===$torchvision" torchaudio===2.11.0
  "$venv/bin/python" -m pip install -q "vllm==$version.0" scipy "setuptools>=77" \
    pytest pytest-timeout hypothesis
  # For its entry points; a rehearsal reads the code from its own checkout.
  "$venv/bin/python" -m pip install -q --no-deps --no-build-isolation -e .
}

compile_driver() {
  local venv=$1 out=$1/fake_driver source=$here/fake_driver include
  # Triton brings cuda.h.
  include=$("$venv/bin/python" -c '
import pathlib, triton
print(pathlib.Path(triton.__file__).parent / "backends/nvidia/include")')
  mkdir -p "$out/generated"
  "$venv/bin/python" "$source/generate.py" "$include" "$out/generated"
  # A call that is not implemented has any signature.
  g++ -std=c++17 -O1 -g -fPIC -shared -w -I"$include" -Wl,-soname,libcuda.so.1 \
    -o "$out/libcuda.so.1" "$source"/*.cpp "$out/generated/table.cpp" "$out/generated/exports.S" \
    -lpthread -ldl
  ln -sf libcuda.so.1 "$out/libcuda.so"
  gcc -O1 -fPIC -shared -Wl,-soname,libnvidia-ml.so.1 -o "$out/libnvidia-ml.so.1" \
    "$source/fakenvml.c"
  gcc -O1 -fPIC -shared -I"$include" -o "$out/libfakeblas.so" "$source/fakeblas.c" \
    -L"$out" -l:libcuda.so.1
}

case $part in
  vllm)
    echo "rehearse: install vLLM $2 for CUDA into $4 (9 GB, some minutes)"
    install_vllm "$2" "$3" "$4"
    ;;
  driver)
    echo "rehearse: compile the fake driver"
    compile_driver "$2"
    ;;
  *)
    echo "usage: $0 vllm VERSION PYTHON VENV | driver VENV" >&2
    exit 2
    ;;
esac
