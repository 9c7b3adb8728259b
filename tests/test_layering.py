"""Who may import whom, what an import may load, and how large a file or function may grow."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 350, 60, 8

# Every module of the framework and the modules of the framework that it may import: what stands before it.
BASE = {"counted", "errors", "message"}
READING = {"stage", "transport", "use", "located", "keys", "places", "names"}
RUNNING = {"stats", "stage", "transport", "channel", "gate", "route", "snapshot", "graph", "plan"}
FRAMEWORK = {
    "counted": set(),
    "errors": set(),
    "message": {"errors"},
    "form": {"errors"},
    "stats": BASE,
    "transport": BASE | {"stats"},
    "picture": BASE | {"stats"},
    "display": BASE | {"stats", "picture", "signals"},
    "stage": BASE,
    "snapshot": BASE | {"form", "stats", "stage"},
    "channel": BASE | {"stats"},
    "gate": BASE | {"stats"},
    "route": BASE | {"stats", "channel", "gate"},
    "use": BASE,
    "located": BASE,
    "keys": BASE | {"located"},
    "places": BASE | {"located"},
    "names": BASE | {"stage", "use", "located", "keys", "places"},
    "graph": BASE | READING,
    "laws": BASE | {"graph"},
    "placement": BASE | {"graph", "laws"},
    "check": BASE | READING | {"graph", "laws", "placement"},
    "plan": BASE | READING | {"graph", "laws"},
    "in_flight": {"graph", "plan", "stage"},
    "memory": BASE | READING | {"graph", "in_flight", "plan"},
    "profile": BASE,
    "trace": BASE | {"profile"},
    "signals": set(),
    "stall": BASE | {"stats"},
    "sharing": {"exclusive", "plan", "profile", "trace"},
    "recording": BASE | {"stats", "channel", "transport", "plan", "profile", "trace"},
    "station": BASE | {"gate", "plan", "route", "snapshot", "stage"},
    "worker": BASE | RUNNING | {"form", "profile", "recording", "station"},
    "joins": {"gate", "message", "plan", "route", "station"},
    "wiring": BASE | RUNNING | {"joins", "station", "worker"},
    "runtime": BASE
    | RUNNING
    | {"check", "worker", "wiring", "profile", "trace", "recording", "sharing", "signals", "stall"},
    "clock": BASE | {"stats", "gate"},
    "exclusive": {"plan"},
    "simulate": BASE | {"stats", "clock", "exclusive", "gate", "joins", "plan", "profile", "route", "station"},
    "critical": BASE | {"clock"},
    "cycles": BASE | {"clock", "plan", "simulate"},
    "hand_offs": {"critical", "graph", "plan", "profile", "simulate"},
    "sizes": BASE | {"graph", "profile"},
    "service": BASE | {"exclusive", "hand_offs", "plan", "profile", "simulate", "sizes"},
    "what_if": BASE | {"check", "graph", "located", "plan", "transport"},
    "forecast": BASE
    | {
        "critical",
        "cycles",
        "exclusive",
        "graph",
        "hand_offs",
        "plan",
        "profile",
        "service",
        "simulate",
        "sizes",
        "stats",
    }
    | {"what_if"},
    "forecast_table": {"forecast"},
    "closing": BASE | {"forecast", "forecast_table", "graph", "profile"},
    "splits": BASE
    | {"check", "forecast", "forecast_table", "graph", "located", "memory", "plan", "profile", "transport", "what_if"},
    "run_folder": BASE | {"snapshot"},
    "writable": {"errors"},
    "cli": ...,  # the top: anything
    "__init__": BASE | {"form", "stage", "transport"},
}
ENTRIES = {"demo"}  # run by hand; the only modules of stages/ that may know everything


def modules(package):
    return {path.stem: path for path in sorted((ROOT / package).glob("*.py"))}


def tree(path):
    return ast.parse(path.read_text(), str(path))


def imports(path):
    """Full names of all modules imported anywhere in the file, and (module, name) of every `from` import."""
    names, pairs = set(), set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names.add(node.module)
            pairs |= {(node.module, alias.name) for alias in node.names}
    return names, pairs


def inside(package, path):
    """Modules of `package` that the file imports, without the package's name."""
    names, pairs = imports(path)
    found = {name.removeprefix(f"{package}.") for name in names if name.startswith(f"{package}.")}
    return found | {name for module, name in pairs if module == package and name in modules(package)}


