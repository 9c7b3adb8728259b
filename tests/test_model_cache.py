"""A directory of the cache appears whole or not at all, also when two build it at once."""

import threading

import pytest

from stages.model_cache import cache_root, cached_directory


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_PIPE_CACHE", str(tmp_path))


def names():
    return sorted(path.name for path in cache_root().iterdir())


def test_it_is_built_once():
    for text in ("first", "second"):
        folder = cached_directory("model", lambda path, text=text: (path / "file").write_text(text) and None)
        assert (folder / "file").read_text() == "first"
    assert names() == ["model"]


def test_a_build_that_fails_leaves_nothing():
    def build(path):
        (path / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached_directory("model", build)
    assert names() == []


def test_of_two_builds_at_once_the_first_to_finish_is_taken_by_both():
    both, results = threading.Barrier(2, timeout=20), []

    def work(number):
        def build(path):
            (path / "file").write_text(str(number))
            both.wait()  # neither has finished when both have begun

        results.append(cached_directory("model", build))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [cache_root() / "model"] * 2 and names() == ["model"]
    assert (results[0] / "file").read_text() in ("0", "1")
