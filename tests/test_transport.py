"""Which device a name means, with and without accelerators."""

import pytest

from dflash_pipe import BadInput, Transport


class Two(Transport):
    def accelerators(self) -> list[str]:
        return ["gpu:0", "gpu:1"]


@pytest.mark.parametrize(
    ("device", "alone", "with_two"),
    [
        ("cpu", "cpu", "cpu"),
        ("auto", "cpu", "gpu:0"),
        ("auto:0", "cpu", "gpu:0"),
        ("auto:1", "cpu", "gpu:1"),
        ("auto:3", "cpu", "gpu:1"),  # counted round
    ],
)
def test_what_a_name_means(device, alone, with_two):
    assert Transport().resolve(device) == alone
    assert Two().resolve(device) == with_two


@pytest.mark.parametrize("device", ["gpu:2", "cuda", "auto:", "auto:-1", "auto:x", ""])
def test_devices_that_are_not_there(device):
    with pytest.raises(BadInput, match="no device") as refused:
        Two().resolve(device)
    assert "cpu, gpu:0, gpu:1" in str(refused.value)


def test_a_name_of_a_device_is_taken_as_it_is():
    assert Two().resolve("gpu:1") == "gpu:1"
