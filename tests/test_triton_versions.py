"""What is changed in Triton's Autotuner works with every Triton that is named, such as the oldest that is claimed."""

import os
import subprocess
import sys

import pytest

from tests.interpreted import NAMED, ROOT, TRITONS

SUBJECTS = ("autotune", "autotune_fla", "tuning")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_autotuners_tests_pass_on_every_triton_that_is_named():
    if not NAMED:
        pytest.skip(f"{TRITONS} names no directories (made by pip install --no-deps --target DIRECTORY triton==3.6.0)")
    for folder in NAMED:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
        del environment[TRITONS]
        files = [f"tests/test_{name}.py" for name in SUBJECTS]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
        assert ended.returncode == 0, ended.stdout[-5000:]
        assert " passed" in ended.stdout
