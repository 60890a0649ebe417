"""The secret of a job whose hosts are started one by one."""

from pathlib import Path

import pytest

from torchmn.control.job_secret import given_secret
from torchmn.errors import UsageError

SECRET = "0123456789abcdef"


def private_file(folder: Path, text: str = f"{SECRET}\n", mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_private_file_or_a_variable(tmp_path: Path) -> None:
    path = private_file(tmp_path)
    assert given_secret({"TORCHMN_SECRET_FILE": path}, "It") == SECRET
    assert given_secret({"TORCHMN_SECRET": SECRET}, "It") == SECRET


def test_none_says_how_to_make_one() -> None:
    with pytest.raises(UsageError, match=r"--join needs a secret .*openssl rand .*SECRET_FILE="):
        given_secret({}, "--join")


def test_a_file_that_others_may_read(tmp_path: Path) -> None:
    path = private_file(tmp_path, mode=0o640)
    with pytest.raises(UsageError, match=r"may read the secret .*mode 640.*chmod 600"):
        given_secret({"TORCHMN_SECRET_FILE": path}, "It")


def test_a_file_that_is_missing_or_short(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none' of TORCHMN_SECRET_FILE cannot be read on"):
        given_secret({"TORCHMN_SECRET_FILE": str(tmp_path / "none")}, "It")
    path = private_file(tmp_path, text="short")
    with pytest.raises(UsageError, match="has 5 characters and must have at least 16") as caught:
        given_secret({"TORCHMN_SECRET_FILE": path}, "It")
    assert "short" not in str(caught.value)


def test_two_secrets_contradict(tmp_path: Path) -> None:
    env = {"TORCHMN_SECRET_FILE": private_file(tmp_path), "TORCHMN_SECRET": SECRET}
    with pytest.raises(UsageError, match="both set"):
        given_secret(env, "It")
