import os
import shutil
import subprocess
import sys

import pytest

from tests.netlab import missing_requirement, netlab
from torchmn.errors import LaunchError

ASK = "from tests.netlab import missing_requirement; print(missing_requirement())"


def test_other_users_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    missing_requirement.cache_clear()
    try:
        assert missing_requirement() == "test hosts need root, to create network namespaces"
        with pytest.raises(LaunchError, match="^Test hosts need root"), netlab(2):
            pass
    finally:
        missing_requirement.cache_clear()


@pytest.mark.root
@pytest.mark.processes
def test_root_of_a_container_sees_the_error_of_the_kernel() -> None:
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip(reason="needs root and setpriv, to give capabilities away")
    without = [setpriv, "--bounding-set", "-all", "--inh-caps", "-all"]
    done = subprocess.run([*without, sys.executable, "-c", ASK], capture_output=True, text=True)
    assert "test hosts cannot be created: unshare failed: " in done.stdout, done.stderr
    assert "not permitted" in done.stdout


def test_starts_without_torch() -> None:
    code = "import sys, tests.netlab; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
