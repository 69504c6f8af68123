# SPDX-License-Identifier: Apache-2.0
"""Write table.cpp and exports.S: every call that cuda.h declares, implemented here or not.

    python generate.py INCLUDE OUT      the folder with cuda.h, and the one to write to

Implemented calls are those that the C++ files here define with DRIVER_CALL. All are exported under
their own names; `fk_table` and `fk_aliases` are for cuGetProcAddress, which is asked for a name
without suffix and the version of CUDA.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# (name asked for, least version of CUDA, symbol)
_VERSIONED = (
    ("cuCtxCreate", 3020, "cuCtxCreate_v2"),
    ("cuCtxCreate", 12050, "cuCtxCreate_v4"),
    ("cuStreamGetCaptureInfo", 10010, "cuStreamGetCaptureInfo"),
    ("cuStreamGetCaptureInfo", 11030, "cuStreamGetCaptureInfo_v2"),
    ("cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"),
    ("cuStreamUpdateCaptureDependencies", 11030, "cuStreamUpdateCaptureDependencies"),
    ("cuStreamUpdateCaptureDependencies", 12030, "cuStreamUpdateCaptureDependencies_v2"),
    ("cuGraphInstantiate", 10000, "cuGraphInstantiate"),
    ("cuGraphInstantiate", 11000, "cuGraphInstantiate_v2"),
    ("cuGraphInstantiate", 12000, "cuGraphInstantiateWithFlags"),
    ("cuGraphGetEdges", 10000, "cuGraphGetEdges"),
    ("cuGraphGetEdges", 12030, "cuGraphGetEdges_v2"),
    ("cuEventElapsedTime", 2000, "cuEventElapsedTime_v2"),
    ("cuGetProcAddress", 11030, "cuGetProcAddress"),
    ("cuGetProcAddress", 12000, "cuGetProcAddress_v2"),
    ("cuDeviceGetUuid", 9020, "cuDeviceGetUuid"),
    ("cuDeviceGetUuid", 11040, "cuDeviceGetUuid_v2"),
    ("cuCtxGetDevice", 2000, "cuCtxGetDevice"),
    ("cuCtxGetDevice", 13000, "cuCtxGetDevice_v2"),
    ("cuCtxSynchronize", 2000, "cuCtxSynchronize"),
    ("cuCtxSynchronize", 13000, "cuCtxSynchronize_v2"),
)
_HIDDEN = '__attribute__((visibility("hidden")))'


def _declared(include: Path) -> set[str]:
    """Calls of cuda.h, old versions included."""
    names: set[str] = set()
    for flags in (["-D__CUDA_API_VERSION_INTERNAL"], []):
        command = ["gcc", "-E", *flags, str(include / "cuda.h")]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names |= set(re.findall(r"CUresult\s+(cu[A-Z]\w+)\s*\(", text))
    return names


def _current_versions(include: Path) -> dict[str, str]:
    """What cuda.h's macros make of a name without suffix."""
    pattern = r"^\s*#\s*define\s+(cu[A-Z]\w+)\s+(?:__CUDA_API_PT[SD]Z\()?(cu[A-Z]\w+?)\)?\s*$"
    current: dict[str, str] = {}
    for base, name in re.findall(pattern, (include / "cuda.h").read_text(), re.MULTILINE):
        name = re.sub(r"_pt[sd][sz]$", "", name)
        if base != name:
            current.setdefault(base, name)
    return current


def main(include: Path, out: Path) -> None:
    here = Path(__file__).parent
    sources = "\n".join(path.read_text() for path in sorted(here.glob("*.cpp")))
    ours = set(re.findall(r"^DRIVER_CALL\((cu\w+)\)", sources, re.MULTILINE))
    names = sorted(_declared(include) | ours)
    versioned = {base for base, _, _ in _VERSIONED}
    current = sorted(_current_versions(include).items())
    aliases = [*_VERSIONED, *((b, 0, name) for b, name in current if b not in versioned)]

    lines = ['extern "C" {', "int fk_unimplemented(const char*);"]
    for name in names:
        body = f'{{ return fk_unimplemented("{name}"); }}'
        lines.append(f"int fk_{name}();" if name in ours else f"{_HIDDEN} int fk_{name}() {body}")
    lines += [f"int {name}();" for name in names]
    lines += ["struct Entry { const char* name; void* function; };"]
    lines += ["struct Alias { const char* base; int version; const char* name; };"]
    entries = ", ".join(f'{{"{name}", (void*){name}}}' for name in names)
    pairs = ", ".join(f'{{"{base}", {least}, "{name}"}}' for base, least, name in aliases)
    lines += [f"{_HIDDEN} Entry fk_table[] = {{{entries}}};"]
    lines += [f"{_HIDDEN} int fk_table_size = {len(names)};"]
    lines += [f"{_HIDDEN} Alias fk_aliases[] = {{{pairs}}};"]
    lines += [f"{_HIDDEN} int fk_aliases_size = {len(aliases)};", "}", ""]
    (out / "table.cpp").write_text("\n".join(lines))

    exports = [".text"]
    exports += [f".globl {n}\n.type {n},@function\n{n}: jmp fk_{n}" for n in names]
    exports += ['.section .note.GNU-stack,"",@progbits', ""]
    (out / "exports.S").write_text("\n".join(exports))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
