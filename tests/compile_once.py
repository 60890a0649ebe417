"""What numba compiles is compiled once, before several workers of pytest would all do so.

The result is kept in ``__pycache__`` beside the source, as by numba itself.
"""

import subprocess
import sys
from pathlib import Path

import torchmn

FOLDER = Path(torchmn.__file__).parent
KERNELS = """
import itertools
import torch, torchmn
from torchmn.comm.codecs import Quantized
from torchmn.testing import run_ranks

def train(comm):
    for codec, dtype in itertools.product(
        (Quantized(bits=8), "int8", "power_sgd"), (torch.float32, torch.float64)
    ):
        model = torch.nn.Linear(64, 64, dtype=dtype)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, codec=codec)
        model(torch.ones(2, 64, dtype=dtype)).sum().backward()
        optimizer.step()

torch.set_num_threads(1)
run_ranks(train, 2, timeout_s=300)
"""
READERS = """
import pathlib, tempfile
import torchmn.cntk as C

with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "data.ctf")
    path.write_text("|x 1 2 |y 0:1 3:2\\n|x 3 4 |y 1:1\\n")
    streams = C.io.StreamDefs(
        x=C.io.StreamDef(shape=2), y=C.io.StreamDef(shape=4, is_sparse=True)
    )
    source = C.io.MinibatchSource(C.io.CTFDeserializer(path, streams), max_sweeps=1)
    source.next_minibatch(2, {"x": source.streams.x, "y": source.streams.y})
    source.close()
"""
CODE = {
    FOLDER / "comm" / "codecs" / "kernels" / "cpu.py": KERNELS,
    FOLDER / "cntk" / "readers" / "ctf_compiled.py": READERS,
}
"""By source: what calls everything in it."""


def compile_once() -> None:
    """Compile what is not compiled yet, beside each other. Does nothing without numba."""
    started = [
        subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        for source, code in CODE.items()
        if not _is_compiled(source)
    ]
    for process in started:
        process.wait()  # an error is that of the tests, too


def _is_compiled(source: Path) -> bool:
    written_s = source.stat().st_mtime
    found = source.with_name("__pycache__").glob(f"{source.stem}.*.nbi")
    return any(file.stat().st_mtime > written_s for file in found)
