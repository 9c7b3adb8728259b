"""What is installed: the wheel carries the graphs and works outside the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GRAPHS = ["graphs/sequential.yaml", "graphs/targets/tiny_qwen3.yaml"]
LOOK = """
import importlib.resources, importlib.metadata, sys
import dflash_pipe, graphs, stages, benchmarks
for module in (dflash_pipe, graphs, stages, benchmarks):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
shipped = importlib.resources.files("graphs")
print(*sorted(str(f.relative_to(shipped)) for f in shipped.rglob("*.yaml")), sep="\\n")
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The wheel of this checkout, unpacked as an installer would."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    ended = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    (wheel,) = folder.glob("dflash_pipe-*-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(unpacked, cwd, *command):
    environment = os.environ | {"PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100)


def test_the_wheel_holds_all_graphs_and_nothing_else_of_the_checkout(unpacked, tmp_path):
    ended = run(unpacked, tmp_path, sys.executable, "-c", LOOK, str(unpacked))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == sorted(
        str(f.relative_to(ROOT / "graphs")) for f in (ROOT / "graphs").rglob("*.yaml")
    )
    top = {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")}
    assert top == {"benchmarks", "dflash_pipe", "graphs", "stages"}


def test_the_command_is_declared_and_the_licence_goes_along(unpacked):
    (info,) = unpacked.glob("*.dist-info")
    assert "dflash-pipe = dflash_pipe.__main__:main" in (info / "entry_points.txt").read_text()
    assert (info / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_shipped_graphs_are_found_without_the_checkout(unpacked, tmp_path):
    script = "import sys; from dflash_pipe.cli import main; sys.argv[0] = 'dflash-pipe'; main()"
    ended = run(unpacked, tmp_path, sys.executable, "-c", script, "plan", *GRAPHS)
    assert ended.returncode == 0, ended.stderr
    assert "optimizer" in ended.stdout
