"""YAML with places: scalars, files that extend files, overlays."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dflash_pipe import BadInput
from dflash_pipe.located import Located, at, dumps, located, overlay, parse, plain, read, under

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
floats = st.floats(allow_nan=False)
tricky = st.sampled_from(
    ["6e-4", "1e3", "no", "null", "~", "010", "0x1f", "0o17", "1_000", ".inf", "12:30", "2026-01-01", "", "="]
)
scalars = st.none() | st.booleans() | st.integers() | floats | names | tricky
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))
mappings = st.dictionaries(
    st.sampled_from("abc"), st.recursive(st.integers(0, 3), lambda i: st.dictionaries(st.sampled_from("abc"), i))
)


def value_of(text):
    tree = parse(text, str)
    return None if tree is None else plain(tree)


@given(values)
@example({"\x85": None})
@example("a\u2028b \n c")
def test_what_is_dumped_reads_back_as_the_same_value(value):
    back = value_of(dumps(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6e-4", 6e-4),
        ("6.0e-4", 6e-4),
        ("+1E3", 1000.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("-.inf", float("-inf")),
        ("010", 10),
        ("0x1f", 31),
        ("0o17", 15),
        ("10_000", "10_000"),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("cuda:0", "cuda:0"),
        ("TRUE", True),
        ("~", None),
        ("'6e-4'", "6e-4"),
        ("!!float 3", 3.0),
        ("", None),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)


def test_every_key_and_item_knows_its_line():
    tree = parse("a: 1\nb:\n  c:\n    - 7\n    - d: 8\n", lambda line: f"f:{line}")
    assert at(tree, ["a"]) == ("f:1", "a")
    assert at(tree, ["b", "c", 0]) == ("f:4", "b.c.0")
    assert at(tree, ["b", "c", 1, "d"]) == ("f:5", "b.c.1.d")
    assert at(tree, ["b", "nothing", "c"]) == ("f:3", "b.c")


def test_aliases_are_values_of_the_place_that_names_them():
    tree = parse("a: &x {k: 1}\nb: *x\n", lambda line: f"f:{line}")
    assert plain(tree) == {"a": {"k": 1}, "b": {"k": 1}}
    assert at(tree, ["b"])[0] == "f:2"


def test_only_what_aliases_add_is_limited():
    assert len(value_of(f"[{'1, ' * 100_001}]")) == 100_001
    ten = ", ".join(["*x"] * 10)
    assert value_of(f"a: &x [1, 2]\nb: [{ten}]")["b"] == [[1, 2]] * 10


def test_deep_nesting_is_refused_not_crashed_on():
    with pytest.raises(BadInput, match="nested too deeply"):
        parse("[" * 10_000, str)


# --- overlays


def holds(whole, part):
    """Whether a merged value has everything that the layer on top says."""
    return all(k in whole and holds(whole[k], v) for k, v in part.items()) if isinstance(part, dict) else whole == part


@given(mappings, mappings)
def test_the_upper_layer_holds_and_no_key_is_lost(a, b):
    merged = plain(overlay(located(a, ""), located(b, "")))
    assert holds(merged, b)
    assert set(merged) == set(a) | set(b)
    assert all(holds(merged[k], a[k]) for k in set(a) - set(b))


@given(mappings)
def test_overlaying_itself_changes_nothing(a):
    assert plain(overlay(located(a, "1"), located(a, "2"))) == a


def test_mappings_merge_and_the_rest_is_replaced():
    base = located({"a": {"x": 1, "y": [1, 2]}, "b": 1}, "base")
    over = located({"a": {"y": [3]}, "b": {"z": 1}}, "over")
    merged = overlay(base, over)
    assert plain(merged) == {"a": {"x": 1, "y": [3]}, "b": {"z": 1}}
    assert at(merged, ["a", "x"])[0] == "base"
    assert at(merged, ["a", "y"])[0] == "over"


def test_null_removes_an_entry_of_a_section_and_is_a_value_elsewhere():
    base = located({"workers": {"a": {"turn": "t"}, "b": 1}, "threads": 2}, "")
    merged = overlay(base, located({"workers": {"a": {"turn": None}, "b": None}, "threads": None}, ""))
    assert plain(merged) == {"workers": {"a": {"turn": None}}, "threads": None}


def test_a_new_class_with_its_own_parameters_replaces_the_stage_whole():
    base = located({"stages": {"a": {"use": "m:A", "with": {"x": 1, "y": 2}}}}, "")

    def over(**entry):
        return plain(overlay(base, located({"stages": {"a": entry}}, "")))["stages"]["a"]

    assert over(use="m:B", **{"with": {"z": 1}}) == {"use": "m:B", "with": {"z": 1}}
    assert over(use="m:A", **{"with": {"x": 3}}) == {"use": "m:A", "with": {"x": 3, "y": 2}}
    assert over(use="m:B") == {"use": "m:B", "with": {"x": 1, "y": 2}}


def test_what_was_removed_may_be_written_anew():
    base = located({"workers": {"a": {"turn": "t", "replicas": 2}}}, "")
    gone = overlay(base, located({"workers": {"a": None}}, ""))
    assert plain(overlay(gone, located({"workers": {"a": {"turn": "u"}}}, ""))) == {"workers": {"a": {"turn": "u"}}}


# --- files


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(**texts):
        for name, text in texts.items():
            path = tmp_path / f"{name.replace('__', '/')}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    return write


def test_no_file_is_refused():
    with pytest.raises(BadInput, match="no graph given"):
        read([])


def test_later_files_overlay_earlier_ones_and_what_they_extend(files):
    files(base="window: 1\nseed: 1\nthreads: 1\n", a="extends: base.yaml\nseed: 2\nthreads: 2\n", b="threads: 3\n")
    tree, names = read(["a.yaml", "b.yaml"])
    assert {key: plain(under(tree)[key]) for key in ("window", "seed", "threads")} == {
        "window": 1,
        "seed": 2,
        "threads": 3,
    }
    assert names == ("base.yaml", "a.yaml", "b.yaml")
    assert [at(tree, [key])[0] for key in ("window", "seed", "threads")] == ["base.yaml:1", "a.yaml:2", "b.yaml:1"]
    assert "extends" not in tree.value


def test_a_base_of_two_files_counts_once_and_undoes_neither(files):
    files(base="window: 1\nseed: 1\n", a="extends: base.yaml\nwindow: 2\n", b="extends: [base.yaml]\nseed: 2\n")
    tree, names = read(["a.yaml", "b.yaml"])
    assert (plain(tree)["window"], plain(tree)["seed"]) == (2, 2)
    assert names == ("base.yaml", "a.yaml", "b.yaml")


def test_extends_is_relative_to_the_file_that_says_it(files):
    files(sub__base="window: 5\n", sub__a="extends: base.yaml\n", b="extends: sub/a.yaml\n")
    tree, names = read(["b.yaml"])
    assert plain(tree)["window"] == 5
    assert names == ("sub/base.yaml", "sub/a.yaml", "b.yaml")


def test_shipped_graphs_are_found_from_any_folder(files):
    files(mine="extends: graphs/toy/overlapped.yaml\nwindow: 2\n")
    tree, names = read(["mine.yaml"])
    assert names == ("graphs/toy/dataflow.yaml", "graphs/toy/overlapped.yaml", "mine.yaml")
    assert plain(tree)["window"] == 2
    assert at(tree, ["stages", "target"])[0].startswith("graphs/toy/dataflow.yaml:")


def test_a_file_of_ones_own_comes_before_a_shipped_one(files):
    files(graphs__sequential="window: 77\n")
    assert plain(read(["graphs/sequential.yaml"])[0])["window"] == 77


def test_a_byte_order_mark_is_no_content(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfwindow: 3\n")
    assert plain(read([tmp_path / "a.yaml"])[0])["window"] == 3


def test_a_file_that_cannot_be_read_is_named(files, monkeypatch):
    files(a="window: 1\n")

    def forbidden(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", forbidden)
    with pytest.raises(BadInput) as caught:
        read(["a.yaml"])
    assert str(caught.value) == "a.yaml: cannot be read: Permission denied"


def test_under_gives_nothing_where_there_is_no_mapping():
    assert under(located({"a": {"b": 1}}, ""), "a", "b") == {}
    assert under(located({"a": {"b": 1}}, ""), "a") == {"b": Located(1, "")}


def test_a_users_file_may_extend_a_shipped_one_by_its_bare_name(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: overlapped.yaml\nname: mine\n")
    _, names = read([mine])
    assert names[-2:] == ("graphs/overlapped.yaml", str(mine))
    (tmp_path / "overlapped.yaml").write_text("name: beside\n")  # what lies beside it comes first
    assert read([mine])[1] == (str(tmp_path / "overlapped.yaml"), str(mine))
    with pytest.raises(BadInput, match=r"no such file: overlapped\.yaml"):
        read(["overlapped.yaml"])  # on the command line a bare name is one of this folder


@pytest.mark.parametrize(
    ("path", "shown"), [(("a", 0), "a.0"), (("a", 1), "a"), (("a", "b"), "a"), (("a", 0, 0), "a.0")]
)
def test_of_a_path_that_ends_in_nothing_the_part_that_is_there_is_shown(path, shown):
    assert at(located({"a": [0.9]}, "here"), path) == ("here", shown)