def test_every_module_of_the_framework_has_a_place():
    assert set(modules("dflash_pipe")) - {"__main__"} <= set(FRAMEWORK)


@pytest.mark.parametrize("name", modules("dflash_pipe"))
def test_the_framework_imports_downwards_only(name):
    allowed = FRAMEWORK.get(name, ...)
    if allowed is not ...:
        assert inside("dflash_pipe", modules("dflash_pipe")[name]) <= allowed


def test_there_is_no_circle_in_the_table():
    done = set()
    while left := {name for name, allowed in FRAMEWORK.items() if allowed is not ... and name not in done}:
        free = {name for name in left if FRAMEWORK[name] <= done}
        assert free, f"a circle among {sorted(left)}"
        done |= free


@pytest.mark.parametrize("name", modules("dflash_pipe"))
def test_the_framework_knows_neither_torch_nor_stages(name):
    names, _ = imports(modules("dflash_pipe")[name])
    assert {n.split(".")[0] for n in names}.isdisjoint({"torch", "transformers", "stages", "graphs", "benchmarks"})


def holds_stages(path):
    """Whether a class of the file is a Stage or a Source. Other modules of stages/ are helpers, open to all stages."""
    classes = (node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef))
    return any(ast.unparse(base).split("[")[0] in ("Stage", "Source") for node in classes for base in node.bases)


@pytest.mark.parametrize("name", sorted(set(modules("stages")) - ENTRIES))
def test_nothing_imports_a_stage(name):
    imported = inside("stages", modules("stages")[name])
    stages = {other for other in imported if holds_stages(modules("stages")[other])}
    assert not stages | imported & ENTRIES, f"stages/{name}.py imports {sorted(stages)}"


@pytest.mark.parametrize("name", sorted(set(modules("stages")) - ENTRIES))
def test_stages_use_public_names_of_the_framework_only(name):
    _, pairs = imports(modules("stages")[name])
    for module, imported in sorted(pairs):
        if module.split(".")[0] == "dflash_pipe":
            assert module in ("dflash_pipe", "dflash_pipe.errors"), f"stages/{name}.py imports {module}"
            assert imported in importlib.import_module(module).__all__


@pytest.mark.parametrize("module", ["dflash_pipe", "dflash_pipe.cli", "dflash_pipe.runtime", "dflash_pipe.graph"])
def test_the_framework_leaves_torch_unloaded(module):
    script = f"import sys, {module}; sys.exit(' '.join({{'torch', 'transformers', 'stages'}} & set(sys.modules)) or 0)"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", modules("dflash_pipe"))
def test_public_names_are_listed_sorted_and_documented(name):
    module = importlib.import_module(f"dflash_pipe.{name}".removesuffix(".__init__"))
    public = module.__all__
    constants, rest = [n for n in public if n.isupper()], [n for n in public if not n.isupper()]
    classes, functions = [n for n in rest if n[0].isupper()], [n for n in rest if not n[0].isupper()]
    assert public == sorted(constants) + sorted(classes) + sorted(functions)
    for each in map(module.__dict__.get, public):
        if inspect.isclass(each) or inspect.isfunction(each):
            assert inspect.getdoc(each), f"{each.__name__} has no docstring"


@pytest.mark.parametrize("package", ["dflash_pipe", "stages"])
def test_every_file_says_its_purpose_first(package):
    for path in modules(package).values():
        assert path.stat().st_size == 0 or ast.get_docstring(tree(path)), f"{path} has no docstring"


@pytest.mark.parametrize("package", ["dflash_pipe", "stages", "benchmarks"])
def test_nothing_has_grown_too_large(package):
    large = []
    for path in sorted((ROOT / package).rglob("*.py")):
        if (lines := path.read_text().count("\n")) > MAX_FILE:
            large.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
                if (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION:
                    large.append(f"{where}: {lines} lines")
                if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                    continue  # a kernel is given every pointer and size by itself
                a = node.args
                if (count := len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs)) > MAX_PARAMETERS:
                    large.append(f"{where}: {count} parameters")
    assert not large
