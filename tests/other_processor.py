"""The checks of bits as on another processor: `python -m tests.other_processor [default] [options of pytest]`.

The libraries below PyTorch have kernels for each instruction set, and what holds for one need not hold for another.
Where this machine has more than AVX2 it is AVX2's turn, else that of plain x86-64; `default` asks for the latter.
"""

import os
import subprocess
import sys

import torch

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
AVX2 |= {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}
PLAIN = {"ATEN_CPU_CAPABILITY": "default"}


def main(arguments: list[str]) -> int:
    own, asked = torch.backends.cpu.get_cpu_capability(), arguments[:1] == ["default"]
    settings = AVX2 if own.startswith("AVX512") and not asked else PLAIN
    if not own.startswith("AVX"):
        sys.stderr.write(f"this processor ({own}) has one instruction set only: bits are not checked a second time\n")
        return 0
    said = " ".join(f"{key}={value}" for key, value in settings.items())
    sys.stderr.write(f"the checks of bits once more, on {own} with {said}\n")
    pytest = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", "bits and not full"]
    return subprocess.run([*pytest, *arguments[asked:]], env=os.environ | settings, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
