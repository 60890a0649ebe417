"""What a worker measures for a description: its step without exchange, codecs, and its link."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import asdict
from typing import Any

import torch
from exchange import sides
from exchange.table import BATCH
from torch import Tensor, nn

from torchmn.communicators.link_speed import measure_links
from torchmn.compression import create_codec
from torchmn.compression.codec_timing import measure_codec
from torchmn.compression.layout import is_small

CODECS = ("int8", "1bit")
NUM_WARM_UP = 2


def facts(num_steps: int) -> dict[str, Any]:
    """Steps of plain torch, with the times at which gradients are ready; codecs; the link.

    *Collective*: all workers measure at the same time.
    """
    model, optimizer = sides.training()
    ready_s: dict[Tensor, list[float]] = defaultdict(list)
    began_s = 0.0

    def note(parameter: Tensor) -> None:
        ready_s[parameter].append(time.perf_counter() - began_s)

    hooks = [p.register_post_accumulate_grad_hook(note) for p in model.parameters()]
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    steps_s, backward_s, after_s = [], [], []
    for _ in range(NUM_WARM_UP + num_steps):
        started_s = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        began_s = time.perf_counter()
        loss.backward()
        ended_s = time.perf_counter()
        optimizer.step()
        now_s = time.perf_counter()
        steps_s.append(now_s - started_s)
        backward_s.append(ended_s - began_s)
        after_s.append(now_s - ended_s)
    for hook in hooks:
        hook.remove()
    comm = sides.communicator({})
    group = comm.inter_node_group
    link = comm.engine.call(lambda: measure_links(group)) if group is not None else None
    comm.finalize()
    return {
        "steps_s": steps_s[NUM_WARM_UP:],
        "backward_s": statistics.median(backward_s[NUM_WARM_UP:]),
        "after_s": statistics.median(after_s[NUM_WARM_UP:]),
        "gradients": {
            "ready_s": [statistics.median(times[NUM_WARM_UP:]) for times in ready_s.values()],
            "numel": [parameter.numel() for parameter in ready_s],
            "nbytes": [parameter.nbytes for parameter in ready_s],
            "is_small": [is_small(parameter.shape) for parameter in ready_s],
        },
        "codecs": {
            name: asdict(measure_codec(create_codec(name), torch.device("cpu"))) for name in CODECS
        },
        "link": None if link is None else asdict(link),
    }
