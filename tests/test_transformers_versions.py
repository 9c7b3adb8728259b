"""The oldest transformers that is claimed gives the same as the newest: the target's tests, run with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parent.parent
OLDEST = "DFLASH_PIPE_OLDEST_TRANSFORMERS"
# What of the target depends on transformers.
SUBJECTS = (
    "target_model", "frozen", "model_source", "reference_kernels", "target", "fused_decoder", "regenerate", "statistics"
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_targets_tests_pass_on_the_oldest_transformers():
    folder = os.environ.get(OLDEST)
    if not folder:
        pytest.skip(f"{OLDEST} names no directory (made by pip install --target DIRECTORY transformers==5.17.0)")
    environment = {**os.environ, "PYTHONPATH": folder}
    del environment[OLDEST]
    asked = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    version = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=100, check=True).stdout
    assert version.strip() != transformers.__version__
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(f"tests/test_{name}.py" for name in SUBJECTS),
    ]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380)
    assert ended.returncode == 0, ended.stdout[-5000:]
