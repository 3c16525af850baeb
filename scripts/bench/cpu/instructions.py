"""Count the instructions that a weight takes on ARM and on x86, in an emulator: no measure of time.

    scripts/wheels && scripts/benchmark cpu_instructions

The libraries are those of the wheels. qemu-user runs each one instruction by instruction, with few
outputs and with many; the difference belongs to the weights. qemu has no AVX-512.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from appliance.kernels.cpu import build
from appliance.kernels.cpu.structs import Format, Isa, Offset
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

LIBRARY = "appliance/kernels/cpu/libappliance_cpu.so"
ISAS = {"x86_64": (Isa.SCALAR, Isa.AVX2), "aarch64": (Isa.SCALAR, Isa.NEON, Isa.I8MM)}
WEIGHTS = {
    "4 bits with offsets": (Format.INT4, Offset.ADDITIVE),
    "8 bits": (Format.INT8, Offset.CENTERED),
}
ROWS = (1, 8)
INPUTS, FEW, MANY = 576, 64, 192  # inputs as in instructions.c; outputs


def compiled(target: str, wheel: Path, folder: Path) -> Path:
    """Compile the program for a processor, beside the library of its wheel."""
    with zipfile.ZipFile(wheel) as content:
        library = folder / "libappliance_cpu.so"
        library.write_bytes(content.read(LIBRARY))
    program = folder / "instructions"
    source = Path(__file__).with_suffix(".c")
    command = [f"{target}-linux-gnu-gcc", "-O1", "-std=gnu11", f"-I{build.SOURCES}", str(source)]
    subprocess.run([*command, str(library), "-Wl,-rpath,$ORIGIN", "-o", str(program)], check=True)
    return program


def executed(target: str, program: Path, *numbers: int) -> int:
    """Count the instructions of a whole run."""
    command = [f"qemu-{target}", "-cpu", "max", "-L", f"/usr/{target}-linux-gnu", "-singlestep"]
    command += ["-d", "exec,nochain", "-D", "/dev/stdout", str(program), *map(str, numbers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        count = sum(line.startswith(b"Trace") for line in running.stdout)
    if running.returncode:
        sys.exit(f"{' '.join(command)} ended with {running.returncode}")
    return count


def each_weight(target: str, program: Path, isa: Isa, kind: str, rows: int) -> float:
    """Return the instructions that each weight takes for each row."""
    few, many = (executed(target, program, isa, *WEIGHTS[kind], rows, out) for out in (FEW, MANY))
    return round((many - few) / ((MANY - FEW) * INPUTS * rows), 3)


def run(wheels: Path) -> dict[str, Any]:
    table: dict[str, dict[str, float]] = {}
    for target, isas in ISAS.items():
        found = sorted(wheels.glob(f"appliance-*linux_{target}.whl"))
        if not found:
            sys.exit(f"{wheels} has no wheel for {target}; run scripts/wheels first")
        with tempfile.TemporaryDirectory() as folder:
            program = compiled(target, found[-1], Path(folder))
            for isa in isas:
                name = f"{isa.name.lower()} on {target}"
                table[name] = {
                    f"{kind}, rows {rows}": each_weight(target, program, isa, kind, rows)
                    for kind in WEIGHTS
                    for rows in ROWS
                }
    return {
        "benchmark": "cpu_instructions",
        "conditions": conditions(),
        "instructions of a weight and row": table,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--wheels", type=Path, default=Path("dist"), help="folder of the wheels")
    options = parser.parse_args()
    write_result(options.out, run(options.wheels))
