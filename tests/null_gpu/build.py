"""Compile the null GPU for the torch that this Python has: `python build.py FOLDER` makes FOLDER/libnull_gpu.so.

Needs gcc and nm. Symbols that torch's or Triton's libraries ask for, and that the C files do not define, become stubs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

SYMBOL = re.compile(r"_*cuda|cublas|nccl|cu[A-Z]")


def symbols(path: Path, *options: str) -> set[str]:
    """Names of the dynamic symbols of a library or object file."""
    lines = subprocess.run(["nm", *options, str(path)], check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


def build(folder: Path) -> Path:
    """Make the library, and links by the names that it is looked for; returns its path."""
    site, here = Path(sysconfig.get_paths()["purelib"]), Path(__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    headers = ["-I", str(site / "nvidia/cu13/include"), "-I", str(site / "triton/backends/nvidia/include")]
    compiler = ["gcc", "-O2", "-fPIC", "-w"]
    sources, objects = sorted(here.glob("*.c")), []
    for source in sources:
        objects.append(folder / f"{source.stem}.o")
        subprocess.run([*compiler, *headers, "-c", str(source), "-o", str(objects[-1])], check=True)
    wanted = {name for path in (site / "torch/lib").glob("*.so") for name in symbols(path, "-D", "--undefined-only")}
    wanted |= set(re.findall(r"\bcu[A-Z]\w+", (site / "triton/backends/nvidia/driver.c").read_text()))
    defined = {name for path in objects for name in symbols(path, "--defined-only")}
    stubs = sorted(name for name in wanted - defined if SYMBOL.match(name))
    (folder / "stubs.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in stubs))
    library = folder / "libnull_gpu.so"
    parts = [str(path) for path in (*objects, folder / "stubs.c")]
    subprocess.run([*compiler, "-shared", *parts, "-o", str(library), "-lpthread"], check=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):  # which Triton links with, and torch opens
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(library.name)
    print(f"{library}: {len(defined)} functions written, {len(stubs)} stubs")
    return library


if __name__ == "__main__":
    build(Path(sys.argv[1]))
