"""Numbers that the environment sets."""

import pytest

from flows.server_api import dead_after_s
from scalerl.variables import number, object_store_bytes
from warehouse.errors import UserError


def test_a_number_is_read_or_its_default_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALERL_OBJECT_STORE_BYTES", raising=False)
    assert object_store_bytes() == 2 * 1024**3
    monkeypatch.setenv("SCALERL_OBJECT_STORE_BYTES", " 4e9 ")
    assert object_store_bytes() == 4_000_000_000
    monkeypatch.setenv("SCALERL_DEAD_AFTER_S", "")
    assert dead_after_s() == 180.0


@pytest.mark.parametrize("text", ["4G", "nan", "inf", "-1", "78643199"])
def test_other_text_is_refused_in_one_line(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray takes no store below 75 MiB = 78,643,200 bytes."""
    monkeypatch.setenv("SCALERL_OBJECT_STORE_BYTES", text)
    with pytest.raises(UserError) as refused:
        object_store_bytes()
    assert (
        str(refused.value)
        == f"SCALERL_OBJECT_STORE_BYTES = {text!r}: give bytes, at least 78643200, or unset it for 2147483648"
    )


def test_less_than_two_pulses_is_no_sign_of_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pulse comes every 30 seconds."""
    monkeypatch.setenv("SCALERL_DEAD_AFTER_S", "59")
    with pytest.raises(UserError, match="at least 60"):
        dead_after_s()
    assert number("SCALERL_NOTHING_OF_THE_KIND", 1.5, 0, "seconds") == 1.5
