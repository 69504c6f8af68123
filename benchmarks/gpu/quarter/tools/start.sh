#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# On the GPU machine, from the project's root: unpack the kit and the caches, then ask.
#
#   start.sh FOLDER [arguments of benchmarks.gpu.quarter]
#
# FOLDER has the kit's part-* and, if there are any, caches: cache-*. Results so far are read from
# benchmarks/results/gpu. Everything new goes to $OUT (default build/quarter): quarter.json, rewritten
# with every result, quarter.md, logs.tar.gz, and cache-* for the next call, cut at 15 MiB.
set -euo pipefail
folder=${1:?usage: start.sh FOLDER [ARGUMENTS]}
shift
# Some caches know the folder they were made in, so it is the same everywhere.
home=/tmp/bastion-quarter
out=${OUT:-build/quarter}
mkdir -p "$home/cache" "$home/logs" "$out"
begin=$SECONDS

if [ ! -e "$home/complete" ]; then
  mkdir -p "$home/site"
  cat "$folder"/part-* | tar -xJ -C "$home/site"
  if compgen -G "$folder/cache-*" >/dev/null; then cat "$folder"/cache-* | tar -xJ -C "$home/cache"; fi
  # In place of an installation: vLLM finds plugins by their entry points.
  python3 - "$home/site" <<'END'
import pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
folder = pathlib.Path(sys.argv[1]) / "vllm_bastion-0.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-bastion\nVersion: 0\n")
groups = project["entry-points"].items()
lines = [f"[{name}]\n" + "".join(f"{k} = {v}\n" for k, v in group.items()) for name, group in groups]
(folder / "entry_points.txt").write_text("\n".join(lines))
END
  touch "$home/complete"
fi
echo "unpacked after $((SECONDS - begin)) s"
if [ -d "$home/staged" ]; then
  for _ in $(seq 150); do [ -e "$home/model.done" ] && break; sleep 1; done
  cat "$home/model.log"
  echo "model ready after $((SECONDS - begin)) s"
fi

export PYTHONPATH=$home/site:$PWD:$PWD/kernels PYTHONUNBUFFERED=1
export VLLM_USE_FLASHINFER_SAMPLER=0  # the kit has no FlashInfer
export XDG_CACHE_HOME=$home/cache VLLM_CACHE_ROOT=$home/cache/vllm
export TRITON_CACHE_DIR=$home/cache/triton TORCHINDUCTOR_CACHE_DIR=$home/cache/inductor
if [ -e benchmarks/results/gpu/quarter.json ] && [ ! -e "$out/quarter.json" ]; then
  cp benchmarks/results/gpu/quarter.json "$out/"
fi
status=0
python3 -m benchmarks.gpu.quarter --out "$out" --logs "$home/logs" "$@" || status=$?

tar -C "$home" -czf "$out/logs.tar.gz" logs
rm -f "$out"/cache-*
tar -C "$home/cache" -c --exclude=pairs --exclude='*.lock' . | xz -T0 -1 |
  split -b 15m -d -a 1 - "$out/cache-"
echo "ended after $((SECONDS - begin)) s"
exit "$status"
